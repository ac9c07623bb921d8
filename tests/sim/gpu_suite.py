"""The suite of tests/gpu on a simulated GPU: `python -m tests.sim.gpu_suite LIBRARY [pytest's own arguments]`."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support import simgpu


def main(library: str, *given: str) -> int:
    """Run the suite in this process; its groups of workers are processes with simulated GPUs too."""
    os.environ["DP_RAY_GPU_SUITE_ON"] = "cuda:0"
    simgpu.begin(Path(library))
    import pytest

    from tests.support import group

    spawning = multiprocessing.get_context("spawn")

    def started() -> tuple[Any, Connection]:
        here, there = spawning.Pipe()
        process = spawning.Process(target=member, args=(library, there), daemon=True)
        process.start()
        there.close()
        return process, here

    group._started = started
    return int(pytest.main(["-p", "no:cacheprovider", *given]))


def member(library: str, pipe: Connection) -> None:
    """Be a worker of groups."""
    simgpu.begin(Path(library))
    from tests.support.group import _serve  # which imports torch

    _serve(pipe)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
