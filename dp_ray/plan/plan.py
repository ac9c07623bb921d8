"""What a job will do, as a pure value: the dry run's table and JSON."""

from collections.abc import Iterable, Iterator
from typing import Any

from dp_ray.plan.split import Split, chunk_sizes, num_filled, worker_shards


def plan(split: Split, workers: int) -> dict[str, Any]:
    """The plan as plain JSON values; equal global batches are folded, so it is small for any number of rows.

    `steps` and `batches` are those of an epoch. `total_steps` is there only if `max_steps` cuts the last epoch short.
    """
    total = split.total_steps
    epochs, steps = -(-total // max(1, split.steps)), min(split.steps, total)
    told = remarks(split, workers)
    dealt = [list(worker_shards(split.shards, max(1, workers), rank)) for rank in range(max(1, workers))]
    return {
        "rows": split.rows,
        "batch_size": split.batch_size,
        "shards": split.shards,
        "workers": workers,
        "epochs": epochs,
        "steps": steps,
        **({} if total == epochs * steps else {"total_steps": total}),
        "batches": [
            {
                "steps": steps,
                "rows": rows,
                "shard_rows": chunk_sizes(rows, split.shards),
                "worker_shards": dealt,
            }
            for steps, rows in _first_steps(split.batch_sizes(), total)
        ],
        "padded": 0,
        "dropped": split.dropped,
        **({"remarks": told} if told else {}),
    }


def _first_steps(kinds: Iterable[tuple[int, int]], steps: int) -> Iterator[tuple[int, int]]:
    """The (steps, rows) of the first `steps` global batches."""
    for count, rows in kinds:
        if steps > 0:
            yield min(count, steps), rows
        steps -= count


def remarks(split: Split, workers: int) -> list[str]:
    """Warnings about how a job is cut and assigned to workers, a line each."""
    found = []
    largest = min(split.rows, split.batch_size)
    if split.batch_size > split.rows:
        found.append(f"batch_size {split.batch_size} is larger than the dataset: its {split.rows} rows are one batch")
    filled = num_filled(largest, split.shards)
    idle = sum(worker_shards(split.shards, workers, rank).start >= filled for rank in range(workers))
    if idle:
        never = "never has a row" if idle == 1 else "never have a row"
        found.append(
            f"{idle} of {workers} workers {never}: the largest batch is {largest} rows in {filled} shards; "
            "use fewer workers or a larger batch_size"
        )
    return found


def table(planned: dict[str, Any]) -> str:
    """The plan as text: one line for each size of global batch, then one for each group of equal workers."""
    epochs = planned["epochs"]
    lines = [
        f"{planned['rows']:,} rows in global batches of {planned['batch_size']:,}: {planned['steps']:,} steps, "
        f"{planned['shards']} shards on {planned['workers']} workers; padded 0, dropped {planned['dropped']}"
    ]
    if epochs > 1:
        total = planned.get("total_steps", epochs * planned["steps"])
        rest = total - (epochs - 1) * planned["steps"]
        early = f", the last one ends after {rest:,}" if rest < planned["steps"] else ""
        lines.append(f"{epochs:,} epochs, {total:,} steps in all{early}")
    for batch in planned["batches"]:
        lines.append(f"{batch['steps']:,} x {batch['rows']:,} rows")
        lines += _folded([_worker(batch, shards) for shards in batch["worker_shards"]])
    lines += [
        f"  block {block['name']:<24}{block['bytes']:>16,} bytes on {block['device']}"
        for block in planned.get("blocks", ())
    ]
    lines += planned.get("remarks", ())
    return "\n".join(lines)


def _worker(batch: dict[str, Any], shards: list[int]) -> str:
    rows = [batch["shard_rows"][shard] for shard in shards]
    parts = " + ".join(map(str, rows)) if len(rows) <= 8 else f"{len(rows)} shards"
    return parts if len(rows) == 1 else f"{parts} = {sum(rows)}"


def _folded(workers: list[str]) -> list[str]:
    """One line for each group of consecutive workers with the same text."""
    lines: list[str] = []
    first = 0
    for rank in range(1, len(workers) + 1):
        if rank == len(workers) or workers[rank] != workers[first]:
            who = f"rank {first}" if rank - first == 1 else f"ranks {first}-{rank - 1}"
            rows = "row" if workers[first] == "1" else "rows"
            lines.append(f"  {who:<14}{workers[first]} {rows}" + (" each" if rank - first > 1 else ""))
            first = rank
    return lines
