"""What user code may change of its process and its libraries, and how to change it back."""

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

from dp_ray.task.torch_settings import torch_settings

Restore = Callable[[], object]


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
    """The hooks of all modules and of all optimizers."""
    owners = (nn.modules.module, sys.modules[torch.optim.Optimizer.__module__])
    found = [one for owner in owners for name, one in vars(owner).items() if name.startswith("_global_")]
    kept = [(one, dict(one)) for one in found if isinstance(one, dict)]

    def restore() -> None:
        for one, before in kept:
            one.clear()
            one.update(before)

    return restore


def _calculation() -> Restore:
    """How numpy calculates, and what torch's distributions check."""
    numpy_errors, validates = np.geterr(), torch.distributions.Distribution._validate_args

    def restore() -> None:
        np.seterr(**numpy_errors)
        torch.distributions.Distribution.set_default_validate_args(validates)

    return restore


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
    "torch's settings": torch_settings,
    "settings of calculation": _calculation,
    "the interpreter's settings": _interpreter,
    "its process's settings": _process,
}
