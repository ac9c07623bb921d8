"""What user code may change of its process and its libraries, and how to change it back."""

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
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from dp_ray.task.deterministic_algorithms import deterministic_algorithms, use_deterministic_algorithms

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
            (matmul, ("allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation")),
            (torch.backends.mkldnn, ("enabled", "deterministic")),
            (torch.backends.opt_einsum, ("enabled", "strategy")),
            (torch._tensor_str, ("PRINT_OPTS",)),
            (fill, ("fill_uninitialized_memory",)),
        )
        for name in names
    ]
    torch._tensor_str.PRINT_OPTS = copy.copy(torch._tensor_str.PRINT_OPTS)  # which user code changes in place
    sharing = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    dtype, device = torch.get_default_dtype(), _default_device()
    threads, precision = torch.get_num_threads(), _matmul_precision()
    algorithms = deterministic_algorithms()
    grad, anomaly = torch.is_grad_enabled(), torch.is_anomaly_enabled()

    def restore() -> None:
        if _matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        for owner, name, value in fields:  # after the precision, which sets some of them
            if getattr(owner, name) != value:
                setattr(owner, name, value)
        torch.multiprocessing.set_sharing_strategy(sharing)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        torch.set_num_threads(threads)
        use_deterministic_algorithms(*algorithms)
        torch.set_grad_enabled(grad)
        torch.autograd.set_detect_anomaly(anomaly)
        for kind in ("cpu", "cuda"):
            torch.set_autocast_enabled(kind, False)

    return restore


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
    nnpack: Any = torch.backends.nnpack
    nnpack.set_flags(*(uses_nnpack := nnpack.set_flags(True)))  # the only way to read it

    def restore() -> None:
        nnpack.set_flags(*uses_nnpack)
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


def _process() -> Restore:
    """What the system or Python keeps of a process: limits, cores, blocked signals, how threads and memory share."""
    limits, cores, blocked = resource.getrlimit(resource.RLIMIT_NOFILE), _cores(), signal.pthread_sigmask(0, ())
    thresholds, interval, temporary = gc.get_threshold(), sys.getswitchinterval(), tempfile.tempdir

    def restore() -> None:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        tempfile.tempdir = temporary
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if resource.getrlimit(resource.RLIMIT_NOFILE) != limits:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        if cores and _cores() != cores:
            for thread in psutil.Process().threads():  # those that the job has started have its cores too
                with suppress(OSError):
                    os.sched_setaffinity(thread.id, cores)

    return restore


def _cores() -> set[int]:
    """The cores on which this thread may run; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


SETTINGS: dict[str, Callable[[], Restore]] = {
    "its environment": _environment,
    "its working directory": _working_directory,
    "its module paths": _lists,
    "its warnings": _warnings,
    "its log level": _log_level,
    "hooks of all modules": _hooks,
    "torch's settings": _torch_settings,
    "settings of calculation": _calculation,
    "the interpreter's settings": _interpreter,
    "its process's settings": _process,
}
