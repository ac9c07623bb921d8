"""The prediction loop of one worker: shard in, outputs out. It uses neither Ray nor files.

Begin at `predict`. What is kept of the outputs: `engine/selection.py`.
"""

import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.forward.model import autocast, call_model, evaluating
from dp_ray.engine.forward.replica import Forwards, Replica
from dp_ray.engine.forward.step import StepEnd, model_hint
from dp_ray.engine.loads.items import Plain, split_passthrough
from dp_ray.engine.loads.loading import LoadedStep
from dp_ray.engine.selection import OutputSelector
from dp_ray.engine.sums.whole_batch import NO_ROWS
from dp_ray.engine.user_code import locating, location, raise_as
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.job.samples import Indices
from dp_ray.plan.split import Shard, Work
from dp_ray.tensors.ragged import without_texts


class PredictedShard(NamedTuple):
    """A shard that has run: its outputs that are kept, and the carried values of its samples, by key."""

    shard: Shard
    indices: Indices
    outputs: Any
    carried: dict[str, list[Plain]]


@dataclass(frozen=True)
class Prediction:
    """How a worker predicts its `work`: the clock splits the steps' time, `forwards` run a model that is sharded."""

    job: Job
    device: torch.device
    work: Work
    clock: StepClock = field(default_factory=StepClock)
    forwards: Forwards = field(default_factory=Forwards)

    @functools.cached_property
    def select(self) -> OutputSelector:
        """The function of a shard's outputs that picks those to keep."""
        return OutputSelector(self.job, self.device)

    @contextmanager
    def replica(self, model: nn.Module) -> Iterator[Replica]:
        """Give what runs the shards; in the block the model is in eval mode, and stays so."""
        # The autocast around all shards is off: it keeps converted parameters from one shard to the next.
        with evaluating(model) as state, autocast(self.job.precision, self.device, enabled=False):
            place = self.job.seed, model, self.device, state, self.work
            yield Replica(*place, self.forwards, self.clock, after=self.select.after)

    def forward(self, model: nn.Module) -> Callable[[Any], Any]:
        """Return a function of inputs that returns the model's outputs; an error says that the model raised it."""
        call, called = self.job.call, self.forwards.gathering(call_model)

        def forward(inputs: Any) -> Any:
            try:
                return called(model, inputs, call)
            except (Exception, SystemExit) as error:
                raise_as(error, "model", functools.partial(model_hint, model, inputs, call))

        return forward


def predict(
    prediction: Prediction, replica: Replica, steps: Iterator[LoadedStep], rows_of: Mapping[str, bool] = NO_ROWS
) -> Generator[PredictedShard | StepEnd, None, None]:
    """Run the model over each shard of the steps; yield the shards that have rows, and the end of each step.

    `rows_of` says by path which lists of texts have a row for each sample; of others their length tells.
    `torch.no_grad` and autocast are on while a shard runs, not while its outputs are taken. Let go of a shard before
    the next one is asked for: it holds the outputs. Raises ModelError, naming step and shard, if the model raises.
    """
    forwards, clock, job = prediction.forwards, prediction.clock, prediction.job
    forward = prediction.forward(replica.model)
    # Both can be entered again. It is no inference mode: there a model that turns gradients on, as for forces, raises
    # an error or gets zeros. Converted weights are not kept: all of them would take half of the model's memory more.
    no_grad, precision = torch.no_grad(), autocast(job.precision, prediction.device, keeps=False)

    def run(shard: Shard, indices: Indices, batch: Any) -> PredictedShard:
        try:
            inputs, carried = split_passthrough(batch, indices)
            with no_grad, precision:
                clock.enter(Part.FORWARD)
                outputs = replica.run(shard, forward, inputs)
                clock.enter(Part.OUTPUTS)
                kept = _with_columns(prediction.select(outputs, inputs, shard), shard, rows_of)
            return PredictedShard(shard, indices, kept, carried)
        except (RuntimeError, ModelError) as error:
            replica.raise_advised(error, shard, job)

    dummies = None if forwards.are_collective else ()  # which need not be asked for in each step
    for loaded in map(forwards.begin, steps):
        for shard, indices, batch, _ in replica.rounds(loaded, dummies):
            if shard is None:  # the other workers need this one to gather parameters
                clock.enter(Part.OTHER)
                replica.restore()
                with no_grad, precision:
                    replica.run(None, forward, batch)
            else:
                # No name holds the outputs: those that are not kept are freed before the next shard.
                yield run(shard, indices, batch)
        clock.enter(Part.OTHER)
        replica.restore()
        yield StepEnd(loaded.step)
    with no_grad, precision:
        forwards.end()


def _with_columns(kept: Any, shard: Shard, rows_of: Mapping[str, bool]) -> Any:
    """Return outputs in which a list of texts is a column, if it has a row for each sample."""
    if type(kept) is torch.Tensor:  # the usual case, without texts
        return kept

    def is_column(path: str, length: int) -> bool:
        has_rows = rows_of.get(path, length == shard.rows)
        if has_rows and length != shard.rows:
            name = f"output {path!r}" if path else "the output"
            raise ModelError(f"{name} is a list of {length} texts for {shard.rows} rows: give one text for each row")
        return has_rows

    with locating(location(shard)):
        return without_texts(kept, is_column)
