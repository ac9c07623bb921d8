"""Restore a worker's process after a job, for the next job: begin at `isolated`.

It restores the environment, the working directory, torch's settings, hooks of all modules, processes and memory. It
names what it cannot undo: threads and open files. A worker with such remains is restarted. `RESTORED` has what user
code may change of its process and its libraries, each as a generator that notes it, yields while the job runs, and
brings it back. `settings_of_torch` lists torch's settings of the whole process; `tests/tasks/test_torch_settings.py`
enumerates what torch has, so that a setting of a new version is not forgotten.

Imported modules stay imported, as in one Python process that runs the jobs in turn: a module's globals, the
attributes of its classes and whatever it patched in other modules are neither undone nor named.
"""

import copy
import gc
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.overrides
import torch.utils.checkpoint
from torch import nn
from torch.utils import _python_dispatch

from dp_ray.engine.user_code import free_memory
from dp_ray.errors import is_installed
from dp_ray.system.linux import SYSTEM_FOLDERS, cores, run_on
from dp_ray.tasks.determinism import deterministic_algorithms, use_deterministic_algorithms

_C: Any = torch._C
_overrides: Any = torch.overrides
# This torch has no such setting, or refuses to read it after user code mixed its two interfaces; or a folder is gone.
UNKNOWN = "(unknown)"
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
# A precision of none means the backend's, and then the one of all; so they are set in this order.
FP32 = (("generic", "all"), *((lib, op) for lib in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")))
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
END_SECONDS = 2.0  # how long threads and processes of a job may take to end by themselves


class NotRestored(Exception):
    """Settings have another value than before, and torch has no way back."""


@contextmanager
def isolated() -> Iterator[list[str]]:
    """Restore this process after the block; the list that it yields then names what remains."""
    children, threads, files = _children(), threading.enumerate(), _open_files()
    restorers = {name: restored() for name, restored in RESTORED.items()}
    for restorer in restorers.values():
        next(restorer)
    remains: list[str] = []
    try:
        yield remains
    finally:
        for name, restorer in reversed(restorers.items()):
            try:
                next(restorer, None)
            except NotRestored as error:
                remains.append(f"{name}: {error}")
            except Exception:  # user code may have broken anything
                remains.append(name)
        _end_processes([child for child in _children() if child not in children])
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # compiled code holds the models
        free_memory()
        remains += _remains([thread for thread in threading.enumerate() if thread not in threads], files)


def _end_processes(started: list[psutil.Process]) -> None:
    """End the processes that the job started; Python starts its server of forked processes again if it is needed."""
    server: Any = forkserver._forkserver
    for child in started:
        if child.pid == getattr(server, "_forkserver_pid", None):
            child.kill()
            server._stop()  # forgets the server, and waits for its end
            this: Any = multiprocessing.current_process()
            folder = this._config.pop("tempdir", None)  # of its socket
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
    for child in started:
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    for child in psutil.wait_procs(started, timeout=END_SECONDS)[1]:  # processes that do not end when asked
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _children() -> list[psutil.Process]:
    """Return the child processes, without Python's own that frees the shared memory of all others."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [child for child in psutil.Process().children() if child.pid != tracker]


def _remains(started: list[threading.Thread], files_before: set[str]) -> list[str]:
    """Name new threads that do not end soon, and new open files."""
    threads = [thread for thread in started if not _is_foreign(thread)]
    until = time.monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [
        *(f"the thread {thread.name!r}" for thread in threads if thread.is_alive()),
        *(f"the open file {name}" for name in sorted(_open_files() - files_before)),
    ]


def _is_foreign(thread: threading.Thread) -> bool:
    """Return whether a thread runs no user code: one of Ray or torch, of an installed library, or of an executor."""
    if isinstance(thread, threading._DummyThread):
        return True
    function: Any = getattr(thread, "_target", None) or getattr(thread, "function", None) or type(thread).run
    code = getattr(function, "__code__", None)
    return code is not None and (is_installed(code.co_filename) or code.co_filename == executor.__file__)


def _open_files() -> set[str]:
    """Return the regular files that this process holds open, without logs of Ray and libraries."""
    with suppress(psutil.Error, OSError):
        paths = {file.path for file in psutil.Process().open_files()}
        code = (".so", ".py", ".pyc")
        return {
            path for path in paths if not (path.endswith(code) or "/ray/" in path or path.startswith(SYSTEM_FOLDERS))
        }
    return set()


def _environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _lists() -> Iterator[None]:
    """Restore the lists of the interpreter and of torch that user code may add to."""
    lists: tuple[list[Any], ...] = (sys.path, sys.argv, sys.meta_path, logging.getLogger().handlers)
    kept = [(values, list(values)) for values in lists]
    yield
    for values, before in kept:
        values[:] = before


def _warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        yield


def _hooks() -> Iterator[None]:
    """Restore the hooks of all modules and of all optimizers."""
    owners = (nn.modules.module, sys.modules[torch.optim.Optimizer.__module__])
    hooks = [value for owner in owners for name, value in vars(owner).items() if name.startswith("_global_")]
    kept = [(registry, dict(registry)) for registry in hooks if isinstance(registry, dict)]
    yield
    for registry, before in kept:
        registry.clear()
        registry.update(before)


class Setting(NamedTuple):
    """A setting of torch: its name, and how to read and to set it; None if it can only be read."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object] | None

    def read(self) -> Any:
        """Read its value; UNKNOWN if there is none, as for a setting that this torch does not have."""
        try:
            return self.get()
        except (RuntimeError, AttributeError, OSError):
            return UNKNOWN


def torch_settings() -> Iterator[None]:
    """Restore torch's settings; raises NotRestored, which names the settings that stay otherwise."""
    restored = _restored(settings_of_torch)
    next(restored)
    torch._tensor_str.PRINT_OPTS = copy.copy(torch._tensor_str.PRINT_OPTS)  # which user code changes in place
    configs = {name: sys.modules[name].get_config_copy() for name in CONFIGS if name in sys.modules}
    yield
    _restore_configs(configs)
    next(restored, None)


def _restored(settings: Callable[[], Iterator[Setting]]) -> Iterator[None]:
    """Restore settings, in their order; raises NotRestored, which names settings that could not be restored."""
    before = [(setting, setting.read()) for setting in settings()]
    yield
    for setting, value in before:
        if value != UNKNOWN and setting.set is not None and setting.read() != value:
            with suppress(Exception):  # a setting that stays changed is named below
                setting.set(value)
    left = [setting.name for setting, value in before if setting.read() != value]
    if left:
        raise NotRestored(", ".join(left))


def settings_of_process() -> Iterator[Setting]:
    """Yield the settings of a process that the system, Python and numpy keep."""
    root, distribution = logging.getLogger(), torch.distributions.Distribution
    yield Setting("working directory", os.getcwd, os.chdir)
    yield Setting("log level", lambda: root.level, root.setLevel)
    yield Setting("disabled logs", lambda: root.manager.disable, logging.disable)
    yield Setting("numpy's errors", np.geterr, lambda settings: np.seterr(**settings))
    get, put = partial(getattr, distribution, "_validate_args"), distribution.set_default_validate_args
    yield Setting("checks of distributions", get, put)
    yield Setting("garbage collection", gc.isenabled, lambda on: (gc.enable if on else gc.disable)())
    yield Setting("its thresholds", gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds))
    yield Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval)
    yield Setting("timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout)
    yield Setting("umask", _umask, os.umask)
    starts = partial(multiprocessing.set_start_method, force=True)
    yield Setting("start of processes", partial(multiprocessing.get_start_method, allow_none=True), starts)
    for owner, name in ((sys, "excepthook"), (tempfile, "tempdir")):
        yield Setting(name, partial(getattr, owner, name), partial(setattr, owner, name))
    blocked = partial(signal.pthread_sigmask, signal.SIG_SETMASK)
    yield Setting("blocked signals", partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()), blocked)
    files = partial(resource.setrlimit, resource.RLIMIT_NOFILE)
    yield Setting("limit of files", partial(resource.getrlimit, resource.RLIMIT_NOFILE), files)
    yield Setting("cores", cores, _run_all_on)


