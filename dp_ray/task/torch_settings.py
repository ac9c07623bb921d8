"""torch's settings of the whole process: what they are, and how to bring them back.

`tests/test_torch_settings.py` enumerates what torch has, so that a setting of a new version is not forgotten.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.overrides
import torch.utils.checkpoint
from torch.utils import _python_dispatch

from dp_ray.task.deterministic_algorithms import deterministic_algorithms, use_deterministic_algorithms

_C: Any = torch._C
_overrides: Any = torch.overrides
UNKNOWN = "(unknown)"  # this torch has no such setting, or does not tell: user code has mixed its two interfaces
# Settings X of torch._C, with _get_X or _is_X, and _set_X.
PAIRS = (
    *("autograd_fallback_mode", "backcompat_broadcast_warn", "backcompat_keepdim_warn", "blas_preferred_backend"),
    *("cpu_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction"),
    *("cublas_allow_fp16_accumulation", "cublas_allow_fp16_reduced_precision_reduction", "cudnn_benchmark"),
    *("cudnn_depthwise_kernel", "cudnn_deterministic", "cudnn_enabled", "dtensor_allow_implicit_replication"),
    *("fwd_grad_enabled", "grad_layout_enforcement_enabled", "graph_executor_optimize", "linalg_preferred_backend"),
    *("math_sdp_allow_fp16_bf16_reduction", "miopen_immediate", "mkldnn_deterministic", "mkldnn_enabled"),
    *("multithreading_enabled", "nnpack_enabled", "qengine", "rocm_fa_preferred_backend", "sdp_priority_order"),
    *("sm_carveout_experimental", "view_replay_enabled", "warnAlways"),
)
ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "fa3", "overrideable")
# A precision of none is that of the backend, and then of all; so they are set in this order.
FP32 = (("generic", "all"), *((one, op) for one in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")))
CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.fx.experimental._config",
)
FIELDS: tuple[tuple[Any, str], ...] = (
    (torch.backends.mha, "_is_fastpath_enabled"),
    (torch.backends.opt_einsum, "enabled"),
    (torch.backends.opt_einsum, "strategy"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
    (torch.utils.checkpoint, "_enable_checkpoint_early_stop"),
    (torch.utils.checkpoint, "_checkpoint_debug_enabled"),
    (torch._tensor_str, "PRINT_OPTS"),
)


class NotRestored(Exception):
    """Settings have another value than before, and torch has no way back."""


class Setting(NamedTuple):
    """A setting of torch: its name, and how to read and to set it; None if it can only be read."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object] | None

    def read(self) -> Any:
        """Its value; UNKNOWN if torch does not tell."""
        try:
            return self.get()
        except (RuntimeError, AttributeError):
            return UNKNOWN


def torch_settings() -> Callable[[], object]:
    """Take the settings as they are; the function that is returned brings them back.

    That raises NotRestored, which names the settings that stay otherwise.
    """
    before = [(setting, setting.read()) for setting in settings_of_torch()]
    torch._tensor_str.PRINT_OPTS = copy.copy(torch._tensor_str.PRINT_OPTS)  # which user code changes in place
    configs = {name: sys.modules[name].get_config_copy() for name in CONFIGS if name in sys.modules}

    def restore() -> None:
        _restore_configs(configs)
        for setting, value in before:
            if value != UNKNOWN and setting.set is not None and setting.read() != value:
                with suppress(Exception):  # what it leaves is told below
                    setting.set(value)
        if left := [setting.name for setting, value in before if setting.read() != value]:
            raise NotRestored(", ".join(left))

    return restore


