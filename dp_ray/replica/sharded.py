"""A sharded model as a training uses it: its passes, its gradient's norm, and its state.

`replica.sharding` builds it. This module does not import torch's FSDP, which takes seconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

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

    `replicated` are the parameters that each worker holds whole, by name. With `recasts`, a training under autocast
    casts its weights anew for each operation and for its backward.
    """

    model: nn.Module
    root: Any
    replicated: dict[str, nn.Parameter]
    round: Round
    world: World
    recasts: bool

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the model, with the parameters outside its blocks gathered."""
        with casting_anew() if self.recasts or not torch.is_grad_enabled() else nullcontext():
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
    def blocks(self) -> Iterator[tuple[nn.Module, list[Any]]]:
        """The root and each block, with torch's own records of the parameters that are gathered for it."""
        for module in self.root.modules():
            if hasattr(module, "_get_fsdp_state"):
                group = module._get_fsdp_state()._fsdp_param_group
                yield module, [] if group is None else group.fsdp_params

    @property
    def units(self) -> Iterator[Any]:
        """Torch's own record of each sharded parameter."""
        for _, units in self.blocks:
            yield from units

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


@contextmanager
def casting_anew() -> Iterator[None]:
    """While a sharded model runs: autocast's copies of the gathered weights are freed with their operations.

    Else torch keeps a copy of each weight until the forward's end, in case it is cast again, and one until the
    backward, which may need it: in the end, the whole model. What is computed are the same numbers, but for a weight
    that is used twice: its gradients are added after their cast to its own dtype, and no longer before it.
    """
    before = torch.is_autocast_cache_enabled()
    saving = torch.autograd.graph.saved_tensors_hooks(_without_cast, _cast_again)
    torch.set_autocast_cache_enabled(False)
    try:
        with saving if torch.is_grad_enabled() else nullcontext():
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Cast(NamedTuple):
    """A tensor that a backward needs, as a view of a parameter's cast; and the parameter's version by then."""

    parameter: nn.Parameter
    version: int
    dtype: torch.dtype
    view: tuple[Sequence[int], Sequence[int], int]


def _without_cast(saved: torch.Tensor) -> Any:
    """What to keep of a tensor for the backward: of a parameter's cast, only how to make it."""
    cast = saved if saved._base is None else saved._base
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or cast._version:
        return saved
    one = getattr(node.next_functions[0][0], "variable", None)  # a leaf's
    if not isinstance(one, nn.Parameter) or one.dtype == cast.dtype:
        return saved
    if one.device != cast.device or one.stride() != cast.stride():
        return saved
    return _Cast(one, one._version, cast.dtype, (saved.size(), saved.stride(), int(saved.storage_offset())))


def _cast_again(kept: Any) -> torch.Tensor:
    """What was saved for the backward; in it, FSDP has gathered the parameter again."""
    if not isinstance(kept, _Cast):
        saved: torch.Tensor = kept
        return saved
    if kept.parameter._version != kept.version:
        raise RuntimeError(
            f"a parameter of shape {list(kept.parameter.shape)} was changed in place after the forward has used it"
        )
    return kept.parameter.detach().to(kept.dtype).as_strided(*kept.view)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def comm_device(device: torch.device) -> torch.device:
    """The device of this group's collectives: gradients that are offloaded are on the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else device
