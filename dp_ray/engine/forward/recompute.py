"""The blocks of a model, which `strategy: fsdp` gathers, and which `activation_checkpointing` runs again.

A block that runs again keeps only its inputs for the backward: less memory, the same bits. torch's checkpoint does
the work. It restores random numbers of one kind of device, and nothing else. So this module restores all generators
that a forward may use, and the buffers that it changes. A block that writes parameters is refused.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_ray.engine.clock import uncounted
from dp_ray.engine.random import Generator, own_generators, random_state
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import ActivationBudget
from dp_ray.tensors.changed import version_of
from dp_ray.text import listed


def choose_blocks(job: Job, model: nn.Module) -> list[nn.Module]:
    """Return the blocks that `fsdp.blocks` names.

    A module that shares a parameter with one outside it is no block: its parameters go with the rest of the model.
    Raises what `blocks_by_class` raises.
    """
    blocks = blocks_by_class("fsdp.blocks", job.fsdp.blocks, model)
    return [block for block in blocks if not _shares_parameter(block, model)]


def _shares_parameter(block: nn.Module, model: nn.Module) -> bool:
    """Return whether a module outside of the block holds a parameter of it."""
    own = tuple(f"{name}." for name, module in model.named_modules(remove_duplicate=False) if module is block)
    inside = {id(parameter) for parameter in block.parameters()}
    return any(
        id(parameter) in inside and not name.startswith(own)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    )


def blocks_by_class(key: str, classes: Literal["auto"] | list[str], model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of these classes that have parameters, in the order of the model.

    Raises JobError, which names the `key`, if the model has no module of a class that is named, or if the class is a
    container, like a ModuleList, which is never called.
    """
    if classes == "auto":
        # A model of Hugging Face names the classes of its own blocks.
        names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        chosen = [module for module in model.modules() if type(module).__name__ in names] or list(_items(model))
    else:
        present = class_names(model)
        for name in classes:
            if name not in present:
                raise JobError(f"{key}: the model has no module of class {name}; it has {listed(present)}")
        chosen = [module for module in model.modules() if type(module).__name__ in classes]
        for module in chosen:
            if not _has_forward(module):
                inside = sorted({type(item).__name__ for child in module.children() for item in _called(child)})
                instead = f"the class of its items, {listed(inside)}" if inside else "a class whose forward uses it"
                raise JobError(
                    f"{key}: a {type(module).__name__} is never called, so it cannot be a block; name {instead}"
                )
    blocks = [block for block in chosen if block is not model and next(block.parameters(), None) is not None]
    inner = {id(below) for block in blocks for below in block.modules() if below is not block}
    return [block for block in dict.fromkeys(blocks) if id(block) not in inner]


def class_names(model: nn.Module) -> list[str]:
    """Return the names of the classes of a model's modules, sorted."""
    return sorted({type(module).__name__ for module in model.modules()})


def _has_forward(module: nn.Module) -> bool:
    return inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or the modules in a container that is never called, like a ModuleList."""
    if _has_forward(module):
        yield module
    else:
        for child in module.children():
            yield from _called(child)


def _items(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of the outermost ModuleLists and Sequentials."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        for item in module:
            yield from _called(item)
    else:
        for child in module.children():
            yield from _items(child)


KEY = "activation_checkpointing"
# Each GPU has a thread for its backward, and generators are global: one block runs again at a time.
_one_at_a_time = threading.RLock()


def recompute_blocks(job: Job, model: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """Let blocks of a model that is trained run their forward again in the backward, in place.

    `devices` are those of the worker. The modules keep their names and classes. Raises JobError if the model has no
    such block.
    """
    if job.task == "train":
        for block in _blocks_to_recompute(job, model):
            own, _ = own_generators(block)
            forward = _Recomputed(block, block.forward, tuple(devices), [each.rng for each in own])
            block.forward = functools.wraps(block.forward)(forward)
    return model


def _blocks_to_recompute(job: Job, model: nn.Module) -> list[nn.Module]:
    value = job.activation_checkpointing
    if value is False:
        return []
    blocks = blocks_by_class(KEY, value if isinstance(value, list) else "auto", model)
    if not blocks:
        raise JobError(
            f"{KEY}: the model has no blocks with parameters, like the items of a ModuleList; name classes of its "
            f"modules in a list; it has {listed(class_names(model))}"
        )
    for block in blocks:  # some cannot run again
        name = next(name for name, module in model.named_modules() if module is block)
        if isinstance(block, torch.jit.ScriptModule):
            raise JobError(f"{KEY}: {name} is a TorchScript module, whose forward cannot be replaced")
        if job.is_sharded and any(inner in list(block.modules())[1:] for inner in choose_blocks(job, model)):
            raise JobError(f"{KEY}: {name} holds blocks of fsdp; name the classes of these blocks, or of their parts")
    kept = int(value.budget * len(blocks)) if isinstance(value, ActivationBudget) else 0
    return blocks[: len(blocks) - kept]  # the last ones' activations are freed before the first block runs again


@dataclass(eq=False, repr=False)  # private names: `wraps` copies the attributes of the forward to it
class _Recomputed:
    """The forward of a block; with gradients, it keeps no more than its arguments for the backward."""

    _block: nn.Module
    _forward: Callable[..., Any]
    _devices: tuple[torch.device, ...]
    _own: Sequence[Generator]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        state = _StateBefore(self._block, self._devices, self._own)
        before = {name: version_of(parameter) for name, parameter in self._block.named_parameters()}

        def contexts() -> tuple[Any, Any]:
            return nullcontext(), state.restored()

        keys: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        outputs = checkpoint(self._forward, *args, **keys, **kwargs)
        state.forget_unchanged()
        for name, parameter in self._block.named_parameters():
            if name in before and version_of(parameter) != before[name]:
                raise ModelError(
                    f"{KEY}: the forward of a {type(self._block).__qualname__} wrote its parameter {name}, and would "
                    "write it again in the backward: write it outside the block, or name other blocks"
                )
        return outputs


class _StateBefore:
    """What a block had before its forward: random numbers, and the values of the buffers that it has changed."""

    def __init__(self, block: nn.Module, devices: Sequence[torch.device], own: Sequence[Generator]) -> None:
        self._random_state = functools.partial(random_state, devices, own)
        self._rewind = self._random_state()
        self._before = [
            (module._buffers, name, buffer, version_of(buffer))
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        # By the tensor: two names may have one.
        self._values = {id(buffer): buffer.detach().clone() for _, _, buffer, _ in self._before}

    def forget_unchanged(self) -> None:
        """Drop the values of buffers that the forward has left alone: this is called once, right after it."""
        self._before = [
            (held, name, buffer, version)
            for held, name, buffer, version in self._before
            if held[name] is not buffer or version is None or version_of(buffer) != version
        ]
        self._values = {id(buffer): self._values[id(buffer)] for _, _, buffer, _ in self._before}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set random numbers to their state before the forward, and other tensors for the buffers, in the block."""
        with _one_at_a_time, uncounted():
            now, restore = [held[name] for held, name, _, _ in self._before], self._random_state()
            copies = {number: value.clone() for number, value in self._values.items()}
            self._rewind()
            for held, name, buffer, _ in self._before:
                held[name] = copies[id(buffer)]
            try:
                yield
            finally:
                restore()
                for (held, name, _, _), tensor in zip(self._before, now, strict=True):
                    held[name] = tensor
