"""Jobs that leave something behind in their process, and jobs that look for it."""

import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.models import Rows


class Messy(nn.Module):
    """A model that changes all settings of its process that it can reach."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        os.environ["MESSY"] = "left"
        os.environ.pop("RANK", None)
        os.chdir(folder)
        sys.path.insert(0, folder)
        warnings.filterwarnings("ignore", message="of the messy model")
        logging.getLogger().setLevel(logging.DEBUG)
        logging.getLogger().addHandler(logging.NullHandler())
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(3)
        torch.set_flush_denormal(True)
        os.umask(0o077)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        torch.set_grad_enabled(False)
        torch.autograd.set_detect_anomaly(True)
        torch.set_autocast_enabled("cpu", True)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cuda.enable_math_sdp(False)
        torch.set_autocast_dtype("cpu", torch.float16)
        np.seterr(all="raise")
        gc.disable()
        sys.setrecursionlimit(777)
        socket.setdefaulttimeout(7)
        multiprocessing.set_start_method("spawn", force=True)
        logging.disable(logging.ERROR)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        torch.set_printoptions(precision=9)  # type: ignore[no-untyped-call]
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        gc.set_threshold(7, 7, 7)
        tempfile.tempdir = folder
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))  # far above what this process has open
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        torch.manual_seed(99)
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def umask() -> int:
    """The process's umask, which Python can only read by setting it."""
    os.umask(found := os.umask(0))
    return found


def settings() -> dict[str, Any]:
    """What a job may have changed, in plain values."""
    return {
        "MESSY": os.environ.get("MESSY"),
        "folder": os.getcwd(),
        "path": sys.path[:1],
        "filters": len(warnings.filters),
        "level": logging.getLogger().level,
        "handlers": len(logging.getLogger().handlers),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "flushes": (torch.tensor([1e-40], device="cpu", dtype=torch.float32) * 1).item() == 0,
        "umask": umask(),
        "precision": torch.backends.cuda.matmul.fp32_precision,
        "attention": torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        "autocast dtype": str(torch.get_autocast_dtype("cpu")),
        "numpy": np.geterr()["over"],
        "collects": gc.isenabled(),
        "recursion": sys.getrecursionlimit(),
        "timeout": socket.getdefaulttimeout(),
        "starts": multiprocessing.get_start_method(allow_none=True),
        "disabled": logging.root.manager.disable,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "mkldnn": torch.backends.mkldnn.enabled,
        "prints": torch._tensor_str.PRINT_OPTS.precision,
        "sharing": torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        "thresholds": list(gc.get_threshold()),
        "temporary": tempfile.tempdir,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cores": len(os.sched_getaffinity(0)),
        "random": torch.initial_seed(),
        "children": len(multiprocessing.active_children()),
    }


class Settings(Rows):
    """A dataset that prints its process's settings when it is built on a worker."""

    def __init__(self) -> None:
        super().__init__(4)
        print("settings", settings())


class StartsThread(nn.Module):
    """A model whose forward starts a thread which does not end."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        threading.Thread(target=time.sleep, args=(600,), name="endless", daemon=True).start()
        return inputs


class Threaded(nn.Module):
    """A model that starts a thread which does not end."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=time.sleep, args=(600,), name="endless", daemon=True).start()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs
