"""Run shards of a step one by one, without an update, to find the row that spoils it.

Begin at `StepInspection`. It finds the loss of each row, and the first module whose output or gradient is not finite.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.engine.bad_samples import not_finite
from dp_ray.engine.beside import modules_in
from dp_ray.engine.buffers import NONE, on_copies
from dp_ray.engine.eval_state import EvalState, evaluating
from dp_ray.engine.gradient_hooks import InEachBackward, ParameterHooks
from dp_ray.engine.loading import LoadedShard, LoadedStep
from dp_ray.engine.model import autocast
from dp_ray.engine.out_of_memory import ShardSize, advised
from dp_ray.engine.own_modes import has_own_modes, returning
from dp_ray.engine.random import preserved
from dp_ray.engine.reduce import ShardLoss
from dp_ray.engine.replica import Replica
from dp_ray.engine.rows import RowTrial
from dp_ray.engine.step import Metrics, Step, StepOutput, run_step, weighted_sum
from dp_ray.engine.user_code import location, reraise_as
from dp_ray.engine.whole_batch import BatchLoss, shard_loss
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.plan.split import Shard
from dp_ray.tensors.scatter import has_rows, scatter
from dp_ray.tensors.tree import copied, flatten


class RowLosses(NamedTuple):
    """A number for each row, in the rows' order, and its meaning in words; no numbers if they cannot be computed.

    If the loss is over the batch, `of_batch` is that, and the numbers are norms of its gradient.
    """

    values: list[float]
    how: str
    of_batch: float | None = None


OWN = "what the loss returned for each row"
MEANS = "the mean of what the loss returned for a row's elements"
OF_OUTPUTS = "the loss of each row's outputs and target, one row at a time"
OF_BATCH = "the norm of the gradient that the loss of the whole batch gives a row's outputs"
ALONE = "each row run alone, with the model in eval mode: not the numbers of the step itself"
OF_SHARD = "not known: the function returns the sum and weight of a shard"
OF_ANY_FORM = "not known: not all that the collate gave are tensors with one row for each sample"


class ModulePlace(NamedTuple):
    """A module by its name in the model, empty for the model itself, with its class; what of it; and the shard."""

    module: str
    kind: str
    what: str
    shard: int

    def __str__(self) -> str:
        return f"{self.what} of {self.module or 'the model'} ({self.kind}), in shard {self.shard}"


class ShardFindings(NamedTuple):
    """A shard, the losses of its rows, and its own; None if the loss is over the batch."""

    loaded: LoadedShard
    losses: RowLosses
    loss: float | None


class Findings(NamedTuple):
    """The losses of some shards, and the first place of each kind that is not finite.

    `weights` names a parameter or buffer of the state before the pass, `batch` the place in a shard's batch.
    """

    shards: list[ShardFindings]
    weights: str | None
    batch: str | None
    output: ModulePlace | None
    gradient: ModulePlace | None


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite, as integers always are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    numbers = tensor.detach()
    return bool(torch.isfinite(numbers if numbers.layout is torch.strided else numbers.coalesce().values()).all())


class NotFiniteFinder:
    """A search of a model's outputs, in the order in which its modules end, then of their gradients.

    It changes no number. `output` and `gradient` are the first places found, None if there are none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.output: ModulePlace | None = None
        self.gradient: ModulePlace | None = None
        self._model = model
        self._shard = -1
        self._is_forward = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Search while the block runs."""
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                kind = type(module).__name__
                hooks.callback(module.register_forward_hook(partial(self._on_output, name)).remove)
                for own, parameter in module.named_parameters(recurse=False):
                    if parameter.requires_grad:
                        hook = InEachBackward(self._on_gradient, name, kind, f"gradient of parameter {own}")
                        hooks.callback(parameter.register_hook(hook).remove)
            yield

    @contextmanager
    def forward(self, shard: int) -> Iterator[None]:
        """Run a shard's forward. Outside of it, as in a backward that runs one again, outputs are not searched."""
        self._shard, self._is_forward = shard, True
        try:
            yield
        finally:
            self._is_forward = False

    def _on_output(self, name: str, module: nn.Module, _: Any, outputs: Any) -> None:
        if not self._is_forward:
            return
        kind = type(module).__name__
        for tensor in flatten(outputs)[0]:
            if not isinstance(tensor, torch.Tensor):
                continue
            if self.output is None and not is_finite(tensor):
                self.output = ModulePlace(name, kind, "output", self._shard)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, name, kind, "gradient of the output"))  # type: ignore[no-untyped-call]

    def _on_gradient(self, name: str, kind: str, what: str, gradient: torch.Tensor) -> None:
        if self.gradient is None and not is_finite(gradient):
            self.gradient = ModulePlace(name, kind, what, self._shard)


