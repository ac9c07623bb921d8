"""What a training leaves in its workers' processes, which run the next job of a session: nothing."""

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.engine.user_code import free_memory
from tests.support import group
from tests.support.group import run_group
from tests.support.trainings import job_of, keys_of

LOSES = {"on_error": {"quarantine": 3}}


@pytest.mark.full(but=["2-keys5", "2-keys6"])
@pytest.mark.parametrize(
    ("workers", "keys"),
    [
        (2, {}),
        (3, {"bitwise": True, "shards": 4}),
        (2, {**LOSES, "ema": {"decay": 0.9}}),
        (2, {"strategy": "fsdp"}),
        (2, {"strategy": "fsdp", "bitwise": True, "shards": 4}),
        (2, {"task": "evaluate"}),
        (2, {"task": "predict"}),
    ],
)
def test_its_model_and_its_group_are_gone(tmp_path: Path, workers: int, keys: dict[str, Any]) -> None:
    """Each process group has three threads and more, for as long as anything holds the group."""

    def threads_after(number: int) -> int:
        run_group(job_of("mlp", "Pairs", workers=workers, epochs=1, **keys), tmp_path / str(number))
        return sum(psutil.Process(process.pid).num_threads() for process, _ in group._idle)

    found = [threads_after(number) for number in range(5)]
    assert found[4] - found[1] < 3 * workers, "three more jobs leave less than one group"


class Hooked(nn.Module):
    """Its parameters have hooks that hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.steps = 0
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.count)  # type: ignore[no-untyped-call]
            parameter.register_hook(self.count)  # type: ignore[no-untyped-call]

    def count(self, _: torch.Tensor) -> None:
        self.steps += 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def test_a_model_with_hooks_on_its_gradients_is_gone_too(tmp_path: Path) -> None:
    for number in range(2):
        dp_ray.run(**keys_of(model=Hooked, storage=str(tmp_path), name=str(number), max_steps=2))
    free_memory()
    assert not [thing for thing in gc.get_objects() if type(thing) is Hooked]
