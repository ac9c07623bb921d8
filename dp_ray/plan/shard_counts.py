"""The numbers of shards that a run with `shards: auto` tries: more and more of them, of fewer and fewer rows."""

from dp_ray.plan.split import chunk_sizes
from dp_ray.text import listed


def shard_counts(rows: int, workers: int) -> list[int]:
    """The numbers to try for global batches of at most `rows` rows: the workers', and twice the last one each time.

    The last one gives shards of a single row.

    >>> shard_counts(30, 4), shard_counts(3, 0), shard_counts(2, 4)
    ([4, 8, 16, 30], [1, 2, 3], [4])
    """
    counts, most = [max(1, workers)], max(rows, workers)
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts


def what_auto_does(rows: int, workers: int) -> str:
    """A line for the plan of a run whose number of shards is still to be found."""
    who, all_of_them = ("the workers try", " on all of them") if workers else ("this process tries", "")
    counts = shard_counts(rows, workers)
    tried = listed([f"{count} ({chunk_sizes(rows, count)[0]})" for count in counts])
    return (
        f"shards: auto: before the first step {who} so many shards (of at most so many rows): {tried}; the run keeps "
        f"the first number that fits{all_of_them}; shown for {counts[0]}"
    )
