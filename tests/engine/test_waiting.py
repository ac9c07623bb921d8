"""A worker says that it waits for others while it is in a collective, and not while its own code runs."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from dp_ray.cluster.heartbeat import is_in_collective
from dp_ray.engine.world import own_rank
from dp_ray.job.job import Job
from dp_ray.system.threads import waiting, waits_for
from tests.support import models
from tests.support.group import run_group


def test_nested_waits_name_the_innermost_and_an_error_ends_them() -> None:
    assert waits_for() == ""
    with waiting("one"):
        with pytest.raises(ZeroDivisionError), waiting("two"):
            1 / (waits_for() != "two")
        assert waits_for() == "one"
    assert waits_for() == ""


class Watched(models.SlowPairs):
    """Each read of rank 1 takes 0.2 s. A thread notes what the task waits for, every 10 ms."""

    def __init__(self, folder: str) -> None:
        super().__init__(0.0)
        self.folder = folder
        self.seen: list[tuple[bool, str]] = []
        self.loop = threading.get_ident()
        self.is_reading = False
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        while True:
            time.sleep(0.01)
            self.seen.append((self.is_reading, waits_for()))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.is_reading = True
        time.sleep(0.02 * own_rank())
        self.is_reading = False
        text = "\n".join(f"{int(reads)} {waits}" for reads, waits in self.seen)
        (Path(self.folder) / f"seen-{own_rank()}").write_text(text)
        return super().__getitem__(index)


@pytest.mark.full
@pytest.mark.slow
def test_the_fast_worker_waits_for_gradients_and_the_slow_one_for_nobody(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"task": "train", "model": "tests.support.training:mlp", "batch_size": 12, "max_steps": 7}
    keys |= {"loss": "torch.nn:CrossEntropyLoss", "workers": 2, "bitwise": True}
    keys |= {"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}}}
    keys |= {"dataset": {"target": "tests.engine.test_waiting:Watched", "args": {"folder": str(tmp_path)}}}
    run_group(Job.make(keys, "run"), str(tmp_path / "run"))
    files = (tmp_path / f"seen-{rank}" for rank in (0, 1))
    fast, slow = ([line.split(" ", 1) for line in file.read_text().splitlines()] for file in files)
    assert "the other workers' gradients" in [what for _, what in fast]
    reading = [what for reads, what in slow if reads == "1"]
    assert reading
    assert set(reading) == {""}


def test_a_collective_of_the_users_own_counts(tmp_path: Path) -> None:
    store = HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    found: list[bool] = []

    class Spy:
        """Looks, while it is pickled by a collective, at where this thread stands."""

        def __reduce__(self) -> Any:
            found.append(is_in_collective(sys._getframe()))
            return int, ()

    try:
        torch.distributed.all_gather_object([None], Spy())
    finally:
        torch.distributed.destroy_process_group()
    assert found[:1] == [True]
    assert not is_in_collective(sys._getframe())
