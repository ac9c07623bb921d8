"""Run one shard through the model: its outputs, its loss and its metrics. Begin at `build_step` and `Metrics`.

The loss contract: each shard gives a sum and a weight; the whole batch's loss is sum of sums / sum of weights. A sum
of weight 0 counts as nothing, whatever it is: a mean over no labels, times 0, is NaN (`UsersPair`). A loss, and each
metric, returns one number for each row (or element), each of weight 1; or `(sum, weight)`. One number for each class,
or for each pair of rows, is an error. If its size does not show it, a trial call of `Metrics` does.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss

from dp_ray.engine.beside import modules_in
from dp_ray.engine.buffers import on_copies
from dp_ray.engine.devices import mixed_devices
from dp_ray.engine.host_copy import ON_GPU
from dp_ray.engine.items import class_of
from dp_ray.engine.model import are_texts, call_model, is_unpacked
from dp_ray.engine.out_of_memory import batch_hint
from dp_ray.engine.random import preserved
from dp_ray.engine.user_code import (
    OF_SHARDS,
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
from dp_ray.job.targets import bind, bound, resolve
from dp_ray.plan.mixture import Mixture
from dp_ray.plan.split import Shard
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import is_sharded, moved_batch
from dp_ray.tensors.scatter import cut, gather, may_have_lists_of_rows, num_rows, rows_dim, scatter
from dp_ray.tensors.tree import copied, flatten
from dp_ray.text import listed

Compare: TypeAlias = Callable[[Any, Any], Any]
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


def build_step(job: Job, world: World) -> Step:
    """Return the user's step, or the plain one: the model on the inputs, the loss on its outputs and the target.

    If the model is on several devices, the target is moved to the device of the outputs. With a loss over the batch,
    a step only gives outputs and target.
    """
    if job.step is not None:
        step: Step = bound("step", job.step)
        return _without_loss(step) if job.loss_over_batch else step
    loss = None if job.loss is None or job.loss_over_batch else build_loss(job.loss, world.devices[-1], job.batch_dim)
    has_several, inputs_of = len(world.devices) > 1, ModelInputs(job)

    calls_with_one, gives_first = job.call in ("auto", "one"), job.gives_first

    def plain_step(model: nn.Module, batch: Any) -> StepOutput:
        if type(batch) not in (tuple, list) or len(batch) != 2:
            inputs_of(batch)
        inputs, target = batch[0] if gives_first else batch, batch[1]
        try:
            if calls_with_one and type(inputs) is torch.Tensor:
                outputs = model(inputs)
            else:
                outputs = call_model(model, inputs, job.call)
        except (Exception, SystemExit) as error:

            def hint(error: BaseException) -> str:
                known = mixed_devices(model, error) or shards_hint(error) or gradients_hint(error)
                if not known and "Expected more than 1 value per channel" in str(error):  # of a BatchNorm
                    known = "; this shard has one row: choose batch_size and shards so that each has two"
                return known or keywords_hint(model, inputs, job.call, error) + describe_input(inputs)

            raise_as(error, "model", hint)
        if has_several:
            target = beside(outputs, target)
        if loss is None:
            return StepOutput(None, outputs, target)
        try:
            return StepOutput(loss(outputs, target), outputs, target, loss)
        except (Exception, SystemExit) as error:
            raise_as(
                error,
                "loss",
                lambda error: describe_compared(outputs, target) + _step_hint(job, inputs, outputs, error),
            )

    plain_step.__wrapped__ = loss  # type: ignore[attr-defined]  # what `modules_in` looks for
    return plain_step


def _without_loss(step: Step) -> Step:
    """Return the user's step beside a loss over the batch: it gives `{"outputs": ..., "target": ...}`."""

    def outputs_step(model: nn.Module, batch: Any) -> StepOutput:
        returned = step(model, batch)
        if (
            not isinstance(returned, Mapping)
            or "outputs" not in returned
            or not returned.keys() <= {"outputs", "target"}
        ):
            got = f"the keys {list(returned)}" if isinstance(returned, Mapping) else _kind(returned)
            raise ModelError(
                "with a loss over the batch, step returns a mapping with 'outputs', and maybe 'target', which the "
                f"loss gets once those of all shards are there; got {got}"
            )
        return StepOutput(**returned)

    outputs_step.__wrapped__ = step  # type: ignore[attr-defined]
    return outputs_step


