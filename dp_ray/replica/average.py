"""The exponential moving average of a model's weights, beside the weights, with torch's `swa_utils`."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.replica.buffers import copy_all, same_buffers
from dp_ray.replica.model import compiled, tensors_of
from dp_ray.replica.user_code import raising

INNER = "module."  # before the names of the model's tensors in the average's state


def averaged_model(job: Job, module: nn.Module) -> AveragedModel:
    """A copy of a module whose parameters are to be their moving average; the buffers stay the module's own.

    Raises JobError if it cannot be copied.
    """
    assert job.ema is not None
    with raising("ema: copying the model", kind=JobError):
        mean = get_ema_multi_avg_fn(job.ema.decay)  # type: ignore[no-untyped-call]
        made = AveragedModel(module, multi_avg_fn=mean)
    made.requires_grad_(False)
    return made


def take_in(averaged: AveragedModel, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    """What `AveragedModel.update_parameters` does, without waiting for a GPU in each step."""
    assert averaged.multi_avg_fn is not None
    mine = [one.detach() for one in averaged.module.parameters()]
    if not averaged.n_averaged:
        copy_all(mine, list(parameters))
    else:
        for device, dtype in dict.fromkeys((one.device, one.dtype) for one in mine):
            pairs = zip(mine, parameters, strict=True)
            here = [pair for pair in pairs if (pair[0].device, pair[0].dtype) == (device, dtype)]
            averaged.multi_avg_fn([one for one, _ in here], [one for _, one in here], averaged.n_averaged)
    copy_all(list(averaged.module.buffers()), list(buffers))
    averaged.n_averaged += 1


class Average:
    """The average of a model that this worker holds whole, as a second model."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._model = model
        self._averaged = averaged_model(job, model)
        self._called = compiled(self._averaged.module, job)

    def called(self, called: nn.Module) -> nn.Module:
        """What evaluations call: the average's own model."""
        return self._called

    def in_place(self) -> AbstractContextManager[None]:
        """Nothing takes the model's place."""
        return nullcontext()

    def begin(self) -> None:
        """Start from the model's weights, unless a checkpoint has given the average already."""
        same_buffers(self._model, self._averaged.module)
        if not self._averaged.n_averaged:
            copy_all(_tensors(self._averaged.module), _tensors(self._model))
        else:  # a checkpoint has not all of them
            copy_all(list(self._averaged.module.buffers()), list(self._model.buffers()))

    def update(self) -> None:
        """Take in the weights after an update of the optimizer; the first ones are the average's start."""
        buffers, mine = list(self._model.buffers()), list(self._averaged.module.buffers())
        if [one.shape for one in mine] != [one.shape for one in buffers]:
            same_buffers(self._model, self._averaged.module)
        take_in(self._averaged, [one.detach() for one in self._model.parameters()], buffers)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The average, by the names of the model's own tensors."""
        return tensors_of(self._averaged.module)

    def state_dict(self) -> dict[str, Any]:
        """The average and how many updates it has taken in; its tensors are the live ones."""
        return self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, once the model's own state is loaded."""
        same_buffers(self._model, self._averaged.module)
        self._averaged.load_state_dict(state)


def weights_of_average(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights in the average's state, as the bare module's `load_state_dict` takes them."""
    return {name.removeprefix(INNER): one for name, one in state.items() if name.startswith(INNER)}


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*(one.detach() for one in module.parameters()), *module.buffers()]
