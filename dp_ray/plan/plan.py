"""What a job will do, as a pure value: the dry run's table and JSON."""

from typing import Any

from dp_ray.plan.split import Split, chunk_sizes, worker_shards


def plan(split: Split, workers: int, epochs: int = 1) -> dict[str, Any]:
    """The plan as plain JSON values; equal global batches are folded, so it is small for any number of rows."""
    dealt = [list(worker_shards(split.shards, max(1, workers), rank)) for rank in range(max(1, workers))]
    return {
        "rows": split.rows,
        "batch_size": split.batch_size,
        "shards": split.shards,
        "workers": workers,
        "epochs": epochs,
        "steps": split.steps,
        "batches": [
            {
                "steps": steps,
                "rows": rows,
                "shard_rows": chunk_sizes(rows, split.shards),
                "worker_shards": dealt,
            }
            for steps, rows in split.kinds()
        ],
        "padded": 0,
        "dropped": split.dropped,
    }


def table(planned: dict[str, Any]) -> str:
    """The plan for reading: one line for each kind of global batch and each worker."""
    lines = [
        f"{planned['rows']:,} rows in global batches of {planned['batch_size']:,}: {planned['steps']:,} steps, "
        f"{planned['shards']} shards on {planned['workers']} workers; padded 0, dropped {planned['dropped']}"
    ]
    for batch in planned["batches"]:
        lines.append(f"{batch['steps']:,} x {batch['rows']:,} rows")
        lines += _folded([_worker(batch, shards) for shards in batch["worker_shards"]])
    lines += [
        f"  block {block['name']:<24}{block['bytes']:>16,} bytes on {block['device']}"
        for block in planned.get("blocks", ())
    ]
    return "\n".join(lines)


def _worker(batch: dict[str, Any], shards: list[int]) -> str:
    rows = [batch["shard_rows"][shard] for shard in shards]
    parts = " + ".join(map(str, rows)) if len(rows) <= 8 else f"{len(rows)} shards"
    return parts if len(rows) == 1 else f"{parts} = {sum(rows)}"


def _folded(workers: list[str]) -> list[str]:
    """One line for each run of workers that look alike."""
    lines: list[str] = []
    first = 0
    for rank in range(1, len(workers) + 1):
        if rank == len(workers) or workers[rank] != workers[first]:
            who = f"rank {first}" if rank - first == 1 else f"ranks {first}-{rank - 1}"
            rows = "row" if workers[first] == "1" else "rows"
            lines.append(f"  {who:<14}{workers[first]} {rows}" + (" each" if rank - first > 1 else ""))
            first = rank
    return lines
