"""Run shards of a step one by one, without an update, to find the row that spoils it.

Begin at `StepInspection`. It finds the loss of each row, and the first module whose output or gradient is not finite.
`InspectedPass` looks at each pass of a user's loop so, just before it runs; the loop itself runs as ever.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.engine.forward.buffers import modules_in, on_copies
from dp_ray.engine.forward.model import autocast
from dp_ray.engine.forward.state import EvalState
from dp_ray.engine.forward.step import OnShard, StepOutput, weighted_sum
from dp_ray.engine.loads.bad_samples import not_finite
from dp_ray.engine.loads.loading import LoadedShard, LoadedStep
from dp_ray.engine.loads.packing import rows_of_window
from dp_ray.engine.loop_model import LoopModel, LoopPass, OfRows, name_of
from dp_ray.engine.random import preserved
from dp_ray.engine.sums.gradient_hooks import InEachBackward
from dp_ray.engine.sums.votes import StepSums, Totals
from dp_ray.engine.sums.whole_batch import BatchLoss, MergedBatch
from dp_ray.engine.trainer import Pass
from dp_ray.engine.user_code import ShardSize, advised, location
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.job.samples import mixture_of
from dp_ray.plan.split import Shard
from dp_ray.results.replayed import ReplayedPass, ReplayedRow, ReplayedShard
from dp_ray.tensors.scatter import cut, has_rows, num_rows
from dp_ray.tensors.tree import flatten


class RowLosses(NamedTuple):
    """A number for each row, in the rows' order, and its meaning in words; no numbers if they cannot be computed.

    If the loss is over the batch, `of_batch` is that, and the numbers are norms of its gradient.
    """

    values: list[float]
    how: str
    of_batch: float | None = None


OWN = "what the loss returned for each row"
MEANS = "the mean of what the loss returned for a row's elements"
SUMS = "the sum of what the loss returned for a row's elements"
OF_OUTPUTS = "the loss of each row's outputs and target, one row at a time"
OF_BATCH = "the norm of the gradient that the loss of the whole batch gives a row's outputs"
OF_SHARD = "not known: the function returns the sum and weight of a shard"
OF_SUM = "not known: the function returns the sum of a shard"
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

    `loss` is that of the whole batch; None if not all of its shards were looked at. `weights` names a parameter
    or buffer of the state before the pass, `batch` the place in a shard's batch.
    """

    shards: list[ShardFindings]
    loss: float | None
    weights: str | None
    batch: str | None
    output: ModulePlace | None
    gradient: ModulePlace | None


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
            if self.output is None and not_finite(tensor.detach()):
                self.output = ModulePlace(name, kind, "output", self._shard)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, name, kind, "gradient of the output"))  # type: ignore[no-untyped-call]

    def _on_gradient(self, name: str, kind: str, what: str, gradient: torch.Tensor) -> None:
        if self.gradient is None and not_finite(gradient):
            self.gradient = ModulePlace(name, kind, what, self._shard)


class StepInspection:
    """Runs the shards of a pass as the training does, with its seeds, buffers and modes, but makes no update.

    `number` is that of the step's pass.
    """

    def __init__(self, a_pass: Pass, number: int = 0) -> None:
        self.model = a_pass.placement.model
        self._pass, self._loss, self._job = a_pass, a_pass.loss, a_pass.placement.job
        self._number = number

    def find(self, step: Sequence[LoadedShard], whole: Shard, only: int | None = None) -> Findings:
        """Run forward and backward of a step's shards with rows; raise ModelError, naming it, for user errors.

        `whole` is the global batch. `only` is the shard to look at; None for all. The model stays as it is.
        """
        self.prepare(step, whole)
        loaded = [part for part in step if only in (None, part.shard.shard)]
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        weights = next((name for name, tensor in named if not_finite(tensor.detach())), None)
        finder, batch = NotFiniteFinder(self.model), None
        shards, sums = [], copy.copy(self._pass.stats)  # as a step adds, whose own hold votes
        sums.begin()
        with finder.hooked():
            for part in loaded:
                where = not_finite(part.batch) if batch is None else ""
                if where:
                    batch = f"{where}, in shard {part.shard.shard}"
                shards.append(self._shard(part, whole.rows, finder, sums))
        loss = float(sums.total().batch_loss) if only is None else None
        return Findings(shards, loss, weights, batch, finder.output, finder.gradient)

    def prepare(self, step: Sequence[LoadedShard], whole: Shard) -> None:
        """Compute what the shards of a pass need from each other: the gradients of a loss over the batch."""
        if not step or not isinstance(self._loss, BatchLoss):
            return
        every = LoadedStep(whole.step, [part.shard for part in step], step, whole)
        size = ShardSize(step[0].shard.rows, whole.rows, self._job.num_shards)
        replica, rows = self._pass.replica, self._pass.rows
        state = EvalState(self.model, self._pass.state.beside)  # the loss may keep a state
        try:
            with state.forward(), advised(self._job, f"step {whole.step}", size):
                self._loss.prepare(replica, every, lambda value, _: torch.ones_like(value), self._number, rows, False)
            state.restore()
        finally:
            state.put_back()

    def forward(self, loaded: LoadedShard) -> None:
        """Run a shard's forward; the model stays as it is."""
        with self._pass.again(loaded, self._number):
            pass

    def _shard(self, loaded: LoadedShard, batch_rows: int, finder: NotFiniteFinder, sums: StepSums) -> ShardFindings:
        """Return what is found in a shard, whose losses come to the `sums`."""
        shard = loaded.shard
        size = ShardSize(shard.rows, batch_rows, self._job.num_shards)
        before, around = finder.output, finder.forward(shard.shard)
        with advised(self._job, location(shard), size), self._pass.again(loaded, self._number, around) as loss:
            result = self._loss.result
            assert result.row is not None
            sums.put(shard.shard, result.row)
            (total, weight), is_sum = map(float, result.row[:2]), self._loss.measures.is_sum
            if isinstance(self._loss, BatchLoss):
                norms = RowLosses(self._loss.row_norms(shard), OF_BATCH, float(self._loss.value or 0.0))
                found = ShardFindings(loaded, norms, None)
            else:
                device = self._pass.placement.world.device
                losses = row_losses(self._job, result.step_output, shard.rows, device, is_sum)
                found = ShardFindings(loaded, losses, total if is_sum else total / weight if weight else math.nan)
            if result.is_nothing:  # the weight is 0, so numbers that are not finite do not count
                finder.output = before
            else:
                (loss if is_sum else loss / batch_rows).backward()  # type: ignore[no-untyped-call]
            return found


