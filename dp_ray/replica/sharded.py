"""A sharded model as a training uses it: its passes, its gradient's norm, and its state.

`replica.sharding` builds it. This module does not import torch's FSDP, which takes seconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.replica.aligned import AlignedParts
from dp_ray.replica.scatter import Round
from dp_ray.replica.sharded_state import load_rows, rows_of_optimizer, whole_tensors
from dp_ray.replica.world import CPU, World
from dp_ray.system.waiting import waiting
from dp_ray.tensors.stored import Stored


@dataclass(frozen=True)
class Sharded:
    """A sharded model. `root` is torch's FSDPModule, and `round` is what its gradients' sums go by.

    `replicated` are the parameters that each worker holds whole, by name.
    """

    model: nn.Module
    root: Any
    replicated: dict[str, nn.Parameter]
    round: Round
    world: World

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the model, with the parameters outside its blocks gathered."""
        return self.root(function, *args)

    def end_of_evaluation(self) -> None:
        """Free what a forward without a backward has left gathered."""
        self.root.reshard()

    def load_weights(self, weights: Mapping[str, Stored], where: str) -> None:
        """Load this worker's rows of the weights; raises ModelError if they are not this model's."""
        load_rows(self.model, weights, where, self.world)

    def rows_of(self, part: Any, state: Any) -> Any:
        """A stored state of an optimizer, a scheduler or a scaler, with what this worker holds of each tensor."""
        if isinstance(part, AlignedParts):
            return state
        if not isinstance(part, torch.optim.Optimizer):
            return whole_tensors(state)
        parameters = [one for group in part.param_groups for one in group["params"]]
        return rows_of_optimizer(state, parameters, self.world)

    @property
    def units(self) -> Iterator[Any]:
        """Torch's own record of each sharded parameter."""
        for module in self.root.modules():
            if hasattr(module, "_get_fsdp_state"):
                group = module._get_fsdp_state()._fsdp_param_group
                yield from group.fsdp_params if group is not None else ()

    def total_norm(self, gradients: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The norm of the whole gradient, of which `gradients` are this worker's parts; every rank calls this."""
        whole = {id(one) for one in self.replicated.values()}
        is_first = dist.get_rank() == 0
        mine = [
            gradient
            for gradient, one in zip(gradients, parameters, strict=True)
            if gradient.numel() and (is_first or id(one) not in whole)
        ]
        device = comm_device(gradients[0].device) if gradients else CPU
        squares = [torch.linalg.vector_norm(one, dtype=_wide(one.dtype)).double().square().to(device) for one in mine]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        with waiting("the other workers' norms"):
            dist.all_reduce(total)
        return total.sqrt().float()

    def infinite_if_any(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """A scalar: infinite if a number of any worker's `gradients` is not finite, else 0; every rank calls this."""
        largest = [torch.linalg.vector_norm(one, torch.inf) for one in gradients if one.numel()]
        device = self.world.device
        bad = [one.isfinite().logical_not().to(device) for one in largest]
        found = torch.stack(bad).any().float() if bad else torch.zeros((), device=device)
        with waiting("the other workers' gradients"):
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return torch.where(found > 0, torch.inf, 0.0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def comm_device(device: torch.device) -> torch.device:
    """The device of this group's collectives: gradients that are offloaded are on the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else device
