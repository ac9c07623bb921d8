"""Settings of torch, Python and the system that user code may change, each with its reader and its setter.

A session restores all of them after a job (`restoring`). A job takes some of the script's (`OF_SCRIPT`), and a call
of a parallel module some of its caller's (`PRECISION`). Settings that are none of these, such as hooks of all modules
or patched classes, stay as in one Python process that runs the jobs in turn.
"""

import copy
import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.utils.checkpoint

from dp_ray.process.determinism import deterministic_algorithms, use_deterministic_algorithms
from dp_ray.system.linux import cores, run_on

# This torch has no such setting, or refuses to read it after user code mixed its two interfaces; or a folder is gone.
UNKNOWN = "(unknown)"
_torch: Any = torch
_C: Any = torch._C


class Setting(NamedTuple):
    """A setting: its name, and how to read and to set it; None if it can only be read."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object] | None

    def read(self) -> Any:
        """Read its value; UNKNOWN if there is none, as for a setting that this torch does not have."""
        try:
            return self.get()
        except (RuntimeError, AttributeError, OSError):
            return UNKNOWN

    def put(self, value: Any) -> None:
        """Set a value that `read` gave, if it is another one; what this torch does not know stays as it is."""
        if value != UNKNOWN and self.set is not None and self.read() != value:
            with suppress(Exception):  # user code may have broken anything
                self.set(value)


@contextmanager
def restoring(remains: list[str]) -> Iterator[None]:
    """Restore all settings after the block; add to `remains` the names of those that stay otherwise."""
    before = [(setting, setting.read()) for setting in (*OF_TORCH, *OF_PROCESS)]
    configs = {name: _set_in(sys.modules[name]) for name in CONFIGS if name in sys.modules}
    lists: tuple[list[Any], ...] = (sys.path, sys.argv, sys.meta_path, logging.getLogger().handlers)
    environment, kept = dict(os.environ), [list(values) for values in lists]
    _torch._tensor_str.PRINT_OPTS = copy.copy(_torch._tensor_str.PRINT_OPTS)  # which user code changes in place
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for setting, value in before:
            setting.put(value)
        remains += [f"the setting {setting.name}" for setting, value in before if setting.read() != value]
        for name in CONFIGS:
            _restore_config(sys.modules.get(name), configs.get(name, {}))
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for values, those in zip(lists, kept, strict=True):
            values[:] = those


def _set_in(config: Any) -> dict[str, Any]:
    """Return what a config of torch's compiler has set otherwise than by default."""
    return {key: getattr(config, key) for key in config._config if not config._is_default(key)}


def _restore_config(config: Any, had: Mapping[str, Any]) -> None:
    if config is None:  # not imported
        return
    for key in _set_in(config).keys() - had.keys():
        delattr(config, key)
        config._config[key].hide = False  # for torch it is deleted, and cannot be read
    for key, value in had.items():
        setattr(config, key, value)


def _pair(name: str) -> Setting:
    """Return the setting of torch._C with this name; some are set by several values, which are read as a tuple."""
    get = getattr(_C, f"_get_{name}", None) or getattr(_C, f"_is_{name}", None)
    put = getattr(_C, f"_set_{name}", None)
    if get is None or put is None:  # of another version of torch
        return Setting(name, lambda: UNKNOWN, None)
    return Setting(name, get, lambda value: put(*value) if isinstance(value, tuple) else put(value))


def _field(owner: Any, name: str) -> Setting:
    return Setting(name, partial(getattr, owner, name), partial(setattr, owner, name))


def _accessed(owner: Any, name: str) -> Setting:
    return Setting(name, getattr(owner, f"get_{name}"), getattr(owner, f"set_{name}"))


def _default_device() -> torch.device | None:
    device = torch.get_default_device()
    return None if device.type == "cpu" else device  # None takes torch's mode of the default device away


def _umask() -> int:
    os.umask(umask := os.umask(0))  # the only way to read it
    return umask


def _run_all_on(had: Any) -> None:
    for thread in psutil.Process().threads():  # threads that the job has started have the process's cores too
        run_on(thread.id, had)


