"""Run one shard through the model: its outputs, its loss and its metrics. Begin at `build_step` and `Metrics`.

The loss contract: each shard gives a sum and a weight; the whole batch's loss is sum of sums / sum of weights. A sum
of weight 0 counts as nothing, whatever it is: a mean over no labels, times 0, is NaN (`UsersPair`). A loss, and each
metric, returns one number for each row (or element), each of weight 1; or `(sum, weight)`. One number for each class,
or for each pair of rows, is an error: if its size does not show it, `tasks/preflight.py` asks. With `reduction: sum`,
a loss gives sums: the whole batch's loss is their sum, and the weight is the rows, for means over an epoch.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss

from dp_ray.engine.devices import mixed_devices
from dp_ray.engine.forward.model import are_texts, call_model
from dp_ray.engine.host_copy import ON_GPU
from dp_ray.engine.loads.items import class_of
from dp_ray.engine.user_code import (
    OF_SHARDS,
    batch_hint,
    describe_compared,
    describe_input,
    gradients_hint,
    raise_as,
    reraise_as,
    shards_hint,
)
from dp_ray.engine.world import World, is_gpu
from dp_ray.errors import DataError, JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target, is_over_batch
from dp_ray.job.targets import bound, built, resolve
from dp_ray.plan.history import LOSS_OF
from dp_ray.plan.mixture import Mixture
from dp_ray.plan.split import Shard
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import is_sharded, moved_batch
from dp_ray.tensors.scatter import rows_dim
from dp_ray.tensors.tree import flatten
from dp_ray.text import a_kind, listed

Compare: TypeAlias = Callable[[Any, Any], Any]


LOSS = "the loss"


class Weighted(NamedTuple):
    """The sum over a shard, a scalar tensor, and its weight."""

    sum: torch.Tensor
    weight: torch.Tensor | float


class ClassLosses(Weighted):
    """The sum and weight of torch's losses of classes, with the `losses` of the elements and their `weights`."""

    losses: torch.Tensor
    weights: torch.Tensor


class UsersPair(Weighted):
    """The sum and weight that a loss of the user's gave, with its graph: of weight 0 both may be NaN."""

    def is_nothing(self) -> bool:
        """Return whether the weight is 0; this waits for the GPU if the weight is there."""
        weight = self.weight
        if isinstance(weight, torch.Tensor):
            if type(weight) is not torch.Tensor:  # a fake tensor has no number
                return False
            with waiting(ON_GPU):
                weight = weight.item()
        return weight == 0

    def counted(self) -> Weighted:
        """Return it as it counts, without waiting for a GPU: a sum of weight 0 is 0."""
        total, weight = self
        if isinstance(weight, torch.Tensor) and not (type(weight) is torch.Tensor and weight.is_cpu):
            return Weighted(torch.where(weight.reshape(()) == 0, torch.zeros_like(total), total), weight)
        return Weighted(torch.zeros_like(total) if weight == 0 else total, weight)


def build_loss(spec: Any, device: torch.device, batch_dim: int = 0) -> Compare:
    """Return the job's loss as a function of (outputs, target); torch's own losses are built unreduced.

    A loss over the batch is built as it is. Raises JobError if it cannot be called, has parameters to train, or asks
    for a reduction that has no mean over the whole global batch.
    """
    sees_all, is_sum = is_over_batch(spec), getattr(spec, "reduction", "mean") == "sum"
    if sees_all:
        loss = built("loss", spec)
    elif isinstance(spec, Target):
        loss = _from_target(spec, batch_dim, is_sum)
    else:
        loss = _unreduced(spec, batch_dim, is_sum)
    if isinstance(loss, nn.Module):
        if any(parameter.requires_grad for parameter in loss.parameters()):
            advice = "return them beside its outputs, where they need no rows" if sees_all else "use step"
            raise JobError(f"loss: has parameters of its own to train; make them the model's, and {advice}")
        loss = loss.to(device)
    if not sees_all and isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return functools.partial(_of_classes, loss)
    if not callable(loss):
        raise JobError(f"loss: must be a function of (outputs, target), got {what_it_is(loss)}")
    compare: Compare = loss
    return compare


