"""Workers of another kind: processes where torch and MKL take their lowest kernels, which give other bits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.models import SlowPairs

LOWEST = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}  # the second one differs on any processor


@contextmanager
def lowest_kind(is_lowest: bool = True) -> Iterator[None]:
    """Within the block, processes that start are of the lowest kind, or of this machine's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOWEST.items():
            patch.setenv(name, value) if is_lowest else patch.delenv(name, raising=False)
        yield


class SlowUntil(SlowPairs):
    """Pairs of which each is read in a twentieth of a second, until a file is there."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.path.exists():
            time.sleep(0.05)
        return self.inputs[index], self.targets[index]
