"""Runs shards of a step, one by one and without an update, and looks at their rows and at what is not finite."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.job import Job
from dp_ray.plan.split import Shard, Split
from dp_ray.replica.buffers import UnchangedBuffers
from dp_ray.replica.not_finite import NotFiniteFinder, Place, first_not_finite
from dp_ray.replica.out_of_memory import ShardSize, advised
from dp_ray.replica.read_requests import Indices
from dp_ray.replica.rng import ForwardSeeds
from dp_ray.replica.row_losses import RowLosses, row_losses
from dp_ray.replica.screening import not_finite
from dp_ray.replica.shard_loss import ShardLoss
from dp_ray.replica.step import Metrics, Step
from dp_ray.replica.user_code import at, place, raising
from dp_ray.tensors.nested import copied


class Loaded(NamedTuple):
    """A shard that was loaded: its sample indices, and its batch on the device; None if it has no rows."""

    shard: Shard
    samples: Indices
    batch: Any


class Findings(NamedTuple):
    """What a look at shards found: the loss of each row, and the first of each kind that is not finite.

    `weights` names a parameter or buffer of the state before the step, `batch` the place in a shard's batch.
    """

    rows: list[tuple[Loaded, RowLosses]]
    weights: str | None
    batch: str | None
    output: Place | None
    gradient: Place | None


class Look:
    """The shards of a step as the training runs them, but for the update: the same seeds, buffers and modes."""

    def __init__(self, job: Job, model: nn.Module, step: Step, device: torch.device) -> None:
        self.model = model
        self._job = job
        self._step = step
        self._device = device
        self._loss = ShardLoss(model, step, Metrics({}, job.batch_dim), job, device)
        self._seeds = ForwardSeeds(job.seed, model, device)

    def find(self, loaded: Sequence[Loaded], split: Split, step: int) -> Findings:
        """Forward and backward of each shard with rows; raises ModelError, naming it, for user errors.

        They are shards of a step, or some of them. The model stays as it is.
        """
        weights, finder, batch = first_not_finite(self.model), NotFiniteFinder(self.model), None
        rows = []
        with finder.hooked():
            for one in loaded:
                if batch is None and (where := not_finite(one.batch)):
                    batch = f"{where}, in shard {one.shard.shard}"
                rows.append((one, self._shard(one, split.whole(step).rows, finder)))
        return Findings(rows, weights, batch, finder.output, finder.gradient)

    def forward(self, one: Loaded) -> torch.Tensor:
        """The sum of a shard's losses."""
        self._seeds.begin(one.shard)
        with at(place(one.shard)):
            loss: torch.Tensor = self._loss(copied(one.batch), one.shard.rows)
        return loss

    def _shard(self, one: Loaded, batch_rows: int, finder: NotFiniteFinder) -> RowLosses:
        size = ShardSize(one.shard.rows, batch_rows, self._job.num_shards)
        with self.unchanged(), advised(self._job, place(one.shard), size):
            with finder.forward(one.shard.shard):
                loss = self.forward(one)
            given = self._loss.found.step_output
            found = row_losses(
                self._job, self._step, self.model, copied(one.batch), given, one.shard.rows, self._device
            )
            with raising(f"{place(one.shard)}: backward"):
                (loss / batch_rows).backward()  # type: ignore[no-untyped-call]
            return found

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """After the block, the model has its values of before it, and no gradients."""
        buffers = UnchangedBuffers(self.model)
        try:
            with buffers.forward():
                yield
            buffers.restore()
        finally:
            buffers.put_back()
            self.model.zero_grad(set_to_none=True)
