"""One shard through the model: its outputs, its loss and its metrics."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.replica.devices import mixed_devices
from dp_ray.replica.inputs import model_inputs
from dp_ray.replica.loss import Compare, Weighted, build_loss, has_fixed_size, may_have_fixed_size, weighted_sum
from dp_ray.replica.model import call_model
from dp_ray.replica.targets import bound
from dp_ray.replica.user_code import got, raising
from dp_ray.replica.world import World
from dp_ray.tensors.nested import flatten, map_leaves
from dp_ray.tensors.raw import moved

Step: TypeAlias = Callable[[nn.Module, Any], Any]


class StepOutput(NamedTuple):
    """What a shard's step gave; a step of the user's may leave out all but the loss.

    `compare` is the function that made the loss of the other two, None where that is in a step of the user's.
    """

    loss: Any = None
    outputs: Any = None
    target: Any = None
    compare: Compare | None = None


NAMED = ("loss", "outputs", "target")


def build_step(job: Job, world: World) -> Step:
    """The user's step, or the plain one: the model on the inputs, the loss on its outputs and the target.

    Where the model lies on several devices, the target is taken to where the outputs are.
    """
    if job.step is not None:
        step: Step = bound("step", job.step)
        return step
    loss = None if job.loss is None else build_loss(job.loss, world.devices[-1], job.batch_dim)
    has_several = len(world.devices) > 1

    def plain_step(model: nn.Module, batch: Any) -> StepOutput:
        inputs, target = model_inputs(job, batch), batch[1]
        with raising("model", functools.partial(mixed_devices, model)):
            outputs = call_model(model, inputs, job.call)
        if has_several:
            target = beside(outputs, target)
        if loss is None:
            return StepOutput(None, outputs, target)
        with raising("loss", lambda _: got(outputs, target)):
            return StepOutput(loss(outputs, target), outputs, target, loss)

    return plain_step


def beside(outputs: Any, target: Any) -> Any:
    """The target on the device of the outputs."""
    device = next((leaf.device for leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)), None)
    return target if device is None else map_leaves(lambda leaf: moved(leaf, device), target)


def run_step(step: Step, model: nn.Module, batch: Any) -> StepOutput:
    """Call a step; a mapping `{"loss": ..., "outputs": ..., "target": ...}` names what it gives."""
    with raising("step", functools.partial(mixed_devices, model)):
        given = step(model, batch)
    if isinstance(given, StepOutput):
        return given
    if not isinstance(given, Mapping):
        return StepOutput(given)
    if "loss" not in given or not given.keys() <= set(NAMED):
        raise ModelError(
            f"step returned a mapping with the keys {list(given)}; it must hold 'loss', and may hold 'outputs' and "
            "'target'"
        )
    return StepOutput(**given)


class Metrics:
    """The loss and the job's metrics that are functions of (outputs, target), weighed by the loss contract."""

    def __init__(self, functions: Mapping[str, Compare], batch_dim: int = 0) -> None:
        self.functions = dict(functions)
        self._batch_dim = batch_dim
        self._asked: set[str] = set()

    def names(self, has_loss: bool) -> list[str]:
        return [*["loss"] * has_loss, *self.functions]

    def loss(self, step_output: StepOutput, rows: int) -> Weighted:
        return self._weighted_sum("the loss", step_output.compare, step_output.loss, step_output, rows)

    def __call__(self, step_output: StepOutput, rows: int) -> list[Weighted]:
        """The metrics of a shard."""
        measured = []
        for name, function in self.functions.items():
            if step_output.outputs is None:
                raise ModelError(
                    f"metrics.{name}: the step gave no outputs; return them: {{'loss': ..., 'outputs': ...}}"
                )
            with raising(f"metrics.{name}", lambda _: got(step_output.outputs, step_output.target)):
                value = function(step_output.outputs, step_output.target)
            measured.append(self._weighted_sum(f"metrics.{name}", function, value, step_output, rows))
        return measured

    def _weighted_sum(
        self, what: str, function: Compare | None, value: Any, step_output: StepOutput, rows: int
    ) -> Weighted:
        """A value's sum and weight; where its size may not be that of rows, the function is asked once."""
        weighed = weighted_sum(value, rows, what)
        if function is None or what in self._asked:
            return weighed
        seen = step_output.outputs, step_output.target
        if may_have_fixed_size(value, rows, *seen, self._batch_dim):
            self._asked.add(what)
            if has_fixed_size(function, *seen, self._batch_dim):
                raise ModelError(
                    f"{what} returned a tensor of size {list(value.shape)} for a shard of {rows} rows, and "
                    "returns as many for one row as for two: these are numbers of classes, say, and not of rows; "
                    "return one number for each row, or (sum, weight)"
                )
        return weighed


def as_row(measured: list[Weighted], device: torch.device) -> torch.Tensor:
    """Sums and weights as one row of numbers, float64 [2 * names]: sum, weight, sum, weight ..."""
    return torch.stack([_scalar(number, device) for one in measured for number in one])


def _scalar(number: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """The number on the device, without waiting for the device."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, torch.float64).reshape(())
    return torch.full((), number, dtype=torch.float64, device=device)
