"""The modules beside the model that a step calls: a loss, a step of the user's, metrics.

What their calls write follows the rules of what the model's forwards write: see `dp_ray.engine.forward_state`.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from dp_ray.engine.buffers import OUTSIDE
from dp_ray.job.job import Job


def modules_beside(job: Job, step: Any, functions: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules that a step of the job reaches, and its metrics, and a loss over the batch."""
    found = modules_in("loss" if job.step is None else "step", step)
    for name, function in functions.items():
        found |= modules_in(name if name == "loss" else f"metrics.{name}", function)
    return found


def modules_in(key: str, function: Any) -> dict[str, nn.Module]:
    """Return the modules that a function of the job's `key` reaches.

    These are the function itself, or its method's object; values that `functools.partial` binds or a closure holds,
    in lists and dicts too; and attributes of an object that is called, or whose method is. A global variable cannot
    be told from one that the function does not use for this.
    """
    found: dict[str, nn.Module] = {}
    for name, module in _reached(OUTSIDE + key, function, set()):
        while name in found:
            name += "'"
        found[name] = module
    return found


def _reached(name: str, value: Any, seen: set[int], is_called: bool = True) -> Iterator[tuple[str, nn.Module]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: dict[str, Any] = {}
    if isinstance(value, nn.Module):
        if type(value).__module__ != "torch.nn.modules.loss":  # these write nothing
            yield name, value
    elif isinstance(value, functools.partial):
        yield from _reached(name, value.func, seen)
        inner = {**{str(at): argument for at, argument in enumerate(value.args)}, **value.keywords}
    elif inspect.ismethod(value):
        yield from _reached(name, value.__self__, seen)
    elif isinstance(value, Mapping | list | tuple):
        inner = _modules(value if isinstance(value, Mapping) else dict(enumerate(value)))
    elif inspect.isfunction(value):
        yield from _reached(name, getattr(value, "__wrapped__", None), seen)
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                inner[variable] = cell.cell_contents
    elif is_called:
        inner = _modules(getattr(value, "__dict__", {}))
    for key, member in inner.items():
        yield from _reached(f"{name}.{key}", member, seen, is_called=False)


def _modules(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): module for key, module in values.items() if isinstance(module, nn.Module)}
