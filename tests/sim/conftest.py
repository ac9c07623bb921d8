"""Sets of processes with simulated GPUs, which the tests of this folder share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.sim.jobs import JOBS
from tests.sim.mutants import MUTANTS
from tests.support import simgpu
from tests.support.cluster import ROOT

HERE = Path(__file__).parent
ALONE = ["one shard", "one predicted shard", "one narrowed shard", "loader", "tight"]  # jobs of one GPU
# What `make test` runs, on one GPU and on three: a job of each kind, and a mutant of each rule.
FIRST = ["ddp", "fsdp", "predict", "loop", "odd views"]
FIRST_MUTANTS = ["a batch waits for no copy", "a batch may be freed", "a checkpoint waits for no copy"]
FIRST_MUTANTS += [
    "one worker's gradients begin anywhere",
    "buffers begin anywhere",
    "outputs are read from the first GPU",
]
OF_NO_JOB = {
    "test_a_parallel_module_computes_as_on_cpus_and_without_races",
    "test_each_wait_of_the_code_has_a_mutant",
}
SECONDS = 400  # for a set; on a quiet machine it takes 10 to 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where the GPU cannot be simulated."""
    why_not = simgpu.why_not()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slow")
            if not is_first(item):
                item.add_marker("full")
            if why_not:
                item.add_marker(pytest.mark.skip(why_not))


def is_first(item: Any) -> bool:
    """Whether `make test` runs it."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    is_one_of_these = item.originalname in OF_NO_JOB or given.get("name") in [*FIRST, *FIRST_MUTANTS]
    return is_one_of_these and given.get("size") != 2


class Set:
    """What a set of processes has left."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size

    def reports(self, kind: str, name: str) -> list[dict[str, Any]]:
        """What each process has seen of a job."""
        files = [self.folder / kind / f"{name}.{rank}.json" for rank in range(self.size)]
        if not all(file.exists() for file in files):
            errors = "\n".join(file.read_text() for file in sorted(self.folder.glob("error.*")))
            raise AssertionError(f"{kind} {name} did not end on {self.size} processes:\n{errors}")
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the simulated GPU, built once."""
    return simgpu.build(tmp_path_factory.mktemp("simgpu"))


@pytest.fixture(scope="session")
def set_of(
    library: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[int], Set]:
    """The set of so many processes, which runs the jobs and the mutants that need so many: all of `make full`."""
    are_all = any(item.get_closest_marker("full") for item in request.session.items)
    jobs, names = ((*ALONE, *JOBS), [*MUTANTS]) if are_all else (FIRST, FIRST_MUTANTS)

    @cache
    def ran(size: int) -> Set:
        folder = tmp_path_factory.mktemp(f"set-of-{size}")
        stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
        plan = {
            "size": size,
            "ports": [store.port for store in stores],
            "folder": str(folder),
            "jobs": [name for name in jobs if size == 1 or name not in ALONE],
            "mutants": [name for name in names if MUTANTS[name].size == size],
        }
        path = folder / "plan.json"
        path.write_text(json.dumps(plan))
        processes = [begin("tests.sim", str(library), str(path), str(rank)) for rank in range(size)]
        try:
            for process in processes:
                process.wait(SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return Set(folder, size)

    return ran


def begin(*module: str) -> "subprocess.Popen[bytes]":
    """Start a module as a process of its own; what a job of it says goes nowhere."""
    line = [sys.executable, "-W", "ignore", "-m", *module]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(line, cwd=ROOT, env={**kept, "OMP_NUM_THREADS": "1"}, stdout=nowhere, stderr=nowhere)