def run_step(step: Step, model: nn.Module, batch: Any) -> StepOutput:
    """Call a step; it returns a loss, or a mapping `{"loss": ..., "outputs": ..., "target": ...}`.

    In an evaluation the mapping may lack the loss: a detector gives none then. Raises ModelError if the step raises,
    or if its mapping has no loss or other keys.
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
    lacks_loss = "loss" not in returned and (model.training or "outputs" not in returned)
    if lacks_loss or not returned.keys() <= {"loss", "outputs", "target"}:
        raise ModelError(
            f"step returned a mapping with the keys {list(returned)}; it must hold 'loss', and may hold 'outputs' "
            "and 'target'; in an evaluation, 'outputs' are enough"
        )
    return StepOutput(**returned)


def beside(outputs: Any, target: Any) -> Any:
    """Move the target to the device of the first tensor of the outputs."""
    device = next((leaf.device for leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)), None)
    return target if device is None else moved_batch(target, device)


def keywords_hint(model: nn.Module, inputs: Any, call: str, error: BaseException) -> str:
    """Return a hint for a model that got one dict, if its forward takes the keys as keywords or fails on a dict."""
    if call not in ("auto", "one") or not isinstance(inputs, Mapping):
        return ""
    try:
        names = set(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # a C function may have no signature
        names = set()
    is_of_dict = f"{type(inputs).__qualname__!r} object" in str(error)
    if not (isinstance(error, TypeError) or is_of_dict or names & inputs.keys()):
        return ""
    return "; the model got one dict: to pass its keys as keywords, set call: kwargs"


class Metrics:
    """The loss, and the metrics that are functions of (outputs, target), as sums and weights.

    They follow the loss contract of `dp_ray.engine.step`.
    """

    def __init__(self, functions: Mapping[str, Compare], batch_dim: int = 0, mixture: Mixture | None = None) -> None:
        self.functions = dict(functions)
        self.mixture = mixture  # of a training's dataset: the loss is measured by source, too
        self._batch_dim = batch_dim
        self._tried: set[str] = set()  # the measures whose numbers a trial has counted
        self._of_rows: set[Any] = set()  # the sizes of values, outputs and targets that are known to be of rows

    def names(self, has_loss: bool) -> list[str]:
        """Return the names of the measures, the loss first."""
        return ["loss", *self.functions] if has_loss else list(self.functions)

    def loss(self, step_output: StepOutput, rows: int) -> Weighted:
        """Return the sum and weight of the loss of a shard of `rows` rows; raises what `weighted_sum` raises."""
        value, function = step_output.loss, step_output.compare
        weighed = weighted_sum(value, rows, "the loss", OWN_MEAN if function is None else "")
        if function is not None and weighed is not value:  # else the loss has told its weight itself
            self._check_rows("the loss", function, value, step_output, rows)
        return weighed

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
            self._check_rows(f"metrics.{name}", function, value, step_output, rows)
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
        sums, counts = (torch.where(is_of, part, 0.0).sum(1).unbind() for part in of_rows)
        return [Weighted(total, count) for total, count in zip(sums, counts, strict=True)]

    def _check_rows(self, what: str, function: Compare, value: Any, step_output: StepOutput, rows: int) -> None:
        """Raise ModelError if a value is not of single rows; if its size does not show it, a trial does, once."""
        if what in self._tried:
            return
        outputs, target = step_output.outputs, step_output.target
        are_tensors = type(value) is type(outputs) is type(target) is torch.Tensor
        sizes = (rows, value.shape, outputs.shape, target.shape) if are_tensors else None
        if sizes in self._of_rows:
            return
        if not _may_not_be_of_rows(value, rows, outputs, target, self._batch_dim):
            if sizes is not None:
                self._of_rows.add(sizes)
        else:
            self._tried.add(what)
            counts = _count_numbers(function, outputs, target, self._batch_dim)
            if counts is not None:
                size = f"{what} returned a tensor of size {list(value.shape)} for a shard of {rows} rows"
                _check_numbers(size, *counts, describe_compared(outputs, target))


def _check_numbers(says: str, of_one: int, of_two: int, hint: str) -> None:
    """Raise ModelError if so many numbers for one row and for two show that they are not of single rows."""
    if 0 < of_one == of_two:
        raise ModelError(
            f"{says}, and returns as many numbers for one row as for two: so they are not one for each row, but one "
            "for each class, say; return one number for each row, or (sum, weight)"
        )
    if of_one > 0 and of_two == 4 * of_one:
        raise ModelError(
            f"{says}, and returns four times as many numbers for two rows as for one: each output has been compared "
            f"with each target; give both the same size, or return one number for each row{hint}"
        )


def _may_not_be_of_rows(value: Any, rows: int, outputs: Any, target: Any, batch_dim: int) -> bool:
    """Return whether the size of a value may come from another dimension of the outputs or target that is as long.

    Or from their rows twice, if outputs and target have been broadcast against each other.
    """
    if not isinstance(value, torch.Tensor):
        return False
    if may_have_lists_of_rows(outputs, rows) or may_have_lists_of_rows(target, rows):
        return False  # a trial of one row, and of two, cannot be cut from them
    if rows not in value.shape or list(value.shape).count(rows) > 1:
        return True
    others = (
        length
        for leaf in flatten((outputs, target))[0]
        for place, length in enumerate(leaf.shape)
        if leaf.ndim > 1 and place != rows_dim(leaf, min(batch_dim, leaf.ndim - 1))
    )
    return rows in others


@torch.no_grad()
def _count_numbers(function: Compare, outputs: Any, target: Any, batch_dim: int) -> tuple[int, int] | None:
    """Count the numbers that a function returns for one row and for two.

    A copy of the function is called with the first row, and with that row twice. None if such a call raises, or
    returns no tensor.
    """
    try:
        row = copied(scatter((outputs, target), num_rows((outputs, target), batch_dim) or 1, batch_dim)[0])
        trial = copy.deepcopy(function)  # it may keep a state
        with preserved(_device_of(row)), on_copies(modules_in("", function)):  # deepcopy copies no closure
            of_two = trial(*gather([row, row], [1, 1], batch_dim))
            of_one = trial(*row)
    except Exception:  # it may need more rows, or other outputs and targets than one tensor row each
        return None
    if not isinstance(of_one, torch.Tensor) or not isinstance(of_two, torch.Tensor):
        return None
    return of_one.numel(), of_two.numel()


def weighted_sum(value: Any, rows: int, what: str, hint: str = "") -> Weighted:
    """Return the sum and weight of what a loss or metric gave for a shard of `rows` rows; `what` names it in errors.

    Raises ModelError if it is computed from shards of parameters (strategy: fsdp), or if it is one number for the
    whole shard, whose weight in the batch is unknown: the `hint` ends that error. Raises ModelError if its size does
    not match the rows: it has fewer elements, or no dimension is `rows` long and the first one is no multiple of
    `rows`. A pair that has a graph is returned as a `UsersPair`.
    """
    if isinstance(value, Weighted):
        return value
    if any(map(is_sharded, value if isinstance(value, tuple | list) else [value])):
        raise ModelError(f"{what} returned a tensor of shards{OF_SHARDS}")
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
            f"{what} returned a pair of {_kind(total)} and {_kind(weight)}; (sum, weight) are two numbers"
        )
    if not isinstance(value, torch.Tensor):
        raise ModelError(f"{what} returned {_kind(value)}; it must return one number for each row, or (sum, weight)")
    if value.ndim == 0 or value.numel() < min(rows, 2):
        raise ModelError(
            f"{what} returned {_kind(value)} for a shard of {rows} rows: the whole batch's mean cannot be made of "
            "means over shards; return one number for each row (torch's losses: reduction='none'), or "
            f"(sum, weight): for reduction='batchmean' (sum, rows), for a mean over n elements (loss * n, n){hint}"
        )
    if value.numel() < rows or not (rows in value.shape or value.shape[0] % rows == 0):
        raise ModelError(
            f"{what} returned {_kind(value)} for a shard of {rows} rows: one number for each row or element has the "
            f"size [{rows}], [{rows}, ...] or [{rows} * n]; for one number per class, or for what a mask or collate "
            "leaves, return (sum, weight)"
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


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of size {list(value.shape)}" if value.ndim else "one number"
    return f"a {type(value).__qualname__}"


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
    if not any(isinstance(number, torch.Tensor) for number in row):
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


def _step_hint(job: Job, inputs: Any, outputs: Any, error: BaseException) -> str:
    """Return a step for a model that gave a mapping to a loss that takes none; else empty."""
    if not isinstance(outputs, Mapping) or type(outputs).__name__ not in str(error):
        return ""
    tensors = [key for key, output in outputs.items() if isinstance(output, torch.Tensor) and output.ndim]
    loss, n = _in_words(job.loss)
    if not tensors or not loss:
        return ""
    key = "logits" if "logits" in tensors else tensors[0]
    stars = "**" if job.call == "kwargs" else "*" if is_unpacked(inputs, job.call) else ""
    counted, pair = (f", {n}", f"({loss} * n, n)") if n else ("", loss)
    return f"""; leave loss out, and write a step, which picks what it takes:
    def step(model, batch):
        outputs{", n" if n else ""} = model({stars}batch{"[0]" if job.gives_first else ""})[{key!r}]{counted}
        return {{"loss": {pair}, "outputs": outputs, "target": batch[1]}}"""


def _in_words(loss: Any) -> tuple[str, str]:
    """Return the code that calls a job's loss, and the code of n if it is a mean over n.

    Both are empty if torch's loss has weights of classes: no short code has the same mean.
    """
    args: Mapping[str, Any] = loss.args if isinstance(loss, Target) else {}
    named = resolve("loss", loss) if isinstance(loss, Target) else loss
    kind = type(named) if isinstance(named, nn.Module) else named
    name = getattr(kind, "__qualname__", "loss")
    given = [f"{name}={value!r}" for name, value in args.items() if (name, value) != ("reduction", "none")]
    is_torchs = getattr(kind, "__module__", "").startswith("torch.nn.")
    if is_torchs:
        name = f"torch.nn.{name}" if inspect.isclass(kind) else f"torch.nn.functional.{name}"
    if isinstance(named, nn.Module):
        call = "loss(outputs, batch[1])"
    elif inspect.isclass(named):
        call = f"{name}({', '.join(given)})(outputs, batch[1])"
    else:
        call = f"{name}({', '.join(['outputs', 'batch[1]', *given])})"
    if not is_torchs or getattr(named, "reduction", "") == "none":
        return call, ""
    if args.get("weight") is not None or getattr(named, "weight", None) is not None:
        return "", ""
    if "batchmean" in (args.get("reduction"), getattr(named, "reduction", "")):
        return call, "len(batch[1])"
    if "ignore_index" not in inspect.signature(kind).parameters:
        return call, "batch[1].numel()"
    return call, f"(batch[1] != {args.get('ignore_index', getattr(named, 'ignore_index', -100))}).sum()"


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
        raise DataError(
            f"task {self._job.task} needs items that are (inputs, target), got a batch of {self._described(batch)}; "
            f"{advice}write a step{OWN_MEAN}"
        )

    def _described(self, batch: Any) -> str:
        origin = "" if self._job.collate is None else " after the collate"
        return f"a {class_of(batch)}{origin}"


class PredictInputs(ModelInputs):
    """Picks the model's part of each batch of a prediction; with `inputs: auto`, by the signature of its forward.

    `say` is called once if a target is left out, or if one may reach the model.
    """

    def __init__(self, job: Job, model: nn.Module, say: Callable[[str], None]) -> None:
        super().__init__(job)
        self._arguments = _num_positional(model)
        self._say = say
        self._has_noted = False
        self._is_auto = job.inputs == "auto"

    def __call__(self, batch: Any) -> Any:
        is_pair = self._is_auto and isinstance(batch, tuple | list) and len(batch) == 2 and not are_texts(batch)
        if not is_pair:
            return super().__call__(batch)
        least, most = self._arguments
        gives_first = _takes_first(self._job, least, most, batch[0])
        may_take_target = self._job.call in ("auto", "args") and least < 2 <= most
        if not self._has_noted and (gives_first or may_take_target):
            self._say(LEAVES_OUT if gives_first else GIVES_BOTH)
        self._has_noted = True
        return batch[0] if gives_first else batch


def _takes_first(job: Job, least: int, most: float, first: Any) -> bool:
    """Return whether the model takes the first of a pair, rather than both.

    `least` and `most` are how many positional arguments its forward takes. `first` is the pair's first item.
    If the job has a loss or metrics, a pair is (inputs, target).
    """
    has_targets = job.loss is not None or bool(job.metrics)
    if job.call == "kwargs":
        return isinstance(first, Mapping)
    if job.call == "one" or least < 2 <= most:
        return has_targets
    return most < 2 or (has_targets and isinstance(first, tuple | list))


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


def build_loss(spec: Any, device: torch.device, batch_dim: int = 0) -> Compare:
    """Return the job's loss as a function of (outputs, target); torch's own losses are built unreduced.

    A loss over the batch is built as it is. Raises JobError if it cannot be called, has parameters to train, or asks
    for a reduction that has no mean over the whole global batch.
    """
    sees_all = is_over_batch(spec)
    if sees_all:
        loss = bind("loss", spec)() if inspect.isclass(resolve("loss", spec)) else bound("loss", spec)
    else:
        loss = _from_target(spec, batch_dim) if isinstance(spec, Target) else _unreduced(spec, batch_dim)
    if isinstance(loss, nn.Module):
        if any(parameter.requires_grad for parameter in loss.parameters()):
            advice = "make it a part of the model, and use step"
            if sees_all:
                advice = (
                    "make them the model's, and return them beside its outputs: what is the same in all shards needs "
                    "no rows"
                )
            raise JobError(f"loss: has parameters of its own to train; {advice}")
        loss = loss.to(device)
    if not sees_all and isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return functools.partial(_of_classes, loss)
    if not callable(loss):
        raise JobError(f"loss: must be a function of (outputs, target), got {_kind(loss)}")
    compare: Compare = loss
    return compare


def _from_target(target: Target, batch_dim: int) -> Any:
    named = resolve("loss", target)
    if named in _AS_MODULES:
        return _from_target(Target(target=f"torch.nn:{_AS_MODULES[named]}", args=target.args), batch_dim)
    is_torchs = getattr(named, "__module__", "").startswith("torch.nn.")
    has_reduction = is_torchs and "reduction" in inspect.signature(named).parameters
    reduction = target.args.get("reduction", "none")
    if has_reduction:
        for name in {"size_average", "reduce"} & target.args.keys():
            raise JobError(
                f"loss.args.{name}: torch's old name for a reduction; leave it out for the mean over all elements"
            )
        if reduction not in ("none", "mean") and (named, reduction) != (nn.KLDivLoss, "batchmean"):
            raise JobError(f"loss.args.reduction: {_means(reduction)}")
        # A list of numbers is that of the classes' weights.
        tensors = {
            name: _as_weights(torch.tensor(value)) for name, value in target.args.items() if isinstance(value, list)
        }
        target = target.model_copy(update={"args": {**target.args, **tensors, "reduction": "none"}})
    loss = bind("loss", target)() if inspect.isclass(named) else bound("loss", target)
    if not has_reduction:
        return _unreduced(loss, batch_dim)
    return functools.partial(_per_row, loss, batch_dim) if reduction == "batchmean" else loss


# The modules' means divide by the weights of the classes, and batchmean by the rows, so the functions must too.
_AS_MODULES: Mapping[Any, str] = {
    functional.cross_entropy: "CrossEntropyLoss",
    functional.nll_loss: "NLLLoss",
    functional.kl_div: "KLDivLoss",
}


def _unreduced(loss: Any, batch_dim: int) -> Any:
    """Return the job's own loss; one of torch's as a copy that does not reduce, since the object is the user's."""
    if inspect.isclass(loss) and issubclass(loss, _Loss):
        loss = loss()
    if not isinstance(loss, _Loss):
        return loss
    if loss.reduction == "sum":
        raise JobError(f"loss: was made with reduction='sum'; {_means('sum')}")
    if loss.reduction not in ("none", "mean", "batchmean"):
        raise JobError(
            f"loss: was made with reduction={loss.reduction!r}, which is not known; write a function that returns "
            "(sum, weight)"
        )
    unreduced = copy.copy(loss)
    unreduced.reduction = "none"
    unreduced._buffers = {key: value if value is None else _as_weights(value) for key, value in loss._buffers.items()}
    return functools.partial(_per_row, unreduced, batch_dim) if loss.reduction == "batchmean" else unreduced


