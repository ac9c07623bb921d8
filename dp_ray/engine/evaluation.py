"""Evaluation: means over a whole dataset, each sample counted once, the same bits on any number of workers."""

import copy
import math
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.forward.buffers import modules_beside
from dp_ray.engine.forward.model import autocast, evaluating
from dp_ray.engine.forward.replica import Replica
from dp_ray.engine.forward.step import (
    Compare,
    Metrics,
    Step,
    StepEnd,
    StepOutput,
    Weighted,
    as_tensor,
    row_of,
    run_step,
)
from dp_ray.engine.loads.loading import LoadedStep
from dp_ray.engine.placement import Placement
from dp_ray.engine.ship import refused
from dp_ray.engine.sums.whole_batch import (
    NO_ROWS,
    ShardOutput,
    WholeBatches,
    build_over_batch,
    built_metric,
    detached,
    merged_batch,
    seed_of_batch,
)
from dp_ray.engine.user_code import describe_compared, locating, location, reraise_as
from dp_ray.engine.world import CPU, everyone, gathered, has_peers, message_of
from dp_ray.errors import DataError, JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import NamedEval, is_over_batch
from dp_ray.job.targets import keeps_state
from dp_ray.plan.history import LOSS_OF
from dp_ray.plan.mixture import Mixture
from dp_ray.plan.split import Shard, Work
from dp_ray.system.threads import waiting

NO_LOSS = Weighted(torch.zeros(()), math.inf)  # of a step that gives none in an evaluation: no weight, no mean


def build_metrics(job: Job, mixture: Mixture | None = None) -> tuple[Metrics, dict[str, Any]]:
    """Build the job's metrics: the functions of (outputs, target), and by name the torchmetrics objects.

    With the `mixture` of a training's dataset, its loss is measured by source, too.

    Raises JobError if a metric cannot be imported, built or called, or put together from the states of shards.
    """
    functions: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name, metric in job.metrics.items():
        if is_over_batch(metric):
            continue  # an evaluation measures it of each batch
        made = built_metric(name, metric)
        (states if keeps_state(made) else functions)[name] = made
        if keeps_state(made) and job.num_shards > 1:
            check_merges(name, made)
        if keeps_state(made) and everyone() is not None:
            try:
                message_of(made)  # as after an evaluation; a user's __getstate__ may raise anything
            except Exception as error:
                raise refused(f"metrics.{name}", made, error, message_of) from error
    return Metrics(functions, job.batch_dim, mixture, job.loss_is_sum), states


def check_watched(job: Job, states: Mapping[str, Any]) -> None:
    """Raise JobError if the job watches a name that no metric can give.

    A metric with a state may give several numbers, each with a name. A function gives one.
    """
    for where, name in job.watched.items():
        if name not in job.eval_names and not set(job.owners(name)) & states.keys():
            raise JobError(
                f"{where}: eval measures {', '.join(job.eval_names)}, and the elements of a metric that has several, "
                f"like eval_recall_0; got {name!r}"
            )


class EvaluatedShard(NamedTuple):
    """A shard that has been evaluated, with its batch and its output."""

    shard: Shard
    batch: Any
    step_output: StepOutput


class Evaluated(NamedTuple):
    """The mean of the loss and of each metric over all samples, the same on every rank, and over how many rows.

    There is no loss if the user's step gives none in an evaluation.
    """

    metrics: dict[str, float]
    rows: float


