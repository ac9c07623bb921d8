"""The caller's settings of torch, which travel with a call of a parallel module, and are kept with a run.

`modes_of` reads them, and `as_on_caller` sets them on a worker; of a run `script_modes` and `as_in_script` do.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dp_ray.process.determinism import deterministic
from dp_ray.process.settings import OF_SCRIPT, PRECISION, UNKNOWN


@dataclass(frozen=True)
class Modes:
    """The settings of the caller's thread, process and module under which a call runs.

    `training` is that of each submodule, in order. `autocast` maps device types to their dtypes, where it is on.
    """

    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]  # of each tensor of the module
    is_grad_enabled: bool
    is_inference: bool
    autocast: Mapping[str, torch.dtype]
    default_dtype: torch.dtype
    precision: tuple[Any, ...]  # of matrix products and convolutions: the values of PRECISION
    threads: int | None  # torch's, with `bitwise`


def script_modes() -> dict[str, Any]:
    """Return what this process has set, as a run keeps it."""
    return {setting.name: _told(setting.read()) for setting in OF_SCRIPT}


def _told(value: Any) -> Any:
    """Return a setting's value as JSON has it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


@contextmanager
def as_in_script(kept: Mapping[str, Any]) -> Iterator[None]:
    """Run the block under the settings of the script with which a run began; what is not kept stays as it is.

    A setting that the block changes is the block's.
    """
    changed = []
    for setting in OF_SCRIPT:
        value, before = kept.get(setting.name, UNKNOWN), setting.read()
        if value not in (UNKNOWN, _told(before)):
            setting.put(_meant(value, before))
            changed.append((setting, before, value))
    try:
        yield
    finally:
        for setting, before, value in changed:
            if _told(setting.read()) == value:
                setting.put(before)


def _meant(told: Any, before: Any) -> Any:
    """Return the value that JSON tells, of the kind of the value before."""
    if isinstance(before, torch.dtype):
        return getattr(torch, told)
    return tuple(told) if isinstance(before, tuple) else told


def modes_of(module: nn.Module, tensors: Sequence[torch.Tensor], threads: int | None) -> Modes:
    """Return the settings of this thread and process, and of a module of these tensors, for a call on the workers."""
    is_inference = torch.is_inference_mode_enabled()
    autocast = {
        device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    }
    if "cpu" in autocast and not torch.cuda.is_available():
        autocast["cuda"] = autocast["cpu"]  # of a worker with a GPU: without one, torch refuses it here
    return Modes(
        tuple(submodule.training for submodule in module.modules()),
        tuple(tensor.requires_grad for tensor in tensors),
        torch.is_grad_enabled() and not is_inference,
        is_inference,
        autocast,
        torch.get_default_dtype(),
        tuple(setting.read() for setting in PRECISION),
        threads,
    )


@contextmanager
def as_on_caller(modes: Modes) -> Iterator[None]:
    """Run a forward in the block under the caller's settings of torch: what `modes_of` has found."""
    with ExitStack() as within:
        within.enter_context(with_settings(modes))
        within.enter_context(torch.inference_mode(modes.is_inference))
        if not modes.is_inference:
            within.enter_context(torch.set_grad_enabled(modes.is_grad_enabled))
        for device, dtype in modes.autocast.items():
            if device == "cpu" or torch.cuda.is_available():
                within.enter_context(torch.autocast(device, dtype=dtype))
        yield


@contextmanager
def with_settings(modes: Modes) -> Iterator[None]:
    """Run the block under the settings that concern a backward too."""
    dtype, precisely = torch.get_default_dtype(), tuple(setting.read() for setting in PRECISION)
    try:
        torch.set_default_dtype(modes.default_dtype)
        _set_precision(precisely, modes.precision)
        with nullcontext() if modes.threads is None else deterministic(modes.threads):
            yield
    finally:
        torch.set_default_dtype(dtype)
        _set_precision(modes.precision, precisely)


def _set_precision(before: Sequence[Any], values: Sequence[Any]) -> None:
    if before != values:  # most calls have those of the worker
        for setting, value in zip(PRECISION, values, strict=True):
            setting.put(value)