def inspection_of(
    job: Job, model: nn.Module, step: Step, device: torch.device, trained: ShardLoss
) -> "StepInspection":
    """Return the inspection of the one pass that each step of a declared training is."""
    trial = RowTrial(job, device, "", lambda text: None)  # the run itself has logged the notes
    over_batch = trained.over_batch if isinstance(trained, BatchLoss) else None
    loss = shard_loss(model, step, Metrics({}, job.batch_dim), job, device, trial, over_batch)
    return StepInspection(job, model, device, loss, trained.beside, step)


class StepInspection:
    """Runs the shards of a pass as the training does, with its seeds, buffers and modes, but makes no update.

    `loss` runs a shard forward, and what it calls may write to the modules `beside` the model. `number` is that of
    the step's pass. `step` is called for a row alone; without it, as in a loop of the user's, none is.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        device: torch.device,
        loss: ShardLoss,
        beside: Mapping[str, nn.Module] = NONE,
        step: Step | None = None,
        number: int = 0,
    ) -> None:
        self.model = model
        self._beside = beside
        self._job = job
        self._step = step
        self._number = number
        self._device = device
        self._loss = loss
        self._hooks = ParameterHooks({name: param for name, param in model.named_parameters() if param.requires_grad})

    def find(self, step: Sequence[LoadedShard], whole: Shard, only: int | None = None) -> Findings:
        """Run forward and backward of a step's shards with rows; raise ModelError, naming it, for user errors.

        `whole` is the global batch. `only` is the shard to look at; None for all. The model stays as it is.
        """
        self.prepare(step, whole)
        loaded = [part for part in step if only in (None, part.shard.shard)]
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        weights = next((name for name, tensor in named if not is_finite(tensor)), None)
        finder, batch = NotFiniteFinder(self.model), None
        shards = []
        with finder.hooked():
            for part in loaded:
                where = not_finite(part.batch) if batch is None else ""
                if where:
                    batch = f"{where}, in shard {part.shard.shard}"
                shards.append(self._shard(part, whole.rows, finder))
        return Findings(shards, weights, batch, finder.output, finder.gradient)

    def prepare(self, step: Sequence[LoadedShard], whole: Shard) -> None:
        """Compute what the shards of a pass need from each other: the gradients of a loss over the batch."""
        if not step:
            return
        every = LoadedStep(whole.step, [part.shard for part in step], step, whole)
        size = ShardSize(step[0].shard.rows, whole.rows, self._job.num_shards)
        with self._alone() as replica, advised(self._job, f"step {whole.step}", size):
            self._loss.prepare(replica, every, lambda value, _: torch.ones_like(value), self._number, False)

    def forward(self, loaded: LoadedShard) -> torch.Tensor:
        """Return the sum of a shard's losses; the model stays as it is."""
        with self._alone() as replica:
            return self._run(replica, loaded)

    def _run(self, replica: Replica, loaded: LoadedShard) -> torch.Tensor:
        shard = loaded.shard
        args = self._loss, copied(loaded.batch), shard.rows, shard.shard
        loss: torch.Tensor = replica.run(shard, *args, number=self._number)
        return loss

    def _shard(self, loaded: LoadedShard, batch_rows: int, finder: NotFiniteFinder) -> ShardFindings:
        shard = loaded.shard
        size = ShardSize(shard.rows, batch_rows, self._job.num_shards)
        before = finder.output
        with self._alone() as replica, advised(self._job, location(shard), size):
            with finder.forward(shard.shard):
                loss = self._run(replica, loaded)
            step_output = self._loss.result.step_output
            if isinstance(self._loss, BatchLoss):
                norms = RowLosses(self._loss.row_norms(shard), OF_BATCH, float(self._loss.value or 0.0))
                found = ShardFindings(loaded, norms, None)
            else:
                losses = row_losses(
                    self._job, self._step, self.model, copied(loaded.batch), step_output, shard.rows, self._device
                )
                assert self._loss.result.row is not None
                total, weight, *_ = self._loss.result.row
                found = ShardFindings(loaded, losses, float(total) / float(weight) if weight else math.nan)
            self._hooks.look()  # a training runs them on the whole batch's gradient
            if self._loss.result.is_nothing:  # the weight is 0, so numbers that are not finite do not count
                finder.output = before
                return found
            with reraise_as(f"{location(shard)}: backward"):
                (loss / batch_rows).backward()  # type: ignore[no-untyped-call]
            return found

    @contextmanager
    def _alone(self) -> Iterator[Replica]:
        """Give a replica without other workers; after it, the model has its values of before, and no gradients."""
        state = EvalState(self.model, self._beside, trusts_stamps=False)  # a training step may write `.data`
        try:
            yield Replica(self._job.seed, self.model, self._device, state)
            state.restore()
        finally:
            state.put_back()
            self.model.zero_grad(set_to_none=True)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Run the block, then give the model its values of before, and no gradients."""
        with self._alone() as replica, replica.state.forward():
            yield


@torch.no_grad()
def row_losses(
    job: Job,
    step: Step | None,
    model: nn.Module,
    batch: Any,
    step_output: StepOutput,
    rows: int,
    device: torch.device,
) -> RowLosses:
    """Return the loss of each of a shard's `rows` rows, of the step's output for its batch.

    If the loss is one number for the whole shard, it is computed again from each row's outputs and target, or, with a
    step of the user's, on each row alone. Neither draws from the generators, nor changes buffers.
    """
    loss, compare = step_output.loss, step_output.compare
    if isinstance(loss, torch.Tensor) and loss.ndim:
        # It has a dimension for the rows, or as many elements for each of them.
        numbers = loss.detach().double()
        at = next((place for place, length in enumerate(numbers.shape) if length == rows), None)
        by_row = numbers.reshape(rows, -1) if at is None else numbers.movedim(at, 0).reshape(rows, -1)
        return RowLosses(by_row.mean(1).tolist(), OWN if numbers.numel() == rows else MEANS)
    if step is None:
        return RowLosses([], OF_SHARD)
    try:
        with preserved(device), autocast(job.precision, device):
            compared = (step_output.outputs, step_output.target)
            if job.collate is not None and not all(
                has_rows(part, rows, job.batch_dim) for part in (compared if compare is not None else [batch])
            ):
                return RowLosses([], OF_ANY_FORM)
            if compare is not None:
                pairs = _by_row("the outputs have", compared, rows, job.batch_dim)
                return RowLosses(_one_by_one(compare, lambda pair: compare(*pair), pairs), OF_OUTPUTS)
            # A model's own `eval()` and `train()` may round its weights, of which the shard's backward is to come.
            with (
                on_copies({"": model}) if has_own_modes(model) else nullcontext(),
                returning(model),
                evaluating(model),
            ):
                batches = _by_row("the batch has", batch, rows, job.batch_dim)
                losses = _one_by_one(step, lambda batch: run_step(step, model, batch).loss, batches)
                return RowLosses(losses, ALONE)
    except Exception as error:  # a user's loss or step may take no single row
        return RowLosses([], f"not known: one row alone raises {type(error).__name__}: {error}")


def _by_row(what: str, tree: Any, rows: int, batch_dim: int) -> list[Any]:
    pieces = scatter(tree, rows, batch_dim)
    if len(pieces) != rows:
        raise ModelError(f"{what} {len(pieces)} rows, and the shard has {rows}")
    return pieces


def _one_by_one(of: Any, loss_of: Callable[[Any], Any], rows: list[Any]) -> list[float]:
    """Return the loss of each row; no row changes a state that the function `of` reaches."""
    beside, means = modules_in("", of), []
    for row in rows:
        with on_copies(beside):
            means.append(_mean(loss_of(row)))
    return means


def _mean(value: Any) -> float:
    """Return the loss of one row; 0 where its weight is."""
    if isinstance(value, torch.Tensor) and not value.ndim:
        return float(value)  # of a single row, a mean is the row's loss
    total, weight = weighted_sum(value, 1, "the loss")
    return float(total) / float(weight) if float(weight) else float(total)