@dataclass(eq=False)
class Evaluation:
    """The evaluation of one worker's shards. Each shard has its own sums, so no result depends on who ran it."""

    job: Job
    step: Step
    measures: Metrics
    states: Mapping[str, Any]
    placement: Placement
    over_batch: Mapping[str, Compare] = field(default_factory=dict)  # of the training, whose loss may have a state
    clock: StepClock = field(default_factory=StepClock)
    named: NamedEval | None = None  # of a training

    def __post_init__(self) -> None:
        self.device, self._forwards = self.placement.world.device, self.placement.forwards()
        self.of = "evaluation " if self.named is None else self.named.of
        self._size_key = "batch_size" if self.named is None else f"{self.named.key}.batch_size"
        if self.named is not None and self.named.keys.metrics is not None:
            self._measure_only(self.job.metrics_of(self.named))
        self._states = {name: _moved(metric, self.device) for name, metric in self.states.items()}
        self._has_loss = self.job.loss_of_shards
        self.over_batch = self.over_batch or build_over_batch(self.job, self.device)
        self.beside = modules_beside(self.job, self.step, {**self.measures.functions, **self.over_batch})
        of_shards = [*(["loss"] if self._has_loss else []), *self.measures.functions]
        self._names = [*of_shards, *self.over_batch]
        self._of_shards = slice(2 * len(of_shards))  # the columns of a shard's measurements

    def _measure_only(self, metrics: Mapping[str, Any]) -> None:
        """Leave out the metrics of the job that are not among these; the loss stays."""
        self.job = self.job.model_copy(update={"metrics": metrics})
        functions = {name: each for name, each in self.measures.functions.items() if name in metrics}
        self.measures = Metrics(functions, self.job.batch_dim, is_sum=self.measures.is_sum)
        self.states = {name: each for name, each in self.states.items() if name in metrics}
        of_batch = self.over_batch.items()
        self.over_batch = {name: each for name, each in of_batch if name == "loss" or name in metrics}

    @contextmanager
    def replica(self, model: nn.Module, work: Work) -> Iterator[Replica]:
        """Give what runs the shards of `work`; in the block the model is in eval mode, and stays so."""
        with evaluating(model, self.beside) as state:
            place = self.job.seed, model, self.device, state, work
            yield Replica(*place, self._forwards, self.clock, self.of, self.step)

    def run(
        self,
        replica: Replica,
        steps: Iterator[LoadedStep],
        mixture: Mixture | None = None,
        rows_of: Mapping[str, bool] = NO_ROWS,
    ) -> Generator[EvaluatedShard | StepEnd | Evaluated, None, None]:
        """Yield each shard with rows of the steps, and the end of each step; at last the measurements.

        Of a `mixture` these have the loss of each source, if rows have losses. `rows_of` says by path which outputs
        have rows, as far as that is known. Every rank calls this, and takes all of it. Raises DataError if all
        samples were set aside.
        """
        # A row for each shard: the order of additions does not depend on the workers. The last column counts rows.
        assert replica.work is not None
        mixture = mixture if self._has_loss else None
        names = [*self._names, *(f"{LOSS_OF}{source}" for source in (mixture.names if mixture else ()))]
        sums = torch.zeros(replica.work.split.shards, 2 * len(names) + 1, dtype=torch.float64, device=self.device)
        states, rows, batches = dict[int, dict[str, Any]](), 0, WholeBatches(self.job.batch_dim, rows_of)
        run_shard = partial(self._forwards.gathering(self._shard), replica.model)
        for loaded in map(self._forwards.begin, steps):
            own: list[ShardOutput] = []
            for shard, _, batch, num_rows in replica.rounds(loaded):
                if shard is None:
                    replica.restore()  # all workers run the same blocks: it begins as their shards do
                    with torch.no_grad():
                        replica.run(None, run_shard, batch, 0)
                    continue
                rows += num_rows
                try:
                    with torch.no_grad():
                        step_output, row = replica.run(shard, run_shard, batch, num_rows)
                        with locating(self.of + location(shard)):
                            self._update_states(step_output, states.setdefault(shard.shard, {}))
                        if self.over_batch:
                            own.append(detached(step_output, shard))
                except (RuntimeError, ModelError) as error:
                    replica.raise_advised(error, shard, self.job, self._size_key)
                if row is not None:
                    sums[shard.shard, self._of_shards] += row
                if mixture is not None:
                    of_sources = row_of(self.measures.by_source(mixture, shard, step_output), self.device)
                    sums[shard.shard, 2 * len(self._names) : -1] += as_tensor(of_sources, self.device)
                yield EvaluatedShard(shard, batch, step_output)
            if self.over_batch:
                replica.restore()
                with torch.no_grad():
                    replica.run_batch(loaded.step, self._measure_batch, own, loaded.whole, sums, batches)
            replica.restore()
            yield StepEnd(loaded.step)
        sums[0, -1] = rows
        measured = self._measured(names, sums, states)
        self._forwards.end()
        yield measured

    @torch.no_grad()
    def _measured(self, names: Sequence[str], sums: torch.Tensor, states: dict[int, dict[str, Any]]) -> Evaluated:
        """Return the means and the metrics with a state, over all workers; every rank calls this."""
        with waiting("the other workers' sums"):
            # In a row all workers but one have zeros, or it is a count: this sum is exact, in any order.
            if has_peers():
                dist.all_reduce(sums, group=everyone())
            *totals, rows = sums.sum(0).tolist()
        if not rows:
            of = self.of.rstrip(", ")
            raise DataError(f"{of}: all samples were set aside, so there is nothing to measure")
        pairs = zip(names, totals[::2], totals[1::2], strict=True)
        weighed = [(name, total, weight) for name, total, weight in pairs if name != "loss" or weight != math.inf]
        weighed = [each for each in weighed if each[2] or each[0] in self._names]  # of a source: if it has a loss
        weighed.sort(key=lambda each: each[0] != "loss")  # the loss comes first
        means = [(name, total / weight if weight else float("nan")) for name, total, weight in weighed]
        metrics = dict(numbers := [*means, *self._computed(states)])
        if len(metrics) < len(numbers):
            twice = sorted(name for name, count in Counter(name for name, _ in numbers).items() if count > 1)
            raise JobError(f"metrics: two give {', '.join(twice)}; rename one")
        return Evaluated(metrics, rows)

    def _shard(self, model: nn.Module, batch: Any, rows: int) -> tuple[StepOutput, torch.Tensor | None]:
        """Return a shard's output and its row of sums; of 0 rows, as of a dummy batch, its output alone."""
        self.clock.enter(Part.FORWARD)
        with autocast(self.job.precision, self.device):
            step_output = run_step(self.step, model, batch)
            if not rows:
                return step_output, None
            loss = []
            if self._has_loss:
                has_loss = step_output.loss is not None
                loss = [self.measures.loss(step_output, rows) if has_loss else NO_LOSS]
            measured = [*loss, *self.measures(step_output, rows)]
            row = as_tensor(row_of(measured, self.device), self.device) if measured else None
        self.clock.enter(Part.OTHER)
        return step_output, row

    def output(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the step's output for a batch, without metrics."""
        with autocast(self.job.precision, self.device):
            return run_step(self.step, model, batch)

    def _measure_batch(
        self, own: Sequence[ShardOutput], whole: Shard, sums: torch.Tensor, batches: WholeBatches
    ) -> None:
        """Add what sees the whole batch, weighed by rows, to the sums of own shards; every rank calls this."""
        merged = merged_batch(own, self.device, batches)
        if merged is None:
            return
        seed_of_batch(self.job.seed, whole, self.device)
        for number, (name, function) in enumerate(self.over_batch.items(), 1):
            where = "the loss" if name == "loss" else f"metrics.{name}"
            with autocast(self.job.precision, self.device):
                value = merged.measure(where, function, number == len(self.over_batch)).double()
            place = 2 * self._names.index(name)
            for output in own:
                sums[output.shard.shard, place] += value * output.shard.rows
                sums[output.shard.shard, place + 1] += output.shard.rows

    def _update_states(self, step_output: StepOutput, own: dict[str, Any]) -> None:
        """Update the shard's own copies of the metrics with a state."""
        outputs, target = step_output.outputs, step_output.target
        for name, fresh in self._states.items():
            if name not in own:  # in the evaluation's first step
                own[name] = copy.deepcopy(fresh)
            metric = own[name]
            with reraise_as(f"metrics.{name}", lambda _: describe_compared(outputs, target)):
                if isinstance(outputs, torch.Tensor):
                    _moved(metric, outputs.device)
                metric.update(outputs, target)

    def _computed(self, states: dict[int, dict[str, Any]]) -> list[tuple[str, float]]:
        """Compute the metrics with a state, from the shards' states merged in shard order."""
        if not self._states:
            return []
        if everyone() is not None:  # to be sent to workers that have other GPUs
            states = {at: {name: _moved(value, CPU) for name, value in own.items()} for at, own in states.items()}
        by_shard = {shard: own for theirs in gathered(states) for shard, own in theirs.items()}
        measured: list[tuple[str, float]] = []
        for name in self._states:
            with reraise_as(f"metrics.{name}.merge_state"):
                whole = merged([by_shard[shard][name] for shard in sorted(by_shard)])
            with reraise_as(f"metrics.{name}.compute"):
                measured += _named_numbers(name, whole.compute()).items()
        return measured


def _moved(metric: Any, device: torch.device) -> Any:
    """Return a metric with its state on the device; one that holds no tensors may have no `to`."""
    return metric.to(device) if hasattr(metric, "to") else metric


def merged(metrics: Sequence[Any]) -> Any:
    """Merge the metrics of all shards into one, in shard order; the first of them is changed."""
    first, *others = metrics
    if others and _is_torchmetrics(first) and first.full_state_update is not False:  # merge_state refuses it
        _put_together(first, others)
    else:
        for other in others:
            first.merge_state(other)
    for module in first.modules() if hasattr(first, "modules") else ():
        # Each rank has merged the states of all. torchmetrics would add up those of all ranks once more.
        module.distributed_available_fn = lambda: False
    return first


def _is_torchmetrics(metric: Any) -> bool:
    """Return whether torchmetrics' own `merge_state` merges the metric, not a subclass's."""
    owner = next((kind for kind in type(metric).__mro__ if "merge_state" in vars(kind)), None)
    return owner is not None and (owner.__module__, owner.__qualname__) == ("torchmetrics.metric", "Metric")


def _put_together(first: Any, others: Sequence[Any]) -> None:
    """Reduce the states of all shards at once, as torchmetrics reduces those of several processes."""
    for state, how in first._reductions.items():
        values = [getattr(each, state) for each in (first, *others)]
        if isinstance(values[0], list):
            setattr(first, state, [inner for value in values for inner in value])
        else:
            stacked = torch.stack(values)
            setattr(first, state, stacked if how is None else how(stacked))
    first._update_count = sum(each._update_count for each in (first, *others))
    first._computed = None


# Metrics whose compute takes the states of several shards stacked, and returns the same as for one.
# NormalizedRootMeanSquaredError's takes them too, and gives another value for more than two.
STACKED = {
    f"torchmetrics.regression.{name}" for name in ("pearson.PearsonCorrCoef", "concordance.ConcordanceCorrCoef")
}


def check_merges(name: str, metric: Any) -> None:
    """Raise JobError if a metric of torchmetrics cannot be put together from the states of several shards."""
    if not _is_torchmetrics(metric):
        return
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(metric).__mro__}
    inner = [type(module).__qualname__ for module in metric.modules() if module is not metric and keeps_state(module)]
    means = [state for state, how in metric._reductions.items() if getattr(how, "__name__", "") == "dim_zero_mean"]
    apart = [state for state, how in metric._reductions.items() if how is None]
    stacked = [state for state in apart if not isinstance(getattr(metric, state), list)]
    kind = type(metric).__qualname__
    if means:
        says = f"reduces its state {means[0]!r} by a mean, which the means of several shards do not tell; keep a sum"
        says = f"{says} and a count in its place"
    elif stacked and not kinds & STACKED:
        says = f"has a state, {stacked[0]!r}, that those of several shards do not tell; give another metric"
    elif inner:
        says = f"wraps a metric ({inner[0]}), whose state it does not merge; give the {inner[0]} itself"
    else:
        return
    own = f"a subclass of {kind} with a merge_state of its own"
    raise JobError(f"metrics.{name}: {kind} {says}, or {own}, or set shards to 1")


def _named_numbers(name: str, value: Any) -> dict[str, float]:
    """Return a metric's value as named numbers: a mapping's by key, a vector's and a tuple's by index."""
    if isinstance(value, tuple | list):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {
            inner: number
            for key, inner_value in value.items()
            for inner, number in _named_numbers(f"{name}_{key}", inner_value).items()
        }
    values = torch.as_tensor(value).double()
    if values.ndim == 0:
        return {name: float(values)}
    return {f"{name}_{place}": number for place, number in enumerate(values.reshape(-1).tolist())}