def _from_target(target: Target, batch_dim: int, is_sum: bool) -> Any:
    named = resolve("loss", target)
    if named in _AS_MODULES:
        return _from_target(Target(target=f"torch.nn:{_AS_MODULES[named]}", args=target.args), batch_dim, is_sum)
    args = dict(target.args)
    is_torchs = getattr(named, "__module__", "").startswith("torch.nn.")
    if is_torchs and "reduction" in inspect.signature(named).parameters:
        # A list of numbers is that of the classes' weights, which are no integers.
        lists = {name: value for name, value in args.items() if isinstance(value, list)}
        args |= {name: torch.tensor(value, dtype=torch.get_default_dtype()) for name, value in lists.items()}
        if not inspect.isclass(named):
            if args.get("reduction", "none") not in ("none", "mean"):
                raise JobError(f"loss.args.reduction: {_means(args['reduction'])}")
            args["reduction"] = "none"
    return _unreduced(built("loss", target.model_copy(update={"args": args})), batch_dim, is_sum)


# The modules' means divide by the weights of the classes, and batchmean by the rows, so the functions must too.
_AS_MODULES: Mapping[Any, str] = {
    functional.cross_entropy: "CrossEntropyLoss",
    functional.nll_loss: "NLLLoss",
    functional.kl_div: "KLDivLoss",
}


def _unreduced(loss: Any, batch_dim: int, is_sum: bool) -> Any:
    """Return the job's own loss; one of torch's as a copy that does not reduce, since the object is the user's."""
    if inspect.isclass(loss) and issubclass(loss, _Loss):
        loss = loss()
    if not isinstance(loss, _Loss):
        return loss
    if loss.reduction not in ("none", "mean", "batchmean") and not (is_sum and loss.reduction == "sum"):
        raise JobError(f"loss: was made with reduction={loss.reduction!r}; {_means(loss.reduction)}")
    unreduced = copy.copy(loss)
    unreduced.reduction = "none"
    unreduced._buffers = dict(loss._buffers)  # which a move to a device changes
    is_of_rows = loss.reduction == "batchmean" and not is_sum
    return functools.partial(_per_row, unreduced, batch_dim) if is_of_rows else unreduced


def _means(reduction: Any) -> str:
    if reduction == "sum":
        return "for the sum over the whole batch set the key beside its target: loss: {target: ..., reduction: sum}"
    return (
        "the loss is the mean over the whole global batch, so that the split does not matter, and reduction cannot "
        f"be {reduction!r}; leave it out for the mean over all elements, or write a function that returns "
        "(sum, rows) for the mean over the rows"
    )


def _per_row(loss: Compare, batch_dim: int, outputs: torch.Tensor, target: torch.Tensor) -> Any:
    """Compute torch's batchmean as (sum, weight): the sum of all elements, and the number of rows."""
    return total_of(loss(outputs, target)), outputs.shape[rows_dim(outputs, batch_dim)]


def _of_classes(
    loss: nn.CrossEntropyLoss | nn.NLLLoss, outputs: torch.Tensor, target: torch.Tensor
) -> torch.Tensor | Weighted:
    """Compute cross entropy whose mean is torch's: divided by the classes' weights, without the ignored targets."""
    losses: torch.Tensor = loss(outputs, target)
    if target.is_floating_point() or losses.shape != target.shape:
        return losses  # probabilities: each row counts 1; or losses that a derived class has changed
    weights = kept = target != loss.ignore_index
    if loss.weight is not None:
        weights = loss.weight[target.where(kept, torch.zeros_like(target))] * kept
    summed = ClassLosses(total_of(losses), kept.sum() if loss.weight is None else total_of(weights))
    summed.losses, summed.weights = losses.detach(), weights
    return summed


def weighted_sum(value: Any, rows: int, what: str, hint: str = "", is_sum: bool = False) -> Weighted:
    """Return the sum and weight of what a loss or metric gave for a shard of `rows` rows; `what` names it in errors.

    If it `is_sum`, it gave the sum, or numbers to sum up, and the weight is the rows: a pair is an error then.

    Raises ModelError if it is computed from shards of parameters (strategy: fsdp), or if it is one number for the
    whole shard, whose weight in the batch is unknown: the `hint` ends that error. Raises ModelError if its size does
    not match the rows: it has fewer elements, or no dimension is `rows` long and the first one is no multiple of
    `rows`. A pair that has a graph is returned as a `UsersPair`.
    """
    if isinstance(value, Weighted):
        return Weighted(value.sum, rows) if is_sum else value
    if any(map(is_sharded, value if isinstance(value, tuple | list) else [value])):
        raise ModelError(f"{what} returned a tensor of shards{OF_SHARDS}")
    if is_sum:
        if isinstance(value, torch.Tensor):
            return Weighted(total_of(value), rows)
        what_is = "a pair" if isinstance(value, tuple | list) and len(value) == 2 else what_it_is(value)
        raise ModelError(
            f"{what} returned {what_is}; with reduction: sum it returns a tensor, the sum over the shard's rows or "
            "the numbers to sum up, and no weight; for a mean, (sum, weight), leave reduction out"
        )
    if isinstance(value, tuple | list) and len(value) == 2:
        total, weight = value
        if _is_number(total) and _is_number(weight):
            if not isinstance(total, torch.Tensor):
                total = torch.tensor(total, dtype=torch.float64)
            elif _is_half(total):
                total = total.float()
            pair = UsersPair(total.reshape(()), weight)
            return pair if pair.sum.requires_grad else pair.counted()
        raise ModelError(
            f"{what} returned a pair of {what_it_is(total)} and {what_it_is(weight)}; (sum, weight) are two numbers"
        )
    if not isinstance(value, torch.Tensor):
        raise ModelError(
            f"{what} returned {what_it_is(value)}; it must return one number for each row, or (sum, weight)"
        )
    if value.ndim == 0 or value.numel() < min(rows, 2):
        of_sums = ", set reduction: sum if it is a sum over its rows" if what == LOSS else ""
        raise ModelError(
            f"{what} returned {what_it_is(value)} for a shard of {rows} rows: the whole batch's mean cannot be made "
            "of means over shards; return one number for each row (torch's losses: reduction='none')"
            f"{of_sums}, or (sum, weight): for reduction='batchmean' (sum, rows), for a mean over n elements "
            f"(loss * n, n){hint}"
        )
    if value.numel() < rows or not (rows in value.shape or value.shape[0] % rows == 0):
        raise ModelError(
            f"{what} returned {what_it_is(value)} for a shard of {rows} rows: one number for each row or element has "
            f"the size [{rows}], [{rows}, ...] or [{rows} * n]; for one number per class, or for what a mask or "
            "collate leaves, return (sum, weight)"
        )
    return Weighted(total_of(value), value.numel())


