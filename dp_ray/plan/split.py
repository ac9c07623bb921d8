"""Cut an epoch into global batches, a global batch into shards, and assign the shards to workers.

Pure arithmetic, without tensors: every answer is O(1) in the number of rows. Here are also the work that remains of
each worker, the cut of a job's steps into files, and the cut of a sequence of blocks into parts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple


def chunk_sizes(rows: int, shards: int) -> list[int]:
    """Return rows of each of `shards` shards, as `torch.chunk` cuts `rows` rows, EMPTY shards included as 0.

    >>> chunk_sizes(30, 8), chunk_sizes(10, 8)
    ([4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2, 0, 0, 0])
    """
    return [stop - start for start, stop in (chunk_bounds(rows, shards, shard) for shard in range(shards))]


def chunk_bounds(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """Return first row and end (exclusive) of one shard within its batch; both are equal if the shard is EMPTY."""
    size = -(-rows // shards)
    return min(rows, shard * size), min(rows, (shard + 1) * size)


def num_filled(rows: int, shards: int) -> int:
    """Return how many of `shards` shards have rows; the EMPTY ones come last."""
    return -(-rows // -(-rows // shards)) if rows else 0


def worker_shards(shards: int, world_size: int, rank: int) -> range:
    """Return the consecutive shards that worker `rank` of `world_size` runs.

    >>> [list(worker_shards(8, 3, rank)) for rank in range(3)]
    [[0, 1], [2, 3, 4], [5, 6, 7]]
    """
    return range(shards * rank // world_size, shards * (rank + 1) // world_size)


@lru_cache(maxsize=64)
def worker_pieces(rows: int, shards: int, world_size: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    """Return each non-EMPTY shard of a worker with its first row and end, in a global batch of `rows` rows.

    It is remembered, since nearly all global batches of a job have the same number of rows.
    """
    pieces = ((shard, *chunk_bounds(rows, shards, shard)) for shard in worker_shards(shards, world_size, rank))
    return tuple(piece for piece in pieces if piece[1] < piece[2])


@dataclass(frozen=True)
class Shard:
    """One piece of one global batch: positions `start .. stop - 1` of the order of `epoch`.

    `step` counts from the job's start, over all epochs. Of its `planned_rows`, `rows` are not set aside.
    """

    step: int
    shard: int
    start: int
    stop: int
    epoch: int = 0
    missing: tuple[int, ...] = ()  # positions whose samples were set aside, in order
    # They are asked for many times a step.
    planned_rows: int = field(init=False, repr=False, compare=False)
    rows: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        planned = self.stop - self.start
        object.__setattr__(self, "planned_rows", planned)
        object.__setattr__(self, "rows", planned - len(self.missing))

    @property
    def positions(self) -> Sequence[int]:
        """The positions of its rows in the order of its epoch."""
        every = range(self.start, self.stop)
        return [at for at in every if at not in self.missing] if self.missing else every


@dataclass(frozen=True)
class Split:
    """How `epochs` epochs of `rows` samples are cut into global batches, and these into shards."""

    rows: int
    batch_size: int
    shards: int
    drop_last: bool = False
    epochs: int = 1
    max_steps: int | None = None

    @cached_property
    def steps(self) -> int:
        """Global batches in an epoch, whatever `max_steps` is."""
        full, rest = divmod(self.rows, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    @cached_property
    def total_steps(self) -> int:
        """Global batches in all epochs, at most `max_steps`: the steps are 0 .. total_steps - 1."""
        steps = self.steps * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def is_cut_short(self) -> bool:
        """Whether `max_steps` ends the last epoch of a run before its end."""
        return self.steps > 0 and self.total_steps % self.steps > 0

    @property
    def epochs_begun(self) -> int:
        """The epochs that a run begins; `max_steps` may end it before the last ones."""
        return -(-self.total_steps // max(1, self.steps))

    @property
    def epoch_steps(self) -> int:
        """The steps of an epoch that a run does: fewer than `steps` if `max_steps` ends the first epoch."""
        return min(self.steps, self.total_steps)

    @property
    def largest_batch(self) -> int:
        """Rows of the largest global batch."""
        return min(self.rows, self.batch_size)

    @property
    def total_rows(self) -> int:
        """Rows of all steps of all epochs."""
        return self.rows_of(self.total_steps)

    def rows_of(self, num_steps: int) -> int:
        """Return the rows of the first `num_steps` steps of all epochs."""
        epochs, rest = divmod(num_steps, max(1, self.steps))
        return epochs * self.rows_kept + rest * self.batch_size

    def cursor(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the step's number within that epoch."""
        return divmod(step, max(1, self.steps))

    @property
    def dropped(self) -> int:
        """Samples of an epoch that are in no global batch: 0 without `drop_last`."""
        return self.rows - self.rows_kept

    @property
    def rows_kept(self) -> int:
        """Samples of an epoch that are in a global batch."""
        return min(self.rows, self.steps * self.batch_size)

    def batch(self, step: int) -> tuple[int, int]:
        """Return first position and end (exclusive) of the global batch of `step`, in the order of its epoch.

        Raises IndexError if the job has no such step.
        """
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} is outside the job's {self.total_steps} steps")
        first = step % self.steps * self.batch_size
        return first, min(self.rows, first + self.batch_size)

    def whole(self, step: int) -> Shard:
        """Return the whole global batch of `step`, as shard -1."""
        return Shard(step, -1, *self.batch(step), step // self.steps)

    def shard(self, step: int, shard: int) -> Shard:
        """Return one shard of the global batch of `step`, maybe EMPTY."""
        first, end = self.batch(step)
        start, stop = chunk_bounds(end - first, self.shards, shard)
        return Shard(step, shard, first + start, first + stop, step // self.steps)

    def worker(self, world_size: int, rank: int, step: int) -> list[Shard]:
        """Return the non-empty shards of `step` that worker `rank` of `world_size` runs, in shard order."""
        epoch, number = divmod(step, self.steps)
        first = number * self.batch_size
        # By the remembered pieces, not by `shard` for each: it is asked in every step.
        pieces = worker_pieces(min(self.rows - first, self.batch_size), self.shards, world_size, rank)
        return [Shard(step, shard, first + start, first + stop, epoch) for shard, start, stop in pieces]

    def batch_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield (steps, rows) of each size of global batch in an epoch: the full ones, then a short last one."""
        full, rest = divmod(self.rows, self.batch_size)
        if full:
            yield full, self.batch_size
        if rest and not self.drop_last:
            yield 1, rest


def split_of_run(job: dict[str, Any], rows: int) -> Split:
    """Return how a run cuts the rows of its dataset, from the job in its run.json."""
    lengths = (job["epochs"], job["max_steps"]) if job["task"] == "train" else (1, None)
    shards = 1 if job["shards"] == "auto" else job["shards"]  # still to be found: no step is done
    return Split(rows, job["batch_size"], shards, job["drop_last"], *lengths)


class Range(NamedTuple):
    """Steps `first_step .. end_step - 1` of shards `first_shard .. end_shard - 1`."""

    first_step: int
    end_step: int
    first_shard: int
    end_shard: int


class Done:
    """The finished ranges, of which more may come in any order; `shard in done` asks for one shard."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._steps: dict[int, list[tuple[int, int]]] = {}  # by shard: spans of steps in order, with gaps between
        for done in ranges:
            self.add(done)

    def add(self, done: Range) -> None:
        """Add steps of shards that are done; a later attempt's part may cover steps of earlier ones."""
        for shard in range(done.first_shard, done.end_shard):
            spans, first, end = self._steps.setdefault(shard, []), done.first_step, done.end_step
            at = bisect_left(spans, first, key=itemgetter(1))  # the first span that ends there or later
            after = bisect_right(spans, end, key=itemgetter(0))  # the first one that begins behind the new one
            if at < after:
                first, end = min(first, spans[at][0]), max(end, spans[after - 1][1])
            spans[at:after] = [(first, end)]

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __contains__(self, piece: Shard) -> bool:
        spans = self._steps.get(piece.shard, [])
        at = bisect_right(spans, piece.step, key=itemgetter(1))  # the first span that ends behind the step
        return at < len(spans) and spans[at][0] <= piece.step

    def through(self, shards: Iterable[int]) -> int:
        """Return how many steps, from step 0 on without a gap, are done in all of these shards."""
        firsts = [self._steps.get(shard, [(0, 0)])[0] for shard in shards]
        return min((end if first == 0 else 0 for first, end in firsts), default=0)


@dataclass(frozen=True)
class Work:
    """The steps of one worker from `start` on, each with its non-empty shards that are not done.

    It can be iterated more than once. `again` gives of a step those of another worker that this one runs too.
    """

    split: Split
    world_size: int = 1
    rank: int = 0
    done: Done = field(default_factory=Done)
    start: int = 0
    again: Callable[[int], list[Shard]] | None = None

    @property
    def shards(self) -> range:
        """The worker's shards of every step, EMPTY and finished ones included."""
        return worker_shards(self.split.shards, self.world_size, self.rank)

    def of_step(self, step: int) -> list[Shard]:
        """Return the worker's shards of a step."""
        shards = self.split.worker(self.world_size, self.rank, step)
        return [shard for shard in shards if shard not in self.done]

    def has(self, step: int) -> bool:
        """Return whether the worker has shards of a step."""
        first, end = self.split.batch(step)
        pieces = worker_pieces(end - first, self.split.shards, self.world_size, self.rank)
        return bool(self.of_step(step) if self.done else pieces)

    def __iter__(self) -> Iterator[tuple[int, list[Shard]]]:
        of_step = self.of_step if self.done else partial(self.split.worker, self.world_size, self.rank)
        for step in range(self.start, self.split.total_steps):
            yield step, of_step(step)


def num_files(total_bytes: int, file_bytes: int, steps: int) -> int:
    """Return how many files hold so many bytes, about `file_bytes` each; none has less than a step."""
    return max(1, min(steps, -(-total_bytes // file_bytes)))


@dataclass(frozen=True)
class FilePlan:
    """The steps `0 .. steps - 1` in `files` files: consecutive, and as evenly as possible.

    >>> [FilePlan(3, 8).steps_of(number) for number in range(3)]
    [range(0, 2), range(2, 5), range(5, 8)]
    """

    files: int
    steps: int

    def steps_of(self, number: int) -> range:
        """Return the steps of a file."""
        return range(self.steps * number // self.files, self.steps * (number + 1) // self.files)

    def number_of(self, step: int) -> int:
        """Return the file that holds a step."""
        return ((step + 1) * self.files - 1) // self.steps

    def name(self, number: int) -> str:
        """Return the name of a file; the names sort as the files do."""
        width = max(5, len(str(self.files)))  # all of one width, for readers that sort names as texts
        return f"{number:0{width}}-of-{self.files:0{width}}.parquet"

    def most_ahead(self, num_mergers: int) -> int:
        """Return by how many steps a worker's loop may lead the merging of its files.

        It is one file for each merging worker: with less, some would have nothing to merge.
        """
        return max(1, num_mergers * self.steps // self.files)

    def enough_room(self, num_mergers: int) -> int:
        """Return the lead, in steps, at which a loop that has waited goes on: half a file less than the most."""
        return self.most_ahead(num_mergers) - self.steps // self.files // 2


def balance(sizes: Sequence[int], parts: int) -> list[range]:
    """Return the blocks of each part: consecutive, none empty, the largest part as small as possible.

    >>> balance([4, 1, 1, 4, 2], 2)
    [range(0, 3), range(3, 5)]

    Raises ValueError if there are fewer blocks than parts.
    """
    if not 1 <= parts <= len(sizes):
        raise ValueError(f"{len(sizes)} blocks cannot be cut into {parts} parts of at least one each")
    # Bisect the smallest limit of rows within which so many parts hold all blocks.
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        needed, held = 1, 0
        for size in sizes:
            needed, held = (needed + 1, size) if held + size > middle else (needed, held + size)
        low, high = (low, middle) if needed <= parts else (middle + 1, high)
    return _cut(sizes, parts, low)


def _cut(sizes: Sequence[int], parts: int, limit: int) -> list[range]:
    """Fill each part up to the limit, but leave at least one block for each later part."""
    cuts, held = [0], 0
    for at, size in enumerate(sizes):
        still = parts - len(cuts)
        is_full = held + size > limit
        if at > cuts[-1] and still and (is_full or len(sizes) - at == still):
            cuts.append(at)
            held = 0
        held += size
    return [range(first, end) for first, end in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