def _umask() -> int:
    os.umask(umask := os.umask(0))  # the only way to read it
    return umask


def _run_all_on(had: Any) -> None:
    for thread in psutil.Process().threads():  # threads that the job has started have the process's cores too
        run_on(thread.id, had)


def settings_of_torch() -> Iterator[Setting]:
    """Yield all settings, in the order in which they are to be set."""
    t: Any = torch
    get: Any
    put: Any
    yield Setting("torch_function modes", _function_modes, _set_function_modes)
    yield Setting("torch_dispatch modes", _dispatch_modes, _set_dispatch_modes)
    yield Setting("default_device", default_device, torch.set_default_device)
    yield Setting("default_tensor_type", lambda: _C._get_default_device(), None)
    yield Setting("default_dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Setting("num_threads", torch.get_num_threads, torch.set_num_threads)
    yield Setting("num_interop_threads", torch.get_num_interop_threads, None)
    # torch can set but not read this: whether numbers too small for fp32's full precision become 0.
    yield Setting(
        "flush_denormal",
        lambda: bool((torch.tensor([1e-40], device="cpu", dtype=torch.float32) * 1).item() == 0),
        torch.set_flush_denormal,
    )
    yield Setting("sharing_strategy", t.multiprocessing.get_sharing_strategy, t.multiprocessing.set_sharing_strategy)
    precision = "float32_matmul_precision"
    yield Setting(precision, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    for of in FP32:  # after the older interface, which sets some of them
        get, put = partial(_C._get_fp32_precision_getter, *of), partial(_C._set_fp32_precision_setter, *of)
        yield Setting(f"fp32_precision of {' '.join(of)}", get, put)
    yield from map(_pair, PAIRS)
    for kind in ATTENTION:
        get, put = getattr(_C, f"_get_{kind}_sdp_enabled", None), getattr(_C, f"_set_sdp_use_{kind}", None)
        yield Setting(f"{kind}_sdp", get or (lambda: None), put)
    yield Setting("saved_tensors_hooks", _saved_tensors_hooks, _set_saved_tensors_hooks)
    yield Setting("inference_mode", torch.is_inference_mode_enabled, None)
    yield Setting("grad", torch.is_grad_enabled, torch.set_grad_enabled)
    yield Setting(
        "anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda settings: _C.set_anomaly_enabled(*settings),
    )
    yield Setting("autocast_cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    for kind in ("cpu", "cuda"):
        get, put = partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield Setting(f"autocast on {kind}", get, put)
        get, put = partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
        yield Setting(f"autocast dtype on {kind}", get, put)
    sparse: Any = torch.sparse.check_sparse_tensor_invariants
    yield Setting("sparse invariants", sparse.is_enabled, lambda on: (sparse.enable if on else sparse.disable)())
    for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        yield Setting(name, getattr(torch.__future__, f"get_{name}"), getattr(torch.__future__, f"set_{name}"))
    for name in ("crc32_options", "default_load_endianness", "default_mmap_options"):
        get, put = (getattr(torch.serialization, f"{verb}_{name}") for verb in ("get", "set"))
        yield Setting(name, get, put)
    yield Setting("safe_globals", t.serialization.get_safe_globals, _set_safe_globals)
    device_type = t.utils.checkpoint.DefaultDeviceType
    yield Setting("checkpoint device", device_type.get_device_type, device_type.set_device_type)
    for owner, name in FIELDS:
        yield Setting(name, partial(getattr, owner, name), partial(setattr, owner, name))
    yield Setting(
        "deterministic_algorithms", deterministic_algorithms, lambda settings: use_deterministic_algorithms(*settings)
    )


def _pair(name: str) -> Setting:
    """Return the setting of torch._C with this name; some are set by several values, which are read as a tuple."""
    get = getattr(_C, f"_get_{name}", None) or getattr(_C, f"_is_{name}", None)
    put = getattr(_C, f"_set_{name}", None)
    if get is None or put is None:  # of another version of torch
        return Setting(name, lambda: None, None)
    return Setting(name, get, lambda value: put(*value) if isinstance(value, tuple) else put(value))


def default_device() -> torch.device | None:
    """Return the device that `torch.set_default_device` has set; None if none was set."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def _set_safe_globals(globals_: list[Any]) -> None:
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(globals_)


def _saved_tensors_hooks() -> list[Any]:
    """Return the hooks on tensors that autograd saves, the first set first.

    The stack can only be read from its top: so they are all taken off, and put back.
    """
    hooks = []
    while (top := _C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        _C._autograd._pop_saved_tensors_default_hooks()
    hooks.reverse()
    for hook in hooks:
        _C._autograd._push_saved_tensors_default_hooks(*hook)
    return hooks


def _set_saved_tensors_hooks(hooks: list[Any]) -> None:
    for _ in _saved_tensors_hooks():
        _C._autograd._pop_saved_tensors_default_hooks()
    for hook in hooks:
        _C._autograd._push_saved_tensors_default_hooks(*hook)


def _function_modes() -> list[Any]:
    """Return the modes that user code has entered; the default device is one of torch's own."""
    stack = _overrides._get_current_function_mode_stack()
    return [mode for mode in stack if not isinstance(mode, torch.utils._device.DeviceContext)]


def _set_function_modes(modes: list[Any]) -> None:
    stack = _overrides._get_current_function_mode_stack()
    for _ in stack:
        _overrides._pop_mode()
    for mode in stack:
        if isinstance(mode, torch.utils._device.DeviceContext) or mode in modes:
            _overrides._push_mode(mode)


def _dispatch_modes() -> list[Any]:
    return list(_python_dispatch._get_current_dispatch_mode_stack())


def _set_dispatch_modes(modes: list[Any]) -> None:
    for mode in reversed(_dispatch_modes()):
        if mode in modes:
            break
        mode.__exit__(None, None, None)


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


RESTORED: dict[str, Callable[[], Iterator[None]]] = {
    "its environment": _environment,
    "its module paths": _lists,
    "its warnings": _warnings,
    "hooks of all modules": _hooks,
    "torch's settings": torch_settings,
    "its process's settings": partial(_restored, settings_of_process),
}