@torch.no_grad()
def row_losses(job: Job, step_output: StepOutput, rows: int, device: torch.device, is_sum: bool = False) -> RowLosses:
    """Return the loss of each of a shard's `rows` rows, of the step's output for its batch; a sum if it `is_sum`.

    If the loss is one number for the whole shard, it is computed again from each row's outputs and target; a step of
    the user's is not called again. This neither draws from the generators, nor changes buffers.
    """
    loss, compare = step_output.loss, step_output.compare
    if isinstance(loss, torch.Tensor) and loss.ndim:
        # It has a dimension for the rows, or as many elements for each of them.
        numbers = loss.detach().double()
        at = next((place for place, length in enumerate(numbers.shape) if length == rows), None)
        if at is not None or numbers.numel() % rows == 0:  # else it is what a shard sums up
            by_row = numbers.reshape(rows, -1) if at is None else numbers.movedim(at, 0).reshape(rows, -1)
            values = (by_row.sum(1) if is_sum else by_row.mean(1)).tolist()
            return RowLosses(values, OWN if numbers.numel() == rows else SUMS if is_sum else MEANS)
    if compare is None:
        return RowLosses([], OF_SUM if is_sum else OF_SHARD)
    seen = (step_output.outputs, step_output.target)
    if job.collate is not None and not all(has_rows(part, rows, job.batch_dim) for part in seen):
        return RowLosses([], OF_ANY_FORM)
    losses = []
    try:
        with preserved(device), autocast(job.precision, device):
            if (got := num_rows(seen, job.batch_dim)) not in (None, rows):
                raise ModelError(f"the outputs have {got} rows, and the shard has {rows}")
            beside = modules_in("", compare)
            for row in range(rows):
                with on_copies(beside):  # no row changes a state that the loss has
                    losses.append(_of_one_row(compare(*cut(seen, row, row + 1, job.batch_dim)), is_sum))
    except Exception as error:  # a user's loss may take no single row
        return RowLosses([], f"not known: one row alone raises {type(error).__name__}: {error}")
    return RowLosses(losses, OF_OUTPUTS)


def _of_one_row(value: Any, is_sum: bool) -> float:
    """Return the loss of one row; 0 where its weight is."""
    if isinstance(value, torch.Tensor) and not value.ndim:
        return float(value)  # of a single row, a mean is the row's loss
    total, weight = weighted_sum(value, 1, "the loss", is_sum=is_sum)
    return float(total) / float(weight) if float(weight) else float(total)


