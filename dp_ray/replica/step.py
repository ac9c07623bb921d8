"""One shard through the model: its outputs, its loss and its metrics."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from dp_ray.errors import DataError, ModelError
from dp_ray.job import Job
from dp_ray.replica.data import model_inputs
from dp_ray.replica.loss import Compare, Weighted, build_loss, weigh
from dp_ray.replica.model import call_model
from dp_ray.replica.targets import bound
from dp_ray.replica.tree import flatten, map_leaves
from dp_ray.replica.world import World

Step: TypeAlias = Callable[[nn.Module, Any], Any]


class Stepped(NamedTuple):
    """What a shard's step gave; a step of the user's may leave out all but the loss."""

    loss: Any = None
    outputs: Any = None
    target: Any = None


def build_step(job: Job, world: World) -> Step:
    """The user's step, or the plain one: the model on the inputs, the loss on its outputs and the target.

    Where the model lies on several devices, the target is taken to where the outputs are.
    """
    if job.step is not None:
        step: Step = bound("step", job.step)
        return step
    loss = None if job.loss is None else build_loss(job.loss, world.devices[-1])
    has_several = len(world.devices) > 1

    def plain_step(model: nn.Module, batch: Any) -> Stepped:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(
                f"task {job.task} needs items that are (inputs, target), got a batch of {_noun(batch)}; "
                "for items of another kind write a step"
            )
        outputs, target = call_model(model, model_inputs(job, batch), job.call), batch[1]
        if has_several:
            target = beside(outputs, target)
        return Stepped(None if loss is None else loss(outputs, target), outputs, target)

    return plain_step


def beside(outputs: Any, target: Any) -> Any:
    """The target on the device of the outputs."""
    device = next((leaf.device for leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)), None)

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return target if device is None else map_leaves(move, target)


def run_step(step: Step, model: nn.Module, batch: Any) -> Stepped:
    """Call a step; a mapping `{"loss": ..., "outputs": ..., "target": ...}` names what it gives."""
    given = step(model, batch)
    if isinstance(given, Stepped):
        return given
    if not isinstance(given, Mapping):
        return Stepped(given)
    if unknown := [name for name in given if name not in Stepped._fields] or "loss" not in given:
        raise ModelError(
            f"step returned a mapping with the keys {list(given)}: {unknown}; it may hold {Stepped._fields}"
        )
    return Stepped(**given)


class Measures:
    """The job's metrics that are functions of (outputs, target), by name; each keeps the loss contract."""

    def __init__(self, functions: Mapping[str, Compare]) -> None:
        self.functions = dict(functions)

    def names(self, has_loss: bool) -> list[str]:
        return [*["loss"] * has_loss, *self.functions]

    def __call__(self, stepped: Stepped, rows: int) -> list[Weighted]:
        measured = []
        for name, function in self.functions.items():
            if stepped.outputs is None:
                raise ModelError(
                    f"metrics.{name}: the step gave no outputs; return them: {{'loss': ..., 'outputs': ...}}"
                )
            measured.append(weigh(function(stepped.outputs, stepped.target), rows, f"metrics.{name}"))
        return measured


def as_row(measured: list[Weighted], device: torch.device) -> torch.Tensor:
    """Sums and weights as one row of numbers, float64 [2 * names]: sum, weight, sum, weight ..."""
    return torch.stack([_scalar(number, device) for one in measured for number in one])


def _scalar(number: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """The number on the device, without waiting for the device."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, torch.float64).reshape(())
    return torch.full((), number, dtype=torch.float64, device=device)


def _noun(batch: Any) -> str:
    return f"a {type(batch).__qualname__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