# How precisely products and convolutions are computed, and whether kernels are timed, in the order in which they are
# to be set. The older interface comes before the newer one, which tells what the older one sets. A precision of none
# means the backend's, and then the one of all.
PRECISION = (
    Setting("cudnn_allow_tf32", _C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32),
    Setting("float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *(
        Setting(
            f"fp32_precision of {lib} {op}",
            partial(_C._get_fp32_precision_getter, lib, op),
            partial(_C._set_fp32_precision_setter, lib, op),
        )
        for lib, op in (
            ("generic", "all"),
            *((lib, op) for lib in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
        )
    ),
    _pair("cudnn_benchmark"),
)
OF_SCRIPT = (
    *PRECISION,
    Setting("default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    # torch can set but not read this: whether numbers too small for fp32's full precision become 0.
    Setting(
        "flush_denormal",
        lambda: bool((torch.tensor([1e-40], device="cpu", dtype=torch.float32) * 1).item() == 0),
        torch.set_flush_denormal,
    ),
    Setting(
        "anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda settings: _C.set_anomaly_enabled(*settings),
    ),
    Setting(
        "deterministic_algorithms", deterministic_algorithms, lambda settings: use_deterministic_algorithms(*settings)
    ),
)
OF_TORCH = (
    *OF_SCRIPT,
    Setting("default_device", _default_device, torch.set_default_device),
    _accessed(torch, "num_threads"),
    Setting("num_interop_threads", torch.get_num_interop_threads, None),
    _accessed(_torch.multiprocessing, "sharing_strategy"),
    Setting("inference_mode", torch.is_inference_mode_enabled, None),
    Setting("grad", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("autocast_cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(
        Setting(f"autocast {name} on {kind}", partial(get, kind), partial(put, kind))
        for kind in ("cpu", "cuda")
        for name, get, put in (
            ("enabled", torch.is_autocast_enabled, torch.set_autocast_enabled),
            ("dtype", torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
    *map(
        _pair,
        (
            *("blas_preferred_backend", "cpu_allow_fp16_reduced_precision_reduction", "cudnn_deterministic"),
            *("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_accumulation", "cudnn_enabled"),
            *("cublas_allow_fp16_reduced_precision_reduction", "linalg_preferred_backend", "mkldnn_deterministic"),
            *("math_sdp_allow_fp16_bf16_reduction", "mkldnn_enabled", "multithreading_enabled", "qengine"),
            *("sdp_priority_order", "warnAlways"),
        ),
    ),
    *(
        Setting(
            f"{kind}_sdp",
            getattr(_C, f"_get_{kind}_sdp_enabled", lambda: UNKNOWN),
            getattr(_C, f"_set_sdp_use_{kind}", None),
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn", "fa3", "overrideable")
    ),
    _field(torch.backends.mha, "_is_fastpath_enabled"),
    _field(torch.backends.opt_einsum, "enabled"),
    _field(torch.backends.opt_einsum, "strategy"),
    _field(torch.utils.deterministic, "fill_uninitialized_memory"),
    _field(torch.utils.checkpoint, "_enable_checkpoint_early_stop"),
    _field(torch._tensor_str, "PRINT_OPTS"),
)
OF_PROCESS = (
    Setting("working directory", os.getcwd, os.chdir),
    Setting("log level", lambda: logging.getLogger().level, logging.getLogger().setLevel),
    Setting("disabled logs", lambda: logging.root.manager.disable, logging.disable),
    Setting("numpy's errors", np.geterr, lambda settings: np.seterr(**settings)),
    Setting("garbage collection", gc.isenabled, lambda on: (gc.enable if on else gc.disable)()),
    Setting("its thresholds", gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
    Setting("umask", _umask, os.umask),
    Setting(
        "start of processes",
        partial(multiprocessing.get_start_method, allow_none=True),
        partial(multiprocessing.set_start_method, force=True),
    ),
    _field(sys, "excepthook"),
    _field(tempfile, "tempdir"),
    Setting(
        "blocked signals",
        partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()),
        partial(signal.pthread_sigmask, signal.SIG_SETMASK),
    ),
    Setting(
        "limit of files",
        partial(resource.getrlimit, resource.RLIMIT_NOFILE),
        partial(resource.setrlimit, resource.RLIMIT_NOFILE),
    ),
    Setting("cores", cores, _run_all_on),
)
CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
