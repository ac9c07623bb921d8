"""Call the hooks that a user has set on parameters once for each batch, on its mean gradient (`ParameterHooks`).

torch calls them (`register_hook`, `register_post_accumulate_grad_hook`) in each backward, and so for each shard. Then
the result of a hook, like a clamp, would depend on how the batch is cut.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dp_ray.engine.user_code import reraise_as
from dp_ray.engine.world import gathered
from dp_ray.errors import ModelError
from dp_ray.text import a_kind, listed

OF_GRADIENT, OF_PARAMETER = "_backward_hooks", "_post_accumulate_grad_hooks"  # torch's dicts of them, by number


class InEachBackward(functools.partial[Any]):
    """A hook of dp_ray's own, which is to be called in the backward of each shard."""


@dataclass(frozen=True)
class _OfBatch:
    """A hook of the user's in its place in torch's dict: a backward calls it in vain.

    So the user's handle still removes it.
    """

    function: Callable[[torch.Tensor], Any]

    def __call__(self, _: torch.Tensor) -> None:
        """Do nothing."""


class ParameterHooks:
    """The hooks on the gradients of a model's trained parameters, which are given by their names.

    Before each backward `look` is called, unless torch's count is `seen`: then no backward calls them. `run` does,
    once the gradients are those of the batch; where several passes add up to one gradient, they see their sum.
    `put_back` ends this. `hooked` are the parameters that have had hooks: in most trainings none, at no cost.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._trained = trained
        self.seen = -1  # torch's count of all hooks that were ever set, by the last look
        self.hooked: dict[str, nn.Parameter] = {}

    def look(self) -> None:
        """Have no backward call the hooks that were set since the last look."""
        if RemovableHandle.next_id == self.seen:
            return
        self.seen = RemovableHandle.next_id
        for name, parameter in self._trained.items():
            for hooks in _dicts_of(parameter):
                for number, hook in hooks.items():
                    if not isinstance(hook, InEachBackward):
                        hooks[number] = hook if isinstance(hook, _OfBatch) else _OfBatch(hook)
                        self.hooked[name] = parameter

    def are_any(self) -> bool:
        """Return whether there are hooks to run."""
        return any(map(_count, self.hooked.values()))

    @torch.no_grad()
    def run(self, step: int) -> None:
        """Call the hooks on gradients, then those on parameters, each kind in the order of registration.

        One of a parameter without a gradient is not called. Raises ModelError, naming step and parameter.
        """
        for kind in (OF_GRADIENT, OF_PARAMETER):
            hooks = {name: getattr(parameter, kind) or {} for name, parameter in self.hooked.items()}
            numbered = [(number, name) for name, those in hooks.items() for number in those]
            for number, name in sorted(numbered):
                parameter, hook = self.hooked[name], hooks[name].get(number)  # another hook may have removed it
                if isinstance(hook, _OfBatch) and parameter.grad is not None:
                    what = f"step {step}: the hook of the gradient of {name}"
                    with reraise_as(what):
                        given = hook.function(parameter.grad if kind == OF_GRADIENT else parameter)
                        _take(given if kind == OF_GRADIENT else None, parameter, what)

    def check_same(self) -> None:
        """Raise ModelError if workers have other hooks than rank 0; every rank calls this.

        A forward that sets one has not run yet on a worker without rows.
        """
        counts: list[dict[str, int]] = gathered({name: _count(self.hooked[name]) for name in self.hooked})
        differ = {name for theirs in counts for name, count in theirs.items() ^ counts[0].items() if count}
        if differ:
            raise ModelError(
                f"the gradient of {listed(sorted(differ))} has other hooks on some workers than on rank 0: set them "
                "where the model is made, so that all workers have the same"
            )

    def put_back(self) -> None:
        """Leave the hooks as the user has set them, to be called in each backward."""
        for parameter in self.hooked.values():
            for hooks in _dicts_of(parameter):
                hooks.update({number: hook.function for number, hook in hooks.items() if isinstance(hook, _OfBatch)})
        self.hooked, self.seen = {}, -1


def check_sums_once(roots: Mapping[str, nn.Module]) -> None:
    """Raise ModelError if a module of a training is a DistributedDataParallel, given by the beginnings of names.

    Its hooks in the backward, which are not torch's for users, would write over the sums of the workers' gradients.
    """
    for prefix, root in roots.items():
        for name, module in root.named_modules(prefix=prefix):
            if isinstance(module, DistributedDataParallel):
                what = f"the module {name.lstrip('.')}" if name else "the model"
                raise ModelError(
                    f"{what} is a DistributedDataParallel, which sums gradients over workers, as dp_ray does: both "
                    "together give wrong ones; take the module in it, its attribute module"
                )


def _dicts_of(parameter: torch.Tensor) -> Iterator[dict[int, Any]]:
    for kind in (OF_GRADIENT, OF_PARAMETER):
        if hooks := getattr(parameter, kind, None):
            yield hooks


def _count(parameter: torch.Tensor) -> int:
    return sum(isinstance(hook, _OfBatch) for hooks in _dicts_of(parameter) for hook in hooks.values())


def _take(given: Any, parameter: nn.Parameter, what: str) -> None:
    """Take the gradient that a hook returned, in memory of its own, since clipping writes to it."""
    if given is None or given is parameter.grad:
        return
    if not isinstance(given, torch.Tensor) or (given.shape, given.dtype) != (parameter.shape, parameter.dtype):
        is_tensor = isinstance(given, torch.Tensor)
        got = f"a {given.dtype} of size {list(given.shape)}" if is_tensor else a_kind(given)
        raise ModelError(f"{what} returned {got}, not None or a {parameter.dtype} of size {list(parameter.shape)}")
    is_dense = given.layout is torch.strided
    # A sparse one is as sums over workers are: its numbers can be changed in place.
    parameter.grad = torch.empty_like(parameter).copy_(given) if is_dense else given.detach().clone().coalesce()
