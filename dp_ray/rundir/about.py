"""Keeps what a run was made with: the command, the code's commit, versions, hardware and plan, for each driver."""

import importlib.metadata
import os
import platform
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from dp_ray.errors import StorageError
from dp_ray.rundir.files import read_json, write_json
from dp_ray.secrets import hide
from dp_ray.storage import Storage
from dp_ray.system.environment import without_values
from dp_ray.system.git_state import git_state

ABOUT = "about.json"
PACKAGES = ("dp-ray", "torch", "ray", "numpy", "pyarrow", "torchvision", "transformers")
KEPT = 20  # drivers of a run that was resumed often


@contextmanager
def recorded_about(run: Storage, plan: str, is_forked: bool) -> Iterator[None]:
    """Add this driver to the run's `about.json` in the background, while the block runs; `plan` is its text.

    If the block may fork this process, as loaders do, it begins once git has told its state: a fork would hold the
    pipes open through which git does. A file that cannot be written is left out: it only informs.
    """
    now, git = datetime.now(UTC), cache(git_state)
    if is_forked:
        git()

    def record() -> None:
        with suppress(StorageError, OSError):
            earlier = read_about(run)
            write_json(run, ABOUT, {"drivers": [*earlier, {**_this_driver(now, git()), "plan": plan}][-KEPT:]})

    thread = threading.Thread(target=record, name="about", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def read_about(run: Storage) -> list[dict[str, Any]]:
    """The drivers of a run, in order; empty if the file is missing or damaged."""
    with suppress(StorageError):
        found = read_json(run, ABOUT).get("drivers", []) if run.exists(ABOUT) else []
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return []


def _this_driver(started: datetime, git: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "started": started.isoformat(timespec="seconds"),
        "command": command_of(sys.orig_argv),
        "folder": os.getcwd(),
        "git": git,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "host": platform.node(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
    }


def command_of(arguments: Sequence[str]) -> str:
    """The command line of a process as one would type it, without secrets.

    >>> command_of(["/usr/bin/python3", "/venv/bin/dp-ray", "run", "job.yaml", "--set", "env.KEY=abc"])
    "dp-ray run job.yaml --set 'env.KEY=(not shown)'"
    """
    program, *rest = arguments or ["python"]
    if rest and os.path.basename(rest[0]) == "dp-ray":
        program, *rest = rest
    return hide(shlex.join([os.path.basename(program), *without_values(rest)]))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """The models of this machine's NVIDIA GPUs, as their driver's files tell them."""
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            found += [line.partition(":")[2].strip() for line in file.read_text().splitlines() if "Model:" in line]
    return found
