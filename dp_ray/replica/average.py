"""The exponential moving average of a model's weights, beside the weights, with torch's `swa_utils`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.replica.model import compiled
from dp_ray.replica.user_code import raising

INNER = "module."  # before the names of the model's tensors in the average's state


class Average:
    """A copy of the model whose parameters are the moving average of the model's; its buffers are the model's own."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        assert job.ema is not None
        self._model = model
        with raising("ema: copying the model", kind=JobError):
            mean = get_ema_multi_avg_fn(job.ema.decay)  # type: ignore[no-untyped-call]
            self._averaged = AveragedModel(model, multi_avg_fn=mean)
        self._averaged.requires_grad_(False)
        self.module: nn.Module = self._averaged.module
        self.called = compiled(self.module, job)

    @torch.no_grad()
    def begin(self) -> None:
        """Start from the model's weights, unless a checkpoint has given the average already."""
        if not self._averaged.n_averaged:
            there = zip(_tensors(self.module), _tensors(self._model), strict=True)
            for mine, one in there:
                mine.copy_(one)

    def update(self) -> None:
        """Take in the weights after an update of the optimizer; the first ones are the average's start."""
        self._averaged.update_parameters(self._model)

    def state_dict(self) -> dict[str, Any]:
        """The average and how many updates it has taken in; its tensors are the live ones."""
        return self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._averaged.load_state_dict(state)


def weights_of_average(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights in the average's state, as the bare module's `load_state_dict` takes them."""
    return {name.removeprefix(INNER): one for name, one in state.items() if name.startswith(INNER)}


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