def total_of(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor; half-precision numbers are summed in fp32, since fp16 overflows at 65,504."""
    if values.dtype is torch.float32 or not _is_half(values):
        return values.sum()
    return values.sum(dtype=torch.float32)


def _is_half(values: torch.Tensor) -> bool:
    return values.is_floating_point() and values.dtype.itemsize < torch.float32.itemsize


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def what_it_is(value: Any) -> str:
    """Return what a loss or step returned, in words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of size {list(value.shape)}" if value.ndim else "one number"
    return a_kind(value)


Step: TypeAlias = Callable[[nn.Module, Any], Any]
Row: TypeAlias = list[Any] | torch.Tensor  # sums and weights of a shard: numbers, or on a GPU scalar tensors too


class StepOutput(NamedTuple):
    """The results of a step on one shard; a user's step may leave out all but the loss, in an evaluation that too.

    `compare` is the loss function, which made `loss` of `outputs` and `target`; None with a user's step.
    """

    loss: Any = None
    outputs: Any = None
    target: Any = None
    compare: Compare | None = None


OnShard: TypeAlias = Callable[[Shard, Any, StepOutput], None]  # gets each shard with its batch and output


class StepEnd(NamedTuple):
    """The end of a step in a prediction or an evaluation: this worker's shards of it, maybe none, are finished."""

    step: int


def build_step(job: Job, world: World) -> Step:
    """Return the user's step, or the plain one: the model on the inputs, the loss on its outputs and the target.

    If the model is on several devices, the target is moved to the device of the outputs. With a loss over the batch,
    a step only gives outputs and target.
    """
    if job.step is not None:
        step: Step = bound("step", job.step)
        return step
    loss = None if job.loss is None or job.loss_over_batch else build_loss(job.loss, world.devices[-1], job.batch_dim)
    has_several, inputs_of = len(world.devices) > 1, ModelInputs(job)

    is_auto, gives_first = job.call == "auto", job.gives_first

    def plain_step(model: nn.Module, batch: Any) -> StepOutput:
        if type(batch) not in (tuple, list) or len(batch) != 2:
            inputs_of(batch)
        inputs, target = batch[0] if gives_first else batch, batch[1]
        try:
            if is_auto and type(inputs) is torch.Tensor:
                outputs = model(inputs)
            else:
                outputs = call_model(model, inputs, job.call)
        except (Exception, SystemExit) as error:
            raise_as(error, "model", functools.partial(model_hint, model, inputs, job.call))
        if has_several:
            target = beside(outputs, target)
        if loss is None:
            return StepOutput(None, outputs, target)
        try:
            return StepOutput(loss(outputs, target), outputs, target, loss)
        except (Exception, SystemExit) as error:
            # A loss that takes no mapping names its class.
            is_of_mapping = isinstance(outputs, Mapping) and type(outputs).__name__ in str(error)
            advice = ""
            if is_of_mapping:
                advice = f"; leave loss out, and write a step, which picks what it takes{OWN_MEAN}"
            elif isinstance(error, TypeError) and "required positional argument" in str(error):
                advice = (
                    "; a loss gets (outputs, target) alone: leave it out, and write a step(model, batch), which "
                    "calls it with what it takes, one of torch's with reduction='none'"
                )
            raise_as(error, "loss", lambda _: describe_compared(outputs, target) + advice)

    plain_step.__wrapped__ = loss  # type: ignore[attr-defined]  # what `modules_in` looks for
    return plain_step


def run_step(step: Step, model: nn.Module, batch: Any) -> StepOutput:
    """Call a step; it returns a loss, or a mapping `{"loss": ..., "outputs": ..., "target": ...}`.

    The mapping may lack the loss if the job's sees the whole batch, and in an evaluation: a detector gives none then.
    Raises ModelError if the step raises, or if its mapping has other keys.
    """
    try:
        returned = step(model, batch)
    except (Exception, SystemExit) as error:
        raise_as(
            error, "step", lambda error: mixed_devices(model, error) or shards_hint(error) or batch_hint(error, batch)
        )
    if isinstance(returned, StepOutput):
        return returned
    if not isinstance(returned, Mapping):
        return StepOutput(returned)
    if not returned.keys() <= {"loss", "outputs", "target"} or not returned.keys() & {"loss", "outputs"}:
        raise ModelError(
            f"step returned a mapping with the keys {list(returned)}; it must hold 'loss', and may hold 'outputs' "
            "and 'target'; in an evaluation, and with a loss over: batch, 'outputs' are enough"
        )
    return StepOutput(**returned)


def beside(outputs: Any, target: Any) -> Any:
    """Move the target to the device of the first tensor of the outputs."""
    device = next((leaf.device for leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)), None)
    return target if device is None else moved_batch(target, device)


def model_hint(model: nn.Module, inputs: Any, call: str, error: BaseException) -> str:
    """Return a hint for an error of a model: what to change, if that is known, else what it got."""
    if known := mixed_devices(model, error) or shards_hint(error) or gradients_hint(error):
        return known
    may_be_of_dict = isinstance(error, TypeError) or f"{type(inputs).__qualname__!r} object" in str(error)
    if may_be_of_dict and isinstance(inputs, Mapping) and call == "auto":
        return f"; the model got one dict: to pass its keys as keywords, set call: kwargs{describe_input(inputs)}"
    has_too_many = isinstance(error, TypeError) and "were given" in str(error)
    if has_too_many and isinstance(inputs, tuple | list) and call == "auto":
        kind = f"the {len(inputs)} items of a {type(inputs).__name__}"
        return (
            f"; the model got {kind}: to give it them as one, have a collate return (inputs,){describe_input(inputs)}"
        )
    return describe_input(inputs)


