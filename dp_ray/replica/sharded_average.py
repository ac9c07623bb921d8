"""The moving average of the weights of a sharded model: each worker averages its own part of them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dp_ray.job import Job
from dp_ray.replica.aligned import AlignedParts, one_thread
from dp_ray.replica.average import INNER, Average, averaged_model, take_in, weights_of_average
from dp_ray.replica.buffers import copy_all
from dp_ray.replica.sharded import Sharded
from dp_ray.replica.sharded_state import sharded_as, whole_tensors
from dp_ray.tensors.shards import is_sharded, local


class _Parts(nn.Module):
    """What this worker holds of the parameters, and the buffers, in the same memory."""

    def __init__(self, parameters: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(one, requires_grad=False) for one in parameters)
        for number, one in enumerate(buffers):
            self.register_buffer(f"buffer_{number}", one)


class ShardedAverage:
    """The average of this worker's part of each parameter; evaluations run the model with the average in its place.

    With `aligned`, the parts begin and end where vectors do, so that their average has the bits of whole parameters.
    """

    def __init__(self, job: Job, sharded: Sharded, aligned: AlignedParts | None) -> None:
        self._sharded = sharded
        self._model = sharded.model
        self._parameters, self._buffers = list(self._model.parameters()), list(self._model.buffers())
        self._aligned = {} if aligned is None else {id(one.parameter): one for one in aligned.parts}
        self._averaged = averaged_model(job, _Parts(self._live(), self._buffers))

    def called(self, called: nn.Module) -> nn.Module:
        """What evaluations call: the model itself."""
        return called

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While the block runs, the average is in the model's place."""
        mine, averages = self._of_model(), self._of_average()
        kept = _copies(mine)
        copy_all(mine, averages)
        try:
            yield
        finally:
            copy_all(mine, kept)

    def begin(self) -> None:
        """Start from the model's weights, unless a checkpoint has given the average already."""
        if not self._averaged.n_averaged:
            copy_all(self._of_average(), self._of_model())

    def update(self) -> None:
        """Take in the weights after an update of the optimizer; the first ones are the average's start."""
        with one_thread(self._parameters[0]) if self._aligned else nullcontext():
            take_in(self._averaged, self._live(), self._buffers)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The average, sharded as the model is, by the names of the model's own tensors."""
        there: list[Any] = [*self._parameters, *self._buffers]
        averages = {
            id(one): sharded_as(one, mine) if is_sharded(one) else mine
            for one, mine in zip(there, self._of_average(), strict=True)
        }
        state = self._model.state_dict(keep_vars=True)
        return {name: averages.get(id(one), one) for name, one in state.items() if isinstance(one, torch.Tensor)}

    def state_dict(self) -> dict[str, Any]:
        """What the average of a whole model gives, with sharded tensors."""
        return {"n_averaged": self._averaged.n_averaged, **{INNER + key: one for key, one in self.tensors().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this worker's rows of a state whose tensors are stored, by way of the model."""
        mine = self._of_model()
        kept = _copies(mine)
        self._sharded.load_weights(weights_of_average(state), "the checkpoint's ema")
        copy_all(self._of_average(), mine)
        copy_all(mine, kept)
        self._averaged.n_averaged.copy_(whole_tensors(state["n_averaged"]))

    def _live(self) -> list[torch.Tensor]:
        """What is averaged: of each parameter what the optimizer has updated."""
        return [
            local(one.detach()) if (part := self._aligned.get(id(one))) is None else part.flat.detach()
            for one in self._parameters
        ]

    def _of_model(self) -> list[torch.Tensor]:
        return [*(local(one.detach()) for one in self._parameters), *self._buffers]

    def _of_average(self) -> list[torch.Tensor]:
        """The average of each parameter's part, in the part's shape, and the buffers beside it."""
        averages = [one.detach() for one in self._averaged.module.parameters()]
        inner = [
            mine if (part := self._aligned.get(id(one))) is None else part.inner(mine).view(local(one).shape)
            for one, mine in zip(self._parameters, averages, strict=True)
        ]
        return [*inner, *self._averaged.module.buffers()]


def average_of(
    job: Job, model: nn.Module, sharded: Sharded | None, aligned: AlignedParts | None
) -> Average | ShardedAverage | None:
    """The average of the weights, if the job keeps one."""
    if job.ema is None:
        return None
    return Average(job, model) if sharded is None else ShardedAverage(job, sharded, aligned)


@torch.no_grad()
def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.clone() for one in tensors]
