"""What a run will do, as one value: `dp-ray plan` shows it, and the driver executes it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dp_ray.plan.split import Split, chunk_sizes, num_filled, worker_shards


@dataclass(frozen=True)
class Due:
    """After which steps of a training something is due: every so many steps or epochs, and after the last step."""

    every_steps: int | None = None
    every_epochs: int | None = None

    def after(self, split: Split, step: int) -> bool:
        """Whether it is due after `step`, counted from 0."""
        return step + 1 == split.total_steps or self.recurs(split, step)

    def recurs(self, split: Split, step: int) -> bool:
        """Whether it is due after `step` by its steps or epochs, even if the training goes on."""
        return any((step + 1) % period == 0 for period in self._periods(split))

    def times(self, split: Split) -> int:
        """How many times it is due in the whole training."""
        total, periods = split.total_steps, self._periods(split)
        both = total // math.lcm(*periods) if len(periods) == 2 else 0
        regular = sum(total // period for period in periods) - both
        return regular + (total > 0 and not self.recurs(split, total - 1))

    def to_json(self, split: Split) -> dict[str, int]:
        """The keys that are set, and `times`."""
        return {**_given(asdict(self)), "times": self.times(split)}

    def _periods(self, split: Split) -> list[int]:
        """Its periods in steps: at most two."""
        found = (self.every_steps, self.every_epochs and self.every_epochs * split.steps)
        return [period for period in found if period]


@dataclass(frozen=True)
class Evaluations:
    """The evaluations during a training: how their dataset is cut, and after which steps of the training they run."""

    split: Split
    due: Due


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a training: after which steps, how many are kept, and which more there may be.

    `every_seconds` is the job's: more by the clock, unless it is None. `best` is the metric of an evaluation: one
    more, which is kept, whenever it is better than before.
    """

    due: Due
    keep: int
    every_seconds: float | Literal["auto"] | None = None
    best: str | None = None


@dataclass(frozen=True)
class PlacedBlock:
    """A block of a model over several devices: its name, its bytes (parameters and buffers), and its device."""

    name: str
    bytes: int
    device: str


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    `split` is that of the task's own dataset, over all epochs. `evaluations` and `checkpoints` are a training's.
    `blocks` are there if the job places the model's blocks on several devices, and only for `dp-ray plan`: to find
    them, the model is built, which in a run is left to the workers. `remarks` are warnings, a line each.
    """

    split: Split
    min_workers: int
    max_workers: int
    evaluations: Evaluations | None = None
    checkpoints: Checkpoints | None = None
    blocks: tuple[PlacedBlock, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def rows(self) -> dict[str, int]:
        """The lengths of the datasets, by their keys."""
        evaluated = {"eval.dataset": self.evaluations.split.rows} if self.evaluations else {}
        return {"dataset": self.split.rows, **evaluated}

    @property
    def epochs(self) -> int:
        """The epochs that a run begins; `max_steps` may end it before the last ones."""
        return -(-self.split.total_steps // max(1, self.split.steps))

    @property
    def steps(self) -> int:
        """The steps of an epoch that a run does: fewer than the split's if `max_steps` ends the first epoch."""
        return min(self.split.steps, self.split.total_steps)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values; equal global batches are folded, so it is small for any number of rows.

        `steps` and `batches` are those of an epoch. What does not apply is left out: `total_steps` unless `max_steps`
        cuts the last epoch short, `min_workers` unless the job is elastic, and what no job of this task has.
        """
        split, total = self.split, self.split.total_steps
        is_elastic = self.min_workers != self.max_workers
        return {
            "rows": split.rows,
            "batch_size": split.batch_size,
            "shards": split.shards,
            "workers": self.max_workers,
            **({"min_workers": self.min_workers} if is_elastic else {}),
            "epochs": self.epochs,
            "steps": self.steps,
            **({} if total == self.epochs * self.steps else {"total_steps": total}),
            "batches": batches(split, self.max_workers),
            "padded": 0,
            "dropped": split.dropped,
            **self._of_training(),
            **({"blocks": [asdict(block) for block in self.blocks]} if self.blocks else {}),
            **({"remarks": list(self.remarks)} if self.remarks else {}),
        }

    def _of_training(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.evaluations:
            own = self.evaluations.split
            sizes = {"rows": own.rows, "batch_size": own.batch_size, "steps": own.steps}
            due = self.evaluations.due.to_json(self.split)
            found["evaluate"] = {**sizes, **due, "batches": batches(own, self.max_workers)}
        if self.checkpoints:
            more = {key: value for key, value in asdict(self.checkpoints).items() if key != "due"}
            found["checkpoints"] = {**self.checkpoints.due.to_json(self.split), **_given(more)}
        return found


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def batches(split: Split, workers: int) -> list[dict[str, Any]]:
    """Each size of global batch in an epoch: its steps and rows, the rows of its shards, and each worker's shards."""
    workers = max(1, workers)
    dealt = [list(worker_shards(split.shards, workers, rank)) for rank in range(workers)]
    return [
        {"steps": steps, "rows": rows, "shard_rows": chunk_sizes(rows, split.shards), "worker_shards": dealt}
        for steps, rows in _first_steps(split.batch_sizes(), split.total_steps)
    ]


def _first_steps(kinds: Iterable[tuple[int, int]], steps: int) -> Iterator[tuple[int, int]]:
    """The (steps, rows) of the first `steps` global batches."""
    for count, rows in kinds:
        if steps > 0:
            yield min(count, steps), rows
        steps -= count


def remarks(split: Split, workers: int) -> list[str]:
    """Warnings about how a job is cut and assigned to workers, a line each."""
    found = []
    largest = split.largest_batch
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
