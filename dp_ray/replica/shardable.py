"""Refuses, by name, a model that would train otherwise once its parameters are replaced by shards."""

import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from torch import nn

from dp_ray.errors import JobError
from dp_ray.text import listed

DDP = "take strategy: ddp, or change the model"


def check_shardable(model: nn.Module) -> None:
    """Raise JobError for TorchScript, for hooks of parameters, and for tensors that share memory.

    A shard has memory and hooks of its own, and a TorchScript module keeps its parameters.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise JobError(f"strategy: fsdp cannot shard {name or 'the model'}, a TorchScript module; {DDP}")
    for name, one in model.named_parameters():
        if one._backward_hooks or getattr(one, "_post_accumulate_grad_hooks", None):
            raise JobError(
                f"strategy: fsdp: the parameter {name} has a hook, which its shards would not have; {DDP}, like with "
                "a hook of the module"
            )
    for first, second in _sharing(model):
        raise JobError(
            f"strategy: fsdp: {first} and {second} are two tensors in the same memory, and would become two of their "
            f"own; {DDP}: assign the same Parameter twice"
        )


class Replaced:
    """The tensors of a model before they are replaced, to find out who else keeps them."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: weakref.ref(one) for name, one in _named(model)}

    def check(self, model: nn.Module) -> None:
        """Raise JobError if a list, a function or the like keeps a tensor that is no longer the model's."""
        if not self._stale(model):
            return
        gc.collect()
        stale = self._stale(model)
        # One without a Python object that refers to it is only part of autograd's graph, from the constructor.
        keepers = [one for one in gc.get_referrers(*stale.values()) if not isinstance(one, FrameType)]
        kept = {id(held) for one in keepers if one is not stale for held in gc.get_referents(one)}
        if names := [name for name, one in stale.items() if id(one) in kept]:
            raise JobError(
                "strategy: fsdp puts shards in the place of the model's tensors, but something else keeps these: "
                f"{listed(names)}; {DDP}: a list, dict or function must take them from the module when it runs"
            )

    def _stale(self, model: nn.Module) -> dict[str, torch.Tensor]:
        now = {id(one) for _, one in _named(model)}
        alive = {name: one for name, ref in self._before.items() if (one := ref()) is not None}
        return {name: one for name, one in alive.items() if id(one) not in now}


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())


def _sharing(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The names of two tensors that have elements in common."""
    beside: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, one in _named(model):
        if one.layout is torch.strided and one.numel() and not torch.nn.parameter.is_lazy(one):
            beside[one.untyped_storage()._cdata].append((name, one))
    for group in beside.values():
        for (name, first), (other, second) in itertools.combinations(group, 2):
            if _overlap([first, second]):
                yield name, other


def _overlap(pair: Sequence[torch.Tensor]) -> bool:
    spans = []
    for one in pair:
        last = sum((size - 1) * stride for size, stride in zip(one.size(), one.stride(), strict=True))
        begin = int(one.storage_offset())
        spans.append((begin * one.itemsize, (begin + last + 1) * one.itemsize))
    (begin, end), (start, stop) = spans
    if end <= start or stop <= begin:
        return False
    if pair[0].itemsize != pair[1].itemsize:
        return True
    used = torch.zeros(max(end, stop) // pair[0].itemsize, dtype=torch.bool)  # they may be columns of a matrix
    first, second = (used.as_strided(one.size(), one.stride(), one.storage_offset()) for one in pair)
    first.copy_(torch.tensor(True).expand(first.shape))
    return bool(second.any())
