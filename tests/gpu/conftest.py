"""What only a GPU shows. Without one these tests are skipped; DP_RAY_GPU_SUITE_ON=cpu runs them on the CPU."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dp_ray.engine.world import World, form_group, leave_group

HERE = Path(__file__).parent
ON = os.environ.get("DP_RAY_GPU_SUITE_ON", "cuda:0")
REASON = "there is no GPU: torch.cuda.is_available() is False (DP_RAY_GPU_SUITE_ON=cpu runs what the CPU can show)"
CUDA_ONLY = "only a GPU can show it"
NEEDS_RAY = "it needs Ray, which is not installed here"

is_missing = ON.startswith("cuda") and not torch.cuda.is_available()
if ON.startswith("cuda") and not is_missing:
    # torch reads it at the process's first product, which is one of a test's own plain loops.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where there is no GPU, or no Ray for a test on it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("gpu")
            # A GPU's machine may have another torch, which warns of other things.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if is_missing:
                item.add_marker(pytest.mark.skip(REASON))
            elif item.get_closest_marker("ray") and find_spec("ray") is None:
                item.add_marker(pytest.mark.skip(NEEDS_RAY))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once why the tests of this folder were skipped."""
    if is_missing:
        terminalreporter.write_line(f"tests/gpu was skipped: {REASON}")


@pytest.fixture
def device() -> torch.device:
    """The device of the suite: the first GPU, or what DP_RAY_GPU_SUITE_ON names."""
    return torch.device(ON)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The GPU, for a test that has nothing to show on a CPU."""
    if device.type != "cuda":
        pytest.skip(CUDA_ONLY)
    return device


@pytest.fixture
def group_of_one(device: torch.device) -> Iterator[None]:
    """A process group of this process alone: NCCL on a GPU, else gloo."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.HashStore()  # type: ignore[attr-defined]
    form_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store, World(device=device))
    yield
    leave_group()
