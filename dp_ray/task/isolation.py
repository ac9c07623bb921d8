"""Restores a worker's process after a job, for the next job.

What can be undone is undone: the environment, the working directory, torch's settings, hooks of all modules,
processes and memory. What cannot be undone is named: threads and open files. A worker with such remains is started
anew.

Imported modules stay imported, as in one Python process that runs the jobs in turn: a module's globals, the
attributes of its classes and whatever it patched in other modules are neither undone nor named.
"""

import gc
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from dp_ray.tracebacks import is_installed

END_SECONDS = 2.0  # how long threads and processes of a job may take to end by themselves

Restore = Callable[[], object]

_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)


@dataclass(frozen=True)
class Belongings:
    """What a process has that can remain after a job: child processes, threads and open files."""

    children: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    files: frozenset[str]

    @classmethod
    def now(cls) -> "Belongings":
        """What this process has now."""
        return cls(frozenset(_children()), frozenset(threading.enumerate()), frozenset(_open_files()))


@contextmanager
def isolated() -> Iterator[list[str]]:
    """After the block, restore this process; the list that it yields then names what remains."""
    belongings = Belongings.now()
    restores = {name: take() for name, take in _SETTINGS.items()}
    remains: list[str] = []
    try:
        yield remains
    finally:
        remains += [name for name, restore in reversed(restores.items()) if not _succeeds(restore)]
        _end_processes(belongings)
        _free_memory()
        remains += _remains(belongings)


def _succeeds(restore: Restore) -> bool:
    try:
        restore()
    except Exception:  # user code may have broken anything
        return False
    return True


def _end_processes(before: Belongings) -> None:
    """End the processes that the job started; Python starts its server of forked processes again if it is needed."""
    started = [child for child in _children() if child not in before.children]
    server: Any = forkserver._forkserver
    for child in started:
        if child.pid == getattr(server, "_forkserver_pid", None):
            child.kill()
            server._stop()  # forgets the server, and waits for its end
    _end(started)


