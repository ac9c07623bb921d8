"""The blocks of a model: those that `strategy: fsdp` gathers, and that `activation_checkpointing` runs again."""

import inspect
from collections.abc import Iterator
from typing import Literal

from torch import nn

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.text import listed


def choose_blocks(job: Job, model: nn.Module) -> list[nn.Module]:
    """The blocks that `fsdp.blocks` names.

    A module that shares a parameter with one outside it is no block: its parameters go with the rest of the model.
    Raises what `blocks_by_class` raises.
    """
    found = blocks_by_class("fsdp.blocks", job.fsdp.blocks, model)
    return [one for one in found if not _shares(one, model)]


def blocks_by_class(key: str, classes: Literal["auto"] | list[str], model: nn.Module) -> list[nn.Module]:
    """The outermost modules of these classes that have parameters, in the order of the model.

    Raises JobError, which names the `key`, if the model has no module of a class that is named, or if that is a
    container, like a ModuleList, which is never called.
    """
    if classes == "auto":
        chosen = _automatic(model)
    else:
        there = class_names(model)
        for name in classes:
            if name not in there:
                raise JobError(f"{key}: the model has no module of class {name}; it has {listed(there)}")
        chosen = [one for one in model.modules() if type(one).__name__ in classes]
        for one in chosen:
            _check_is_called(key, one)
    return _outermost([one for one in chosen if one is not model and next(one.parameters(), None) is not None])


def class_names(model: nn.Module) -> list[str]:
    """The names of the classes of a model's modules."""
    return sorted({type(one).__name__ for one in model.modules()})


def _check_is_called(key: str, module: nn.Module) -> None:
    if not _has_forward(module):
        inside = sorted({type(one).__name__ for child in module.children() for one in _called(child)})
        instead = f"name the class of its items, {listed(inside)}" if inside else "name a class whose forward uses it"
        raise JobError(f"{key}: a {type(module).__name__} is never called, so it cannot be a block; {instead}")


def _has_forward(module: nn.Module) -> bool:
    return inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or instead of a container that is never called, like a ModuleList, what is in it."""
    if _has_forward(module):
        yield module
    else:
        for child in module.children():
            yield from _called(child)


def _automatic(model: nn.Module) -> list[nn.Module]:
    names = {name for one in model.modules() for name in getattr(one, "_no_split_modules", None) or ()}
    if named := [one for one in model.modules() if type(one).__name__ in names]:
        return named
    return list(_items(model))


def _items(module: nn.Module) -> Iterator[nn.Module]:
    """The items of the outermost ModuleLists and Sequentials."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        for item in module:
            yield from _called(item)
    else:
        for child in module.children():
            yield from _items(child)


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(below) for one in modules for below in one.modules() if below is not one}
    return [one for one in dict.fromkeys(modules) if id(one) not in inner]


def _shares(block: nn.Module, model: nn.Module) -> bool:
    mine = {id(one) for one in block.parameters()}
    return any(
        id(parameter) in mine
        for module in set(_outside(block, model))
        for parameter in module.parameters(recurse=False)
    )


def _outside(block: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """The modules that are reached without the block, also if they are in it too."""
    if module is not block:
        yield module
        for child in module.children():
            yield from _outside(block, child)
