"""A plan as text, for `dp-ray plan`."""

from collections.abc import Iterator
from typing import Any

from dp_ray.plan.plan import Checkpoints, Due, Evaluations, Plan, batches
from dp_ray.plan.split import Split
from dp_ray.text import counted


def table(plan: Plan) -> str:
    """The plan as text: one line for each size of global batch, then one for each group of equal workers."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    split, workers = plan.split, plan.max_workers
    yield (
        f"{split.rows:,} rows in global batches of {split.batch_size:,}: {_number(plan.steps, 'step')}, "
        f"{_number(split.shards, 'shard')} {_where(plan)}; padded 0, dropped {split.dropped:,}"
    )
    if plan.epochs > 1:
        yield _epochs(plan)
    yield from _batches(split, workers)
    if plan.evaluations:
        yield from _evaluations(plan.evaluations, split, workers)
    if plan.checkpoints:
        yield _checkpoints(plan.checkpoints, split)
    for block in plan.blocks:
        yield f"  block {block.name:<24}{block.bytes:>16,} bytes on {block.device}"
    yield from plan.remarks


def _where(plan: Plan) -> str:
    if plan.max_workers == 0:
        return "in this process, without workers"
    if plan.min_workers == plan.max_workers:
        return f"on {_number(plan.max_workers, 'worker')}"
    return f"on {plan.min_workers:,} to {plan.max_workers:,} workers, shown for {plan.max_workers:,}"


def _epochs(plan: Plan) -> str:
    total = plan.split.total_steps
    rest = total - (plan.epochs - 1) * plan.steps
    early = f", the last one ends after {rest:,}" if rest < plan.steps else ""
    return f"{plan.epochs:,} epochs, {total:,} steps in all{early}"


def _evaluations(evaluations: Evaluations, training: Split, workers: int) -> Iterator[str]:
    own = evaluations.split
    yield f"evaluations {_often(evaluations.due, training)}"
    yield f"  {own.rows:,} rows in global batches of {own.batch_size:,}: {_number(own.steps, 'step')}"
    yield from (f"  {line}" for line in _batches(own, workers))


def _checkpoints(checkpoints: Checkpoints, training: Split) -> str:
    every, best = checkpoints.every_seconds, checkpoints.best
    clock = "more by the clock" if every == "auto" else f"more every {every:g} s" if every is not None else ""
    better = f"one more for each better {best}" if best else ""
    kept = f"kept: the newest {checkpoints.keep:,}{' and the best' if best else ''}"
    parts = (f"checkpoints {_often(checkpoints.due, training)}", clock, better, kept)
    return "; ".join(part for part in parts if part)


def _often(due: Due, training: Split) -> str:
    """After which steps something is due: `every 4 steps, every epoch and after the last step: 13 times`."""
    named = [(due.every_steps, "step"), (due.every_epochs, "epoch")]
    parts = [f"every {noun}" if count == 1 else f"every {count:,} {noun}s" for count, noun in named if count]
    if not due.recurs(training, training.total_steps - 1):
        parts.append("after the last step")
    return f"{' and '.join(parts)}: {_number(due.times(training), 'time')}"


def _batches(split: Split, workers: int) -> Iterator[str]:
    for batch in batches(split, workers):
        yield f"{batch['steps']:,} x {_number(batch['rows'], 'row')}"
        yield from _folded([_worker(batch, shards) for shards in batch["worker_shards"]])


def _number(number: int, noun: str) -> str:
    """`counted`, with thousands set apart."""
    return counted(number, noun).replace(str(number), f"{number:,}", 1)


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