def settings_of_torch() -> Iterator[Setting]:
    """All settings, in the order in which they are to be set."""
    t: Any = torch
    yield Setting("torch_function modes", _function_modes, _set_function_modes)
    yield Setting("torch_dispatch modes", _dispatch_modes, _set_dispatch_modes)
    yield Setting("default_device", default_device, torch.set_default_device)
    yield Setting("default_tensor_type", lambda: _C._get_default_device(), None)
    yield Setting("default_dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Setting("num_threads", torch.get_num_threads, torch.set_num_threads)
    yield Setting("num_interop_threads", torch.get_num_interop_threads, None)
    yield Setting("flush_denormal", flushes_denormal, torch.set_flush_denormal)
    yield Setting("sharing_strategy", t.multiprocessing.get_sharing_strategy, t.multiprocessing.set_sharing_strategy)
    precision = "float32_matmul_precision"
    yield Setting(precision, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    yield from map(_fp32_precision, FP32)  # after the older interface, which sets some of them
    yield from map(_pair, PAIRS)
    yield from map(_attention, ATTENTION)
    yield Setting("saved_tensors_hooks", _saved_tensors_hooks, _set_saved_tensors_hooks)
    yield Setting("inference_mode", torch.is_inference_mode_enabled, None)
    yield Setting("grad", torch.is_grad_enabled, torch.set_grad_enabled)
    yield Setting("anomaly", _anomaly, lambda one: _C.set_anomaly_enabled(*one))
    yield Setting("autocast_cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    for kind in ("cpu", "cuda"):
        yield _autocast(kind)
        yield _autocast_dtype(kind)
    sparse: Any = torch.sparse.check_sparse_tensor_invariants
    yield Setting("sparse invariants", sparse.is_enabled, lambda one: (sparse.enable if one else sparse.disable)())
    for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        yield Setting(name, getattr(torch.__future__, f"get_{name}"), getattr(torch.__future__, f"set_{name}"))
    for name in ("crc32_options", "default_load_endianness", "default_mmap_options"):
        get, put = (getattr(torch.serialization, f"{verb}_{name}") for verb in ("get", "set"))
        yield Setting(name, get, put)
    yield Setting("safe_globals", t.serialization.get_safe_globals, _set_safe_globals)
    yield Setting("checkpoint device", _checkpoint_device, t.utils.checkpoint.DefaultDeviceType.set_device_type)
    yield from (_field(owner, name) for owner, name in FIELDS)
    yield Setting(
        "deterministic_algorithms", deterministic_algorithms, lambda one: use_deterministic_algorithms(*one)
    )


def _pair(name: str) -> Setting:
    get, put = (
        getattr(_C, f"_get_{name}", None) or getattr(_C, f"_is_{name}", None),
        getattr(_C, f"_set_{name}", None),
    )
    if get is None or put is None:  # of another version of torch
        return Setting(name, lambda: None, None)
    return Setting(name, get, lambda value: put(*value) if isinstance(value, tuple) else put(value))


def _attention(kind: str) -> Setting:
    get, put = getattr(_C, f"_get_{kind}_sdp_enabled", None), getattr(_C, f"_set_sdp_use_{kind}", None)
    return Setting(f"{kind}_sdp", get or (lambda: None), put)


def _fp32_precision(of: tuple[str, str]) -> Setting:
    get, put = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    return Setting(f"fp32_precision of {' '.join(of)}", lambda: get(*of), lambda value: put(*of, value))


def _autocast(kind: str) -> Setting:
    return Setting(
        f"autocast on {kind}",
        lambda: torch.is_autocast_enabled(kind),
        lambda value: torch.set_autocast_enabled(kind, value),
    )


def _autocast_dtype(kind: str) -> Setting:
    return Setting(
        f"autocast dtype on {kind}",
        lambda: torch.get_autocast_dtype(kind),
        lambda value: torch.set_autocast_dtype(kind, value),
    )


def _field(owner: Any, name: str) -> Setting:
    return Setting(name, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def default_device() -> torch.device | None:
    """The device that `torch.set_default_device` has set; None: none was set."""
    found = torch.get_default_device()
    return None if found.type == "cpu" else found


def flushes_denormal() -> bool:
    """Whether numbers too small for fp32's full precision become 0; torch can set this but does not tell."""
    return bool((torch.tensor([1e-40], device="cpu", dtype=torch.float32) * 1).item() == 0)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _checkpoint_device() -> str:
    return torch.utils.checkpoint.DefaultDeviceType.get_device_type()


def _set_safe_globals(globals_: list[Any]) -> None:
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(globals_)


def _saved_tensors_hooks() -> list[Any]:
    """The hooks on tensors that autograd saves, the first set first; the stack can only be read from its top."""
    found = []
    while (top := _C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        _C._autograd._pop_saved_tensors_default_hooks()
    found.reverse()
    for one in found:
        _C._autograd._push_saved_tensors_default_hooks(*one)
    return found


def _set_saved_tensors_hooks(hooks: list[Any]) -> None:
    for _ in _saved_tensors_hooks():
        _C._autograd._pop_saved_tensors_default_hooks()
    for one in hooks:
        _C._autograd._push_saved_tensors_default_hooks(*one)


def _function_modes() -> list[Any]:
    """The modes that user code has entered; the default device is one of torch's own."""
    stack = _overrides._get_current_function_mode_stack()
    return [one for one in stack if not isinstance(one, torch.utils._device.DeviceContext)]


def _set_function_modes(modes: list[Any]) -> None:
    stack = _overrides._get_current_function_mode_stack()
    for _ in stack:
        _overrides._pop_mode()
    for one in stack:
        if isinstance(one, torch.utils._device.DeviceContext) or one in modes:
            _overrides._push_mode(one)


def _dispatch_modes() -> list[Any]:
    return list(_python_dispatch._get_current_dispatch_mode_stack())


def _set_dispatch_modes(modes: list[Any]) -> None:
    for one in reversed(_dispatch_modes()):
        if one in modes:
            break
        one.__exit__(None, None, None)


def _restore_configs(before: dict[str, dict[str, Any]]) -> None:
    """Bring the compiler's configs back; of a part that the job has imported, to their defaults."""
    for name in CONFIGS:
        config: Any = sys.modules.get(name)
        if config is None:
            continue
        if name in before:
            now = config.get_config_copy()
            changed = [key for key, value in before[name].items() if now.get(key) != value]
            for key in changed:
                setattr(config, key, before[name][key])
            continue
        for key in [key for key in config._config if not config._is_default(key)]:
            delattr(config, key)
            config._config[key].hide = False  # for torch it is deleted, and cannot be read
