"""Walk what an object holds, as a dataset its transforms: begin at `inside`. No code of the user's is called."""

import enum
import functools
import itertools
import logging
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from dp_ray.errors import is_users
from dp_ray.job.keys import WorkerKeys

LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, np.ndarray))
CONTAINERS = (dict, list, tuple, set, frozenset, deque, OrderedDict)
NOT_ENTERED = (types.ModuleType, logging.Logger, enum.Enum, torch.Tensor, np.ndarray, np.generic, WorkerKeys)
SHORT, LONG, MOST = 100, 1_000, 100_000  # numbers of values

Part: TypeAlias = tuple[str, Any, Any]  # the form of how to come to a value, its key for that, and the value


def inside(roots: Mapping[str, Any], with_globals: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what the objects `roots` hold, by their paths: each value once, the nearest first.

    It looks into containers and attributes, and at the variables around functions; `with_globals` also at what the
    user's classes have, and at the globals that the user's functions name. Of a value, it looks at LONG parts at
    most, and at MOST in all; what has more than SHORT comes last.
    """
    near, far, seen, looked = deque(roots.items()), deque[tuple[str, Any]](), set(map(id, roots.values())), 0
    while (near or far) and looked < MOST:
        path, value = (near or far).popleft()
        for form, key, part in itertools.islice(_parts(value, with_globals), LONG):
            looked += 1
            kind = type(part)
            if kind in LEAVES or id(part) in seen:
                continue
            size = len(part) if kind in CONTAINERS else 1
            if size:
                seen.add(id(part))
                at = path + form.format(key)
                yield at.removeprefix("."), part
                (far if size > SHORT else near).append((at, part))


def _parts(value: Any, with_globals: bool) -> Iterator[Part]:
    """Yield the parts of a value."""
    kind = type(value)
    if issubclass(kind, NOT_ENTERED):
        return
    if issubclass(kind, CONTAINERS):
        yield from _items(value)
    elif issubclass(kind, types.FunctionType):
        yield from _referred(value, with_globals)
    elif issubclass(kind, types.MethodType | functools.partial | staticmethod | classmethod | property):
        names = ("__self__", "__func__", "func", "args", "keywords", "fget")
        yield from ((".{}", name, getattr(value, name, None)) for name in names)
    elif issubclass(kind, type) and not with_globals:
        return
    elif issubclass(kind, type):
        bases = (base for base in value.__mro__ if _is_users_class(base.__module__))
        yield from ((".{}", name, part) for base in bases for name, part in list(vars(base).items()))
        return
    with suppress(AttributeError):
        yield from ((".{}", name, part) for name, part in list(object.__getattribute__(value, "__dict__").items()))
    for base in kind.__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if type(member) is types.MemberDescriptorType:
                with suppress(AttributeError):  # it is not set
                    yield ".{}", name, member.__get__(value)
    if with_globals and _is_users_class(kind.__module__):
        yield "", "", kind


def _items(value: Any) -> Iterator[Part]:
    """Yield the items of a container, whatever iteration its class may have; keys of a dict are told if plain."""
    base = next(base for base in CONTAINERS if isinstance(value, base))
    with suppress(RuntimeError):  # it changes meanwhile
        items = dict.items(value) if base is dict else enumerate(base.__iter__(value))
        for number, (key, part) in enumerate(list(itertools.islice(items, LONG))):
            yield "[{!r}]", key if type(key) in LEAVES else number, part


def _referred(function: types.FunctionType, with_globals: bool) -> Iterator[Part]:
    """Yield the variables around a function; if it is the user's, maybe also the globals that it names."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            yield ", {}", name, cell.cell_contents
    if with_globals and is_users_file(code.co_filename):
        known = function.__globals__
        yield from ((", {}", name, known[name]) for name in sorted(_names(code)) if name in known)
    yield from ((".{}", name, getattr(function, name)) for name in ("__defaults__", "__kwdefaults__"))


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a code uses, with those of functions and comprehensions within it."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return {*code.co_names, *(name for part in inner for name in _names(part))}


is_users_file = functools.cache(is_users)


@functools.cache
def _is_users_class(module: str) -> bool:
    """Return whether a class of this module is the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and is_users_file(file))