class Metrics:
    """The loss, and the metrics that are functions of (outputs, target), as sums and weights.

    They follow the loss contract of `dp_ray.engine.forward.step`.
    """

    def __init__(
        self,
        functions: Mapping[str, Compare],
        batch_dim: int = 0,
        mixture: Mixture | None = None,
        is_sum: bool = False,
    ) -> None:
        self.functions = dict(functions)
        self.is_sum = is_sum  # the loss of a batch, not a mean
        self.mixture = mixture  # of a training's dataset: the loss is measured by source, too
        self._batch_dim = batch_dim

    @property
    def names(self) -> list[str]:
        """The names of what a step of a training measures, the loss first."""
        sources = () if self.mixture is None else self.mixture.names
        return ["loss", *self.functions, *(f"{LOSS_OF}{source}" for source in sources)]

    def loss(self, step_output: StepOutput, rows: int) -> Weighted:
        """Return the sum and weight of the loss of a shard of `rows` rows; raises what `weighted_sum` raises."""
        if step_output.loss is None:
            raise ModelError(
                "step returned a mapping without 'loss', which only an evaluation, or a loss over: batch, takes"
            )
        hint = OWN_MEAN if step_output.compare is None else ""
        return weighted_sum(step_output.loss, rows, LOSS, hint, self.is_sum)

    def __call__(self, step_output: StepOutput, rows: int) -> list[Weighted]:
        """Return the sum and weight of each metric of a shard of `rows` rows.

        Raises ModelError if a metric raises or breaks the loss contract, or if the step gave no outputs.
        """
        measured = []
        for name, function in self.functions.items():
            if step_output.outputs is None:
                raise ModelError(
                    f"metrics.{name}: the step gave no outputs; return them: {{'loss': ..., 'outputs': ...}}"
                )
            with reraise_as(f"metrics.{name}", lambda _: describe_compared(step_output.outputs, step_output.target)):
                value = function(step_output.outputs, step_output.target)
            measured.append(weighted_sum(value, rows, f"metrics.{name}"))
        return measured

    def by_source(self, mixture: Mixture, shard: Shard, step_output: StepOutput) -> list[Weighted]:
        """Return the sum and weight of the losses of each source's rows in a shard of a mixture.

        The weights are 0 if the loss is no number for each row or element, nor torch's loss of classes; and if it has
        several numbers a row, and the target has not these rows: then it may be of views, one behind the other.
        """
        value, rows = step_output.loss, shard.rows
        losses, weights = (value.losses, value.weights) if isinstance(value, ClassLosses) else (value, None)
        nothing = [Weighted(torch.zeros((), dtype=torch.float64), 0.0)] * len(mixture.names)
        dim = 0 if isinstance(losses, torch.Tensor) and losses.ndim == 1 else self._batch_dim
        if not isinstance(losses, torch.Tensor) or losses.ndim <= dim or losses.shape[dim] % rows:
            return nothing
        target = step_output.target
        has_rows = isinstance(target, torch.Tensor) and target.ndim > dim and target.shape[dim] == rows
        # Flat losses of rows' elements are row by row. If the batch itself has several views of each row, who knows.
        if losses.shape[dim] != rows and (self._batch_dim or not has_rows):
            return nothing
        positions = np.asarray(shard.positions, np.int64) + shard.epoch * mixture.rows
        sources = torch.from_numpy(mixture.sources_at(positions)[0]).to(losses.device)
        is_of = sources == torch.arange(len(mixture.names), device=losses.device)[:, None]
        every = torch.ones_like(losses) if weights is None else weights
        of_rows = [
            part.detach().movedim(dim, 0).reshape(rows, -1).sum(1, dtype=torch.float64) for part in (losses, every)
        ]
        if self.is_sum:
            of_rows[1] = torch.ones_like(of_rows[1])
        sums, counts = (torch.where(is_of, part, 0.0).sum(1).unbind() for part in of_rows)
        return [Weighted(total, count) for total, count in zip(sums, counts, strict=True)]


def row_of(measured: list[Weighted], device: torch.device) -> Row:
    """Return sums and weights, 2 * names of them: sum, weight, sum, weight ... Those on a GPU stay there."""
    numbers = list(chain.from_iterable(measured))
    if is_gpu(device):
        return numbers
    read: list[float] = []
    for number in numbers:
        # Read only numbers on the CPU: a read would wait for a GPU, and a fake tensor has no number.
        if type(number) is torch.Tensor and number.is_cpu:
            read.append(number.item())
        elif isinstance(number, torch.Tensor):
            break
        else:
            read.append(number)
    return read if len(read) == len(numbers) else as_tensor(numbers, device)


def as_tensor(row: Row, device: torch.device) -> torch.Tensor:
    """Return a row as a tensor on the device, float64."""
    if isinstance(row, torch.Tensor):
        return row
    if not is_gpu(device) and not any(isinstance(number, torch.Tensor) for number in row):
        return torch.tensor(row, dtype=torch.float64, device=device)
    return torch.stack(
        [
            number.detach().to(device, torch.float64).reshape(())
            if isinstance(number, torch.Tensor)
            else torch.full((), number, dtype=torch.float64, device=device)
            for number in row
        ]
    )