def looked(findings: Findings, dataset: Any) -> dict[str, Any]:
    """Return the values of a `Looked`, whose rows are of the dataset; None for those of a batch of the loop's own."""
    rows, mixture = [], mixture_of(dataset)
    for (_, indices, _), shard, losses in (
        (found.loaded, found.loaded.shard, found.losses) for found in findings.shards
    ):
        for at, (sample, position) in enumerate(zip(indices.tolist(), shard.positions, strict=True)):
            number = losses.values[at] if losses.values else None
            source = None if mixture is None else mixture.row(sample)
            place = None if dataset is None else sample, shard.shard, position
            row = ReplayedRow(number, *place, source=source, parts=tuple(rows_of_window(dataset, sample)))
            if losses.of_batch is not None:
                row = row._replace(loss=losses.of_batch, gradient=number)
            rows.append(row)
    rows.sort(key=lambda row: _falling(row.number))
    return {
        "row_losses": "; ".join(dict.fromkeys(shard.losses.how for shard in findings.shards)),
        "rows": tuple(rows),
        "weights": findings.weights,
        "batch": findings.batch,
        "output": _described(findings.output),
        "gradient": _described(findings.gradient),
    }


def _falling(number: float | None) -> tuple[int, float]:
    """Order numbers: NaN first, then infinities and numbers downwards, then unknown values."""
    if number is None:
        return 2, 0.0
    return (0, 0.0) if math.isnan(number) else (1, -number)


def _described(place: ModulePlace | None) -> dict[str, Any] | None:
    return None if place is None else {**place._asdict(), "text": str(place)}


class StepIsThrough(BaseException):
    """A step that was run again is through; raised in the loop, which is not to go on."""


Debug = Callable[[StepInspection, Findings, "InspectedPass"], None]


class InspectedModel(LoopModel):
    """The model of a loop; while it `looks`, each pass and gather is noted in `found`, in the order of the calls.

    `shard` is the one to look at; None for all. The rows are those of `dataset`. `debugs_in` is the place of a pass,
    and what is called before it runs.
    """

    looks = False
    shard: int | None = None
    dataset: Any = None
    debugs_in: tuple[int, Debug] | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: list[ReplayedPass] = []
        self._cut: LoadedStep | None = None

    def new_pass(self, *args: Any) -> LoopPass:
        """Return a pass that is looked at."""
        return InspectedPass(self, *args)

    def cut(self, loaded: LoadedStep, batch: Any) -> LoadedStep:
        """Note that the batch is the loop's own."""
        self._cut = super().cut(loaded, batch)
        return self._cut

    def gather(self, function: OfRows, loaded: LoadedStep, number: int) -> MergedBatch | None:
        """Note the call, and where what it returns is not finite."""
        found = super().gather(function, loaded, number)
        if self.looks:
            place = None if found is None else not_finite(found.outputs) or None
            self.note(function, [], number, loaded, Findings([], None, None, place, None, None))
        return found

    def note(self, function: Any, of: list[str], number: int, loaded: LoadedStep, findings: Findings) -> None:
        """Note what was found in a pass or a gather."""
        is_own, by_loss = loaded is self._cut, sorted(findings.shards, key=lambda each: _falling(each.loss))
        found = ReplayedPass(
            **looked(findings, None if is_own else self.dataset),
            place=len(self.found),
            number=number,
            call="backward" if of else "gather",
            function=name_of(function),
            of=tuple(of),
            size=sum(part.shard.rows for part in loaded.loaded),
            has_own_batch=is_own,
            loss=None,
            shards=tuple(ReplayedShard(each.shard.shard, each.shard.rows, loss) for (each, _, loss) in by_loss),
        )
        self.found.append(found)


class InspectedPass(LoopPass):
    """A pass of which each shard first runs alone, so that its losses and what is not finite are seen."""

    def __init__(self, model: InspectedModel, modules: Sequence[nn.Module], *args: Any) -> None:
        super().__init__(model, modules, *args)
        self._inspected, self._of = model, model.names_of(modules)

    def run(self, loaded: LoadedStep, on_shard: OnShard | None = None, number: int = 0) -> None:
        """Look at the shards, then run them."""
        model = self._inspected
        if model.looks and self.gradients.trained:
            self._look(loaded, number)
        super().run(loaded, on_shard, number)

    def call_by(self, call: Callable[..., Any]) -> None:
        """Have the loop's function be called by another one, which gets it and a shard's batch."""
        self.function = partial(call, self.function)

    def _look(self, loaded: LoadedStep, number: int) -> None:
        model, look = self._inspected, StepInspection(self, number=number)
        filled = [part for part in loaded.loaded if part.shard.rows]
        findings = look.find(filled, loaded.whole, model.shard)
        if model.debugs_in is not None and model.debugs_in[0] == len(model.found):
            model.debugs_in[1](look, findings, self)
            raise StepIsThrough
        model.note(self.function, self._of, number, loaded, findings)

    def finish(self, totals: Totals, loaded: LoadedStep, is_empty: bool) -> None:
        """Note the loss of the whole batch."""
        if self._inspected.looks and self._inspected.found:
            found = self._inspected.found
            found[-1] = replace(found[-1], loss=float(totals.batch_loss))
        super().finish(totals, loaded, is_empty)
