"""The moving average of a training's weights: exponential, kept beside them, with torch's `swa_utils`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dp_ray.engine.forward.buffers import copy_all, grouped
from dp_ray.engine.sharded.state import ParameterPart, one_thread, rows_like, sharded_as, whole_tensors
from dp_ray.engine.world import World
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.tensors.files import is_sharded, local
from dp_ray.text import listed

INNER, NUMBER = "module.", "n_averaged"  # in the state of torch's AveragedModel: before all names, and of its updates


class Average:
    """The average of what this worker holds of each parameter; evaluations run the model with it in their place.

    Buffers are the model's own. The `parts` of a sharded model begin and end where vectors do, so that their average
    has the bits of whole parameters.
    """

    def __init__(self, job: Job, model: nn.Module, world: World, parts: Sequence[ParameterPart] = ()) -> None:
        assert job.ema is not None
        tensors = {
            key: part for key, part in model.state_dict(keep_vars=True).items() if isinstance(part, torch.Tensor)
        }
        known = set(map(id, (*model.parameters(), *model.buffers())))
        if made := [key for key in tensors if id(tensors[key]) not in known and not key.endswith("_extra_state")]:
            raise JobError(
                f"ema: the model's own state_dict makes {listed(made)} anew, so that no average of it can be kept; "
                "have it give its parameters and buffers as they are"
            )
        self._model, self._world = model, world
        self._parameters = list(model.parameters())
        self._parts = {id(part.parameter): part for part in parts}
        self._averages = [tensor.clone() for tensor in self._live()]
        self._mean = get_ema_multi_avg_fn(job.ema.decay)  # type: ignore[no-untyped-call]
        self._num_updates = torch.tensor(0)  # that it has taken in

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average in the place of the model's parameters while the block runs."""
        weights = [local(parameter.detach()) for parameter in self._parameters]
        before = [weight.clone() for weight in weights]
        copy_all(weights, map(local, self._shown().values()))
        try:
            yield
        finally:
            copy_all(weights, before)

    def begin(self) -> None:
        """Start from the model's weights, unless a checkpoint has given the average already."""
        if not self._num_updates:
            copy_all(self._averages, self._live())

    def update(self) -> None:
        """Take in the weights after an update of the optimizer; the first ones are the average's start."""
        self.begin()
        if self._num_updates:
            with one_thread() if self._parts else nullcontext():
                for averages, weights in grouped(list(zip(self._averages, self._live(), strict=True))):
                    self._mean(averages, weights, self._num_updates)
        self._num_updates += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the average, sharded as the model is, by the names of the model's own tensors."""
        shown, state = self._shown(), self._model.state_dict(keep_vars=True)
        return {key: shown.get(id(value), value) for key, value in state.items() if isinstance(value, torch.Tensor)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's AveragedModel; its tensors are the live ones, sharded as the model is."""
        return {NUMBER: self._num_updates, **{INNER + key: tensor for key, tensor in self.tensors().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this worker's rows of what `state_dict` returned; tensors may be stored."""
        shown, weights = self._shown(), weights_of_average(state)
        for key, value in self._model.state_dict(keep_vars=True).items():
            if id(value) in shown:
                local(shown[id(value)]).copy_(local(rows_like(value, weights[key], self._world)))
        self._num_updates.copy_(whole_tensors(state[NUMBER]))

    def _live(self) -> list[torch.Tensor]:
        """Return the tensors to average: of each parameter the part that the optimizer updates."""
        parts = [self._parts.get(id(parameter)) for parameter in self._parameters]
        return [
            local(parameter.detach()) if part is None else part.flat.detach()
            for parameter, part in zip(self._parameters, parts, strict=True)
        ]

    def _shown(self) -> dict[int, torch.Tensor]:
        """Return the average of each parameter, by its id, sharded as it is; in the average's own memory."""
        shown: dict[int, torch.Tensor] = {}
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            part = self._parts.get(id(parameter))
            mine = average if part is None else part.inner(average).view(local(parameter).shape)
            shown[id(parameter)] = sharded_as(parameter, mine) if is_sharded(parameter) else mine
        return shown


EVALUATED = "evaluated"  # the key, in a checkpoint, of weights that an optimizer evaluates and does not train


def evaluated_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights in a training's state as its evaluations see them."""
    return {**state["model"], **state.get(EVALUATED, {})}


def weights_of_average(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights in the average's state, as the bare module's `load_state_dict` takes them."""
    return {name.removeprefix(INNER): value for name, value in state.items() if name.startswith(INNER)}