def _as_weights(numbers: torch.Tensor) -> torch.Tensor:
    """Return weights of classes in a dtype that losses accept: integers become floats."""
    return numbers if numbers.is_floating_point() else numbers.to(torch.get_default_dtype())


def _means(reduction: Any) -> str:
    return (
        "the loss is the mean over the whole global batch, so that the split does not matter, and reduction cannot "
        f"be {reduction!r}; leave it out for the mean over all elements, or write a function that returns "
        "(sum, rows) for the mean over the rows; both are smaller than the sum, so the learning rate may have to grow"
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


class SplitLosses(NamedTuple):
    """The loss of a shard's first row and of its others, each given to the loss apart, and of all rows together."""

    first: float
    others: float
    together: float


@torch.no_grad()
def of_neighbours(
    compare: Compare, value: Any, seen: tuple[Any, Any], rows: int, batch_dim: int, is_exact: bool
) -> SplitLosses | None:
    """Return the loss of parts of a shard, if the losses of rows depend on the other rows; None if not, or unknown.

    `value` is the loss of the outputs and target `seen`. The sum of a loss of single rows is the sum of its parts, up
    to rounding, which is small if `is_exact`. A copy of the loss is called, without gradients: twice, and once more
    if the sums differ, since a loss that draws or keeps a state gives another one for the same rows.
    """
    try:
        if rows < 2 or is_torchs(compare) or any(may_have_lists_of_rows(batch, rows) for batch in seen):
            return None
        if num_rows(seen, batch_dim) != rows:
            return None
        together, size = _sum_and_size(value, rows)
        beside = modules_in("", compare)

        def loss_of(start: int, stop: int) -> float:
            # The copies share the loss's parameters, which may be those of a large model.
            shared = {id(parameter): parameter for module in beside.values() for parameter in module.parameters()}
            trial: Compare = copy.deepcopy(compare, dict[int, Any](shared))
            return _sum_and_size(trial(*copied(cut(seen, start, stop, batch_dim))), stop - start)[0]

        with preserved(_device_of(seen)), on_copies(beside):
            first, others = loss_of(0, 1), loss_of(1, rows)
            room = size * (1e-5 if is_exact and isinstance(value, torch.Tensor) else 1e-4 if is_exact else 5e-3)
            if not abs(together - first - others) > room:  # also if one is NaN
                return None
            same = abs(loss_of(0, rows) - together) <= room
    except Exception:  # a user's loss may take no single row, or the device has no memory for another call
        return None
    return SplitLosses(first, others, together) if same and math.isfinite(first + others + together) else None


def is_torchs(compare: Compare) -> bool:
    """Return whether a loss is one of torch's own classes: they give losses of single rows."""
    while isinstance(compare, functools.partial):
        inner = [module for module in (compare.func, *compare.args) if isinstance(module, nn.Module)]
        compare = inner[0] if inner else compare.func
    return (type(compare) if isinstance(compare, nn.Module) else compare).__module__.startswith("torch.nn.")


def _sum_and_size(value: Any, rows: int) -> tuple[float, float]:
    """Return the sum of a loss, and the scale of its rounding: the size of its numbers, or its weight if larger."""
    weighed = weighted_sum(value, rows, "the loss")
    if isinstance(value, torch.Tensor):
        numbers = value.double()
        return float(numbers.sum()), float(numbers.abs().sum())
    total = float(weighed.sum)
    return total, max(abs(total), float(weighed.weight))


def _device_of(tree: Any) -> torch.device:
    devices = (leaf.device for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor))
    return next(devices, torch.device("cpu"))
