"""Run one shard through the model: its outputs, its loss and its metrics."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.plan.split import Shard
from dp_ray.replica.devices import mixed_devices
from dp_ray.replica.inputs import model_inputs
from dp_ray.replica.loss import Compare, Weighted, build_loss, may_not_be_of_rows, numbers_given, weighted_sum
from dp_ray.replica.model import call_model
from dp_ray.replica.out_of_memory import shapes_told
from dp_ray.replica.targets import bound
from dp_ray.replica.user_code import got, it_got, one_row_told, raising, shards_told
from dp_ray.replica.world import World, is_gpu
from dp_ray.tensors.nested import flatten, map_leaves
from dp_ray.tensors.raw import moved

Step: TypeAlias = Callable[[nn.Module, Any], Any]


class StepOutput(NamedTuple):
    """The results of a step on one shard; a user's step may leave out all but the loss.

    `compare` is the loss function, which made `loss` of `outputs` and `target`; None with a user's step.
    """

    loss: Any = None
    outputs: Any = None
    target: Any = None
    compare: Compare | None = None


OnShard: TypeAlias = Callable[[Shard, Any, StepOutput], None]  # gets each shard with its batch and output

NAMED = ("loss", "outputs", "target")

Row: TypeAlias = list[float] | torch.Tensor  # sums and weights of a shard; on a GPU a tensor, float64


def build_step(job: Job, world: World) -> Step:
    """The user's step, or the plain one: the model on the inputs, the loss on its outputs and the target.

    If the model is on several devices, the target is moved to the device of the outputs.
    """
    if job.step is not None:
        step: Step = bound("step", job.step)
        return step
    loss = None if job.loss is None else build_loss(job.loss, world.devices[-1], job.batch_dim)
    has_several = len(world.devices) > 1

    def plain_step(model: nn.Module, batch: Any) -> StepOutput:
        inputs, target = model_inputs(job, batch), batch[1]
        with raising("model", lambda error: told(model, error) or one_row_told(error) or it_got(inputs)):
            outputs = call_model(model, inputs, job.call)
        if has_several:
            target = beside(outputs, target)
        if loss is None:
            return StepOutput(None, outputs, target)
        with raising("loss", lambda _: got(outputs, target)):
            return StepOutput(loss(outputs, target), outputs, target, loss)

    return plain_step


def told(model: nn.Module, error: BaseException) -> str:
    """A hint on an error of code that runs the model: tensors on two devices, or shards."""
    return mixed_devices(model, error) or shards_told(error)


def beside(outputs: Any, target: Any) -> Any:
    """The target, moved to the device of the first tensor of the outputs."""
    device = next((leaf.device for leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)), None)
    return target if device is None else map_leaves(lambda leaf: moved(leaf, device), target)


def run_step(step: Step, model: nn.Module, batch: Any) -> StepOutput:
    """Call a step; it returns a loss, or a mapping `{"loss": ..., "outputs": ..., "target": ...}`.

    Raises ModelError if the step raises, or if its mapping has no loss or other keys.
    """
    with raising("step", lambda error: told(model, error) or shapes_told(error, batch)):
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
    """The loss, and the metrics that are functions of (outputs, target), as sums and weights.

    They follow the loss contract of `dp_ray.replica.loss`.
    """

    def __init__(self, functions: Mapping[str, Compare], batch_dim: int = 0) -> None:
        self.functions = dict(functions)
        self._batch_dim = batch_dim
        self._asked: set[str] = set()

    def names(self, has_loss: bool) -> list[str]:
        """The names of what is measured, the loss first."""
        return [*["loss"] * has_loss, *self.functions]

    def loss(self, step_output: StepOutput, rows: int) -> Weighted:
        """The sum and weight of the loss of a shard of `rows` rows; raises what `weighted_sum` raises."""
        return self._weighted_sum("the loss", step_output.compare, step_output.loss, step_output, rows)

    def __call__(self, step_output: StepOutput, rows: int) -> list[Weighted]:
        """The sum and weight of each metric of a shard of `rows` rows.

        Raises ModelError if a metric raises or breaks the loss contract, or if the step gave no outputs.
        """
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
        """A value's sum and weight; if its size may not come from its rows, that is asked once."""
        weighed = weighted_sum(value, rows, what)
        if function is None or what in self._asked:
            return weighed
        seen = step_output.outputs, step_output.target
        if may_not_be_of_rows(value, rows, *seen, self._batch_dim):
            self._asked.add(what)
            if (given := numbers_given(function, *seen, self._batch_dim)) is not None:
                size = f"{what} returned a tensor of size {list(value.shape)} for a shard of {rows} rows"
                check_numbers(size, *given, got(*seen))
        return weighed


def check_numbers(says: str, one: int, two: int, hint: str) -> None:
    """Raise ModelError if so many numbers for one row and for two show that they are not of single rows."""
    if 0 < one == two:
        raise ModelError(
            f"{says}, and returns as many numbers for one row as for two: so they are not one for each row, but one "
            "for each class, say; return one number for each row, or (sum, weight)"
        )
    if one > 0 and two == 4 * one:
        raise ModelError(
            f"{says}, and returns four times as many numbers for two rows as for one: each output has been compared "
            f"with each target; give both the same size, or return one number for each row{hint}"
        )


def row_of(measured: list[Weighted], device: torch.device) -> Row:
    """Sums and weights, 2 * names of them: sum, weight, sum, weight ... Those on a GPU stay there."""
    numbers = [number for one in measured for number in one]
    if not is_gpu(device) and all(map(_can_be_read, numbers)):
        return [number.item() if isinstance(number, torch.Tensor) else number for number in numbers]
    return torch.stack([_scalar(number, device) for number in numbers])


def as_tensor(row: Row, device: torch.device) -> torch.Tensor:
    """A row as a tensor on the device, float64."""
    return row if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=torch.float64, device=device)


def _can_be_read(number: torch.Tensor | float) -> bool:
    """Whether a number can be read without waiting for a GPU: it is on the CPU, and no fake tensor."""
    return number.is_cpu if type(number) is torch.Tensor else not isinstance(number, torch.Tensor)


def _scalar(number: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """The number on the device, without waiting for the device."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, torch.float64).reshape(())
    return torch.full((), number, dtype=torch.float64, device=device)