LEAVES_OUT = "inputs: auto gives the model the first of each pair (inputs, target), and leaves the target out"
GIVES_BOTH = (
    "inputs: auto gives the model both of each pair, as its forward may take two; if the second is a target, "
    "set inputs: first"
)
OWN_MEAN = """, like this one for dict items and a model that gives its own mean, as Hugging Face's do:
    def step(model, batch):
        outputs, n = model(**batch), (batch["labels"] != -100).sum()  # of a causal model: labels[:, 1:]
        return {"loss": (outputs.loss * n, n), "outputs": outputs.logits, "target": batch["labels"]}"""


class ModelInputs:
    """Gives the model's part of a collated batch, decided by the job alone.

    Raises DataError if the task, or `inputs: first`, needs pairs (inputs, target) and the batch is not one.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._needs_pair = job.task != "predict"
        self._gives_first = job.gives_first

    def __call__(self, batch: Any) -> Any:
        is_list = isinstance(batch, tuple | list)
        if self._needs_pair and not (is_list and len(batch) == 2):
            self._refuse(batch)
        if not self._gives_first:
            return batch
        if is_list and batch:
            return batch[0]
        raise DataError(
            f"inputs: 'first' needs items that are (inputs, target), got a batch of {self._described(batch)}; "
            "leave inputs out, and for a dict whose keys are the model's arguments set call: kwargs"
        )

    def _refuse(self, batch: Any) -> NoReturn:
        advice = ""
        if isinstance(batch, Mapping):
            picks = f"(it has {listed(batch)}), which are picked before the collate"
            advice = f"name keys of its items, like inputs: [x] and target: y {picks}; or "
        elif isinstance(batch, tuple | list) and len(batch) > 2:
            advice = "a model of several inputs takes items like ((a, b), target); or "
            if self._job.inputs == "all":
                advice = f"inputs: all gives the model all of an item, but the target is the second of two: {advice}"
        raise DataError(
            f"task {self._job.task} needs items that are (inputs, target), got a batch of {self._described(batch)}; "
            f"{advice}write a step{OWN_MEAN}"
        )

    def _described(self, batch: Any) -> str:
        origin = "" if self._job.collate is None else " after the collate"
        return f"a {class_of(batch)}{origin}"


class PredictInputs(ModelInputs):
    """Picks the model's part of each batch of a prediction; with `inputs: auto`, by the signature of its forward.

    A pair is (inputs, target) if the job has a loss or metrics. `say` is called once if a target is left out, or if
    one may reach the model.
    """

    def __init__(self, job: Job, model: nn.Module, say: Callable[[str], None]) -> None:
        super().__init__(job)
        self._arguments = _num_positional(model)
        self._say = functools.cache(say)
        self._is_auto = job.inputs == "auto"

    def __call__(self, batch: Any) -> Any:
        is_pair = self._is_auto and isinstance(batch, tuple | list) and len(batch) == 2 and not are_texts(batch)
        if not is_pair:
            return super().__call__(batch)
        (least, most), call, first = self._arguments, self._job.call, batch[0]
        has_targets = self._job.loss is not None or bool(self._job.metrics)
        takes_two = least < 2 <= most
        if call == "kwargs":
            gives_first = isinstance(first, Mapping)
        elif takes_two:
            gives_first = has_targets
        else:
            gives_first = most < 2 or (has_targets and isinstance(first, tuple | list))
        if gives_first or (takes_two and call != "kwargs"):
            self._say(LEAVES_OUT if gives_first else GIVES_BOTH)
        return batch[0] if gives_first else batch


def _num_positional(model: nn.Module) -> tuple[int, float]:
    """Return how many positional arguments the model's forward takes, at least and at most; 0 and inf if unknown."""
    if isinstance(model, torch.jit.ScriptModule):
        forward: Any = model.forward
        arguments = [argument for argument in forward.schema.arguments[1:] if not argument.kwarg_only]
        return sum(not argument.has_default_value() for argument in arguments), len(arguments)
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a C function may have no signature
        return 0, float("inf")
    positional = [param for param in parameters if param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)]
    takes_any = any(param.kind is param.VAR_POSITIONAL for param in parameters)
    return sum(param.default is param.empty for param in positional), float("inf") if takes_any else len(positional)
