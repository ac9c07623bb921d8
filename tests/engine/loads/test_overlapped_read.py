"""A worker of several reads its next batch while the others' gradients come; nothing else is to change by it."""

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dp_ray.engine.loads.loading import LoadedShard
from dp_ray.engine.world import own_rank
from dp_ray.messages import StepControl
from dp_ray.plan.order import Order
from dp_ray.plan.split import Shard
from dp_ray.rundir.quarantine import count_quarantined
from dp_ray.storage import Storage
from tests.support.builders import read_ahead_of
from tests.support.group import ProcessExit, history_of, run_group
from tests.support.training import Pairs, mlp
from tests.support.trainings import job_of
from tests.support.within import within

pytestmark = pytest.mark.usefixtures("in_project")

HERE = "tests.engine.loads.test_overlapped_read"
LATE = (3, 4)  # in the early steps the workers agree on what the forward wrote
SECONDS = 60.0  # if the next batch is not read before: then the test fails
USED: dict[str, Any] = {"find_unused_parameters": False}


def numbered(count: int, read: list[int], fails: bool = False) -> Generator[LoadedShard, None, None]:
    try:
        for number in range(count):
            read.append(number)
            yield LoadedShard(Shard(number, 0, 0, 1), np.array([number]), None)
        if fails:
            read.append(count)
            raise OSError("no more")
    finally:
        read.append(-1)


@given(st.integers(0, 6), st.booleans(), st.lists(st.sampled_from(["next", "read"]), max_size=20))
def test_batches_come_in_order_and_at_most_one_is_ahead(count: int, fails: bool, calls: list[str]) -> None:
    read: list[int] = []
    given, ended = 0, False
    ahead, batches = read_ahead_of(numbered(count, read, fails))
    for call in calls:
        if call == "read":
            ahead.read()
            begun = [one for one in read if one >= 0]
            assert len(begun) <= given + 1
            continue
        try:
            assert next(batches).indices == [given]
            given += 1
        except OSError:
            assert fails and given == count and not ended
            ended = True
        except StopIteration:
            assert given == count and (ended or not fails)
            ended = True
    batches.close()
    ahead.read()
    assert read.count(-1) == (1 if read else 0), "what it reads from is closed"
    assert sorted(read)[read.count(-1) :] == list(range(len(read) - read.count(-1)))


def test_nothing_is_read_before_the_first_batch_is_asked_for() -> None:
    read: list[int] = []
    ahead, batches = read_ahead_of(numbered(2, read))
    ahead.read()
    assert read == []
    assert next(batches).indices == [0]


class Noted(Pairs):
    """Notes when each sample is read, on a clock that all processes share, in a file of the rank."""

    def __init__(self, folder: str) -> None:
        super().__init__(48)
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        note(self.folder, ["read", index, time.monotonic()])
        return super().__getitem__(index)


class LateOnRank1(torch.autograd.Function):
    """A backward that lasts on rank 1, in the steps of LATE, until rank 0 has read the next batch."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, folder: str) -> torch.Tensor:
        ctx.folder = folder
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if own_rank() == 1 and (step := len(ends_of(noted(ctx.folder, 1)))) in LATE:
            within(SECONDS, lambda: 8 * (step + 1) in reads_of(noted(ctx.folder, 0)))
        note(ctx.folder, ["backward", -1, time.monotonic()])
        return gradients[0], None


class Late(nn.Module):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.first, self.rest, self.folder = nn.Linear(6, 6), mlp(), folder

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.rest(LateOnRank1.apply(self.first(inputs), self.folder))  # type: ignore[no-untyped-call]
        return outputs


def note(folder: str, what: Any) -> None:
    with Path(folder, f"rank-{own_rank()}.jsonl").open("a") as file:
        file.write(f"{json.dumps(what)}\n")


def noted(folder: str, rank: int) -> list[Any]:
    """What a rank has noted; of a line that it is writing, nothing."""
    lines = Path(folder, f"rank-{rank}.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def reads_of(noted: list[Any]) -> dict[int, float]:
    return {index: at for what, index, at in noted if what == "read"}


def ends_of(noted: list[Any]) -> list[float]:
    return [at for what, _, at in noted if what == "backward"]


@pytest.mark.parametrize("bitwise", [False, True])
def test_the_next_batch_is_read_before_the_other_workers_gradients_are_there(tmp_path: Path, bitwise: bool) -> None:
    model = {"target": f"{HERE}:Late", "args": {"folder": str(tmp_path)}}
    data = {"target": f"{HERE}:Noted", "args": {"folder": str(tmp_path)}}
    job = job_of(model, data, workers=2, batch_size=8, epochs=1, shuffle=False, bitwise=bitwise, **USED)
    run_group(job, tmp_path / "run")
    mine, theirs = noted(str(tmp_path), 0), noted(str(tmp_path), 1)
    read = reads_of(mine)
    assert sorted(read) == [index for index in range(48) if index % 8 < 4]
    my_ends, ends = ends_of(mine), ends_of(theirs)
    assert len(my_ends) == len(ends) == 6
    for step in LATE:
        assert my_ends[step] < read[8 * (step + 1)] < ends[step]
    assert len(history_of(tmp_path / "run")) == 6


class StopsAfter(StepControl):
    """Asks for an end after a step."""

    def __init__(self, step: int) -> None:
        self._last = step

    def before(self, step: int) -> None:
        self.wants_stop = step >= self._last

    def leave(self) -> None:
        """The run goes on another time."""


def bad_in(step: int, **how: Any) -> dict[str, Any]:
    """Pairs of which a sample of rank 1 in a step, of batches of 7, cannot be read."""
    index = Order(101, 0, 0, shuffle=True)[step * 7 + 5]
    return {"target": "tests.support.bad_data:Broken", "args": {"raises": [index]}, **how}


def test_an_error_of_a_batch_that_does_not_run_is_none(tmp_path: Path) -> None:
    job = job_of("mlp", bad_in(4), workers=2)
    with pytest.raises(ProcessExit, match=r"step 4.*\n?.*no such image"):
        run_group(job, tmp_path / "goes-on")
    run_group(job, tmp_path / "stops", StopsAfter(3))
    assert len(history_of(tmp_path / "stops")) == 4


@pytest.mark.parametrize("last", [3, 4])
def test_a_sample_of_a_batch_that_does_not_run_is_not_set_aside(tmp_path: Path, last: int) -> None:
    job = job_of("mlp", bad_in(4), workers=2, on_error={"quarantine": 3})
    run_group(job, tmp_path, StopsAfter(last))
    assert len(history_of(tmp_path)) == last + 1
    assert count_quarantined(Storage(str(tmp_path))) == last - 3


def test_a_stop_by_early_stopping_is_the_same(tmp_path: Path) -> None:
    never_better = {"metric": "eval_loss", "patience": 1, "min_delta": 1e9}
    keys = {"eval": {"dataset": "tests.support.training:Pairs", "every_steps": 2}, "early_stopping": never_better}
    job = job_of("mlp", bad_in(4), workers=2, on_error={"quarantine": 3}, **keys)
    run_group(job, tmp_path)
    assert len(history_of(tmp_path)) == 4
    assert count_quarantined(Storage(str(tmp_path))) == 0


def test_what_is_ahead_is_let_go_with_its_batches() -> None:
    closed: list[int] = []

    def batches() -> Generator[LoadedShard, None, None]:
        yield from numbered(3, closed)

    ahead, passing = read_ahead_of(batches())
    next(passing)
    ahead.read()
    passing.close()
    assert closed == [0, 1, -1]
    ahead.read()
    assert closed == [0, 1, -1]
