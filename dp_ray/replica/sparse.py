"""Sparse gradients (`nn.Embedding(sparse=True)`): summed over the workers by gathering their rows.

DDP leaves the sum to the backend: NCCL cannot sum sparse tensors, and no worker may lack a gradient.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.tensors.shards import local

_UNUSED, _DENSE = -1, -2


def make_gradients_dense(model: nn.Module) -> None:
    """Set every embedding of the model to make dense gradients."""
    for module in _sparse_modules(model):
        module.sparse = False


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights whose gradients are sparse tensors."""
    weights = [module.weight for module in _sparse_modules(model)]
    found = {id(one): one for one in weights if isinstance(one, nn.Parameter) and one.requires_grad}
    return list(found.values())


def sum_over_workers(parameters: Sequence[nn.Parameter]) -> None:
    """Set each parameter's gradient to its sum over all workers; every rank calls this.

    The sum is sparse and coalesced; dense if it is dense on any worker; None if no worker used the parameter.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    if not parameters or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    device = parameters[0].device
    counts = torch.tensor([_count(parameter.grad) for parameter in parameters], device=device)
    everybodys = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, counts)
    for parameter, theirs in zip(parameters, torch.stack(everybodys, 1).tolist(), strict=True):
        if _DENSE in theirs:
            dense = _densely(parameter)
            dist.all_reduce(dense)
            parameter.grad = dense
        else:
            parameter.grad = _gathered(parameter, theirs)


def numbers_of(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient that this worker holds, as a dense tensor that can be changed in place."""
    return local(gradient.values() if gradient.is_sparse else gradient)


def _sparse_modules(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    return [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse]


def _count(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _UNUSED
    return gradient.values().shape[0] if gradient.is_sparse else _DENSE


def _densely(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def _gathered(parameter: nn.Parameter, counts: Sequence[int]) -> torch.Tensor | None:
    """One sparse gradient of all workers' rows; worker r has `counts[r]` of them."""
    most = max(counts)
    if most <= 0:
        return None
    width = parameter.shape[1:]
    rows = torch.zeros(most, dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros(most, *width)
    if parameter.grad is not None:
        count = parameter.grad.values().shape[0]
        rows[:count] = parameter.grad.indices()[0]
        values[:count] = parameter.grad.values()
    all_rows, all_values = ([torch.empty_like(one) for _ in counts] for one in (rows, values))
    dist.all_gather(all_rows, rows)
    dist.all_gather(all_values, values.detach())
    kept = [max(0, count) for count in counts]
    indices = torch.cat([one[:count] for one, count in zip(all_rows, kept, strict=True)])
    numbers = torch.cat([one[:count] for one, count in zip(all_values, kept, strict=True)])
    return torch.sparse_coo_tensor(indices[None], numbers, parameter.shape, check_invariants=False).coalesce()