def _children() -> list[psutil.Process]:
    """The child processes, but for Python's own that frees the shared memory of all others."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [child for child in psutil.Process().children() if child.pid != tracker]


def _end(processes: list[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.terminate()
    for one in psutil.wait_procs(processes, timeout=END_SECONDS)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def _free_memory() -> None:
    """Free what only reference cycles hold, the kernels that were compiled, and the GPU memory that torch keeps."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _remains(before: Belongings) -> list[str]:
    """What there is now and was not before: threads that do not end soon, and open files."""
    threads = [one for one in threading.enumerate() if one not in before.threads and not _is_foreign(one)]
    until = time.monotonic() + END_SECONDS
    for one in threads:
        one.join(max(0.0, until - time.monotonic()))
    return [
        *(f"the thread {one.name!r}" for one in threads if one.is_alive()),
        *(f"the open file {name}" for name in sorted(_open_files() - before.files)),
    ]


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether a thread runs no user code: one of Ray or torch, of an installed library, or of an executor."""
    if isinstance(thread, threading._DummyThread):
        return True
    does: Any = getattr(thread, "_target", None) or getattr(thread, "function", None) or type(thread).run
    code = getattr(does, "__code__", None)
    return code is not None and (is_installed(code.co_filename) or code.co_filename == executor.__file__)


def _open_files() -> set[str]:
    """The regular files that this process holds open for writing or reading, without logs of Ray and libraries."""
    with suppress(psutil.Error, OSError):
        return {one.path for one in psutil.Process().open_files() if not _is_foreign_file(one.path)}
    return set()


def _is_foreign_file(path: str) -> bool:
    return path.endswith((".so", ".py", ".pyc")) or "/ray/" in path or path.startswith(("/dev/", "/proc/", "/sys/"))


def _environment() -> Restore:
    before = dict(os.environ)

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

    return restore


def _working_directory() -> Restore:
    before = os.getcwd()
    return lambda: os.chdir(before)


def _lists() -> Restore:
    """The lists of the interpreter and of torch that user code may add to."""
    lists: tuple[list[Any], ...] = (sys.path, sys.argv, sys.meta_path, logging.getLogger().handlers)
    kept = [(one, list(one)) for one in lists]

    def restore() -> None:
        for one, before in kept:
            one[:] = before

    return restore


def _warnings() -> Restore:
    caught = warnings.catch_warnings()
    caught.__enter__()
    return lambda: caught.__exit__(None, None, None)


def _log_level() -> Restore:
    before = logging.getLogger().level
    return lambda: logging.getLogger().setLevel(before)


def _hooks() -> Restore:
    """The hooks of all modules."""
    kept = [(one, dict(one)) for one in (getattr(nn.modules.module, name, {}) for name in _HOOKS)]

    def restore() -> None:
        for one, before in kept:
            one.clear()
            one.update(before)

    return restore


def _torch_settings() -> Restore:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    fill: Any = torch.utils.deterministic
    fields = [
        (owner, name, getattr(owner, name))
        for owner, names in (
            (cudnn, ("enabled", "benchmark", "deterministic", "fp32_precision")),
            (matmul, ("fp32_precision", "allow_fp16_reduced_precision_reduction")),
            (fill, ("fill_uninitialized_memory",)),
        )
        for name in names
    ]
    dtype, device = torch.get_default_dtype(), _default_device()
    threads, precision = torch.get_num_threads(), _matmul_precision()
    algorithms, warns = _deterministic_algorithms()
    grad, anomaly = torch.is_grad_enabled(), torch.is_anomaly_enabled()

    def restore() -> None:
        if _matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        for owner, name, value in fields:  # after the precision, which sets some of them
            if getattr(owner, name) != value:
                setattr(owner, name, value)
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        torch.set_num_threads(threads)
        if _deterministic_algorithms() != (algorithms, warns):  # to set them imports torch's compiler: 2 s
            torch.use_deterministic_algorithms(algorithms, warn_only=warns)
        torch.set_grad_enabled(grad)
        torch.autograd.set_detect_anomaly(anomaly)
        for kind in ("cpu", "cuda"):
            torch.set_autocast_enabled(kind, False)

    return restore


def _deterministic_algorithms() -> tuple[bool, bool]:
    """Whether torch uses deterministic algorithms only, and whether it but warns where there is none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _matmul_precision() -> str:
    """Torch's precision of matrix products; "" if user code mixed torch's two interfaces to it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


def _default_device() -> torch.device | None:
    """The device that `torch.set_default_device` has set; None: none was set."""
    found = torch.get_default_device()
    return None if found.type == "cpu" else found


def _calculation() -> Restore:
    """How numpy and torch calculate, beyond what has a home above."""
    numpy_errors, validates = np.geterr(), torch.distributions.Distribution._validate_args
    flushes = _flushes_denormal()
    cuda: Any = torch.backends.cuda
    attention = [
        (cuda.enable_flash_sdp, cuda.flash_sdp_enabled()),
        (cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled()),
        (cuda.enable_math_sdp, cuda.math_sdp_enabled()),
    ]
    dtypes = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

    def restore() -> None:
        np.seterr(**numpy_errors)
        torch.set_flush_denormal(flushes)
        torch.distributions.Distribution.set_default_validate_args(validates)
        for enable, was in attention:
            enable(was)
        for kind, dtype in dtypes:
            torch.set_autocast_dtype(kind, dtype)

    return restore


def _flushes_denormal() -> bool:
    """Whether numbers too small for fp32's full precision become 0; torch can set this but does not tell."""
    return bool((torch.tensor([1e-40], device="cpu", dtype=torch.float32) * 1).item() == 0)


def _interpreter() -> Restore:
    collects, recursion, timeout = gc.isenabled(), sys.getrecursionlimit(), socket.getdefaulttimeout()
    os.umask(umask := os.umask(0))  # the only way to read it
    starts, disabled, hook = (
        multiprocessing.get_start_method(allow_none=True),
        logging.root.manager.disable,
        sys.excepthook,
    )

    def restore() -> None:
        (gc.enable if collects else gc.disable)()
        os.umask(umask)
        sys.setrecursionlimit(recursion)
        socket.setdefaulttimeout(timeout)
        multiprocessing.set_start_method(starts, force=True)
        logging.disable(disabled)
        sys.excepthook = hook

    return restore


_SETTINGS: dict[str, Callable[[], Restore]] = {
    "its environment": _environment,
    "its working directory": _working_directory,
    "its module paths": _lists,
    "its warnings": _warnings,
    "its log level": _log_level,
    "hooks of all modules": _hooks,
    "torch's settings": _torch_settings,
    "settings of calculation": _calculation,
    "the interpreter's settings": _interpreter,
}
