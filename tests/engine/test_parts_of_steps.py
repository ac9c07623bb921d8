"""The parts of a worker's steps, against models and datasets that sleep, and against plain arithmetic."""

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.engine.clock import PARTS, DeviceClock, DevicePlace, Part, StepClock, TimedStep
from dp_ray.engine.world import World
from dp_ray.messages import Report, TimedSteps
from dp_ray.storage import Storage
from dp_ray.telemetry import reports
from dp_ray.telemetry.reports import ReportTables
from dp_ray.telemetry.times import (
    SCHEMA,
    STEP_PARTS,
    TIMES,
    packed_steps,
    read_step_times,
    step_time_parts,
    times_table,
)
from tests.support.training import Pairs, mlp

STEPS, SECONDS = 6, 0.01


class SlowReads(Pairs):
    """Reads a batch in SECONDS times 3."""

    def __init__(self) -> None:
        super().__init__(STEPS * 4)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(3 * SECONDS)
        return [self[index] for index in indices]


class Sleepy(torch.autograd.Function):
    """Sleeps for SECONDS in forward, and for 2 SECONDS in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * SECONDS)
        return gradients[0]


class SlowModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = Sleepy.apply(self.layers(inputs))  # type: ignore[no-untyped-call]
        return outputs


def ran(folder: Path, task: str, **keys: Any) -> dp_ray.Result:
    given = {"model": SlowModel, "dataset": SlowReads, "loss": nn.CrossEntropyLoss, "optimizer": torch.optim.SGD}
    common = {"task": task, "batch_size": 4, "workers": 0, "quiet": True, "storage": str(folder), "inputs": "first"}
    return dp_ray.run(**{**given, **common, **keys}, name=f"{task}{len(keys)}")


def seconds_of(table: pa.Table, part: str) -> list[float]:
    return [round(row, 6) for row in table.column(part).to_pylist()]


@pytest.mark.full(but=["predict"])
@pytest.mark.parametrize("task", ["predict", "evaluate", "train"])
def test_each_part_of_a_step_is_told(tmp_path: Path, task: str) -> None:
    result = ran(tmp_path, task)
    table = read_step_times(result.storage())
    assert table.column_names == ["step", "attempt", "rank", "node", "rows", *STEP_PARTS]
    assert table.column("step").to_pylist() == list(range(STEPS))
    assert set(table.column("rows").to_pylist()) == {4}
    assert set(table.column("node").to_pylist()) == {"localhost"}
    slept = {"data_wait": 3, "forward": 1, "backward": 2 * (task == "train")}
    for part, times in slept.items():
        assert min(seconds_of(table, part)) >= times * SECONDS
    for part in ("host_to_device", "exchange", "waiting"):
        assert not any(seconds_of(table, part)), "there is one worker, on the CPU"
    loop = sum(sum(seconds_of(table, part)) for part in STEP_PARTS)
    assert 0.5 * result.workers[0]["loop_seconds"] < loop <= 1.01 * result.workers[0]["loop_seconds"]


@pytest.mark.full
@pytest.mark.slow
def test_checkpoints_and_evaluations_have_parts_of_their_own(tmp_path: Path) -> None:
    evaluation = {"dataset": SlowReads, "every_steps": 2, "batch_size": 4}
    result = ran(tmp_path, "train", checkpoint={"every_steps": 3}, eval=evaluation)
    table = read_step_times(result.storage())
    assert [seconds >= STEPS * SECONDS for seconds in seconds_of(table, "evaluation")] == [False, True] * 3
    assert [seconds > 0 for seconds in seconds_of(table, "checkpoint")] == [False, False, True] * 2
    most = sorted(seconds_of(table, "data_wait"))[-2]  # on a busy machine one may be long
    assert most < STEPS * 3 * SECONDS, "that of an evaluation is a part of it"


class SlowlyBuilt(SlowReads):
    """Takes longer to build than its steps take."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(STEPS * 6 * SECONDS)


@pytest.mark.full
@pytest.mark.slow
def test_the_seconds_outside_of_the_steps_are_told(tmp_path: Path) -> None:
    """The driver and the worker build the dataset, so that most of the time is before the first step."""
    result = ran(tmp_path, "predict", dataset=SlowlyBuilt)
    before, after = result.seconds_before_steps, result.seconds_after_steps
    assert before is not None and after is not None
    assert before >= STEPS * 12 * SECONDS and 0 < after < result.seconds - before
    steps = sum(sum(seconds_of(read_step_times(result.storage()), part)) for part in STEP_PARTS)
    assert result.seconds - before - after == pytest.approx(steps, abs=0.5)


class Stream:
    """A stream whose events are one second apart, as far as the device has come."""

    def __init__(self) -> None:
        self.now, self.last, self.num_events = 0.0, 0.0, 0

    def clock(self) -> DeviceClock:
        return DeviceClock(partial(Event, self), lambda: self)


class Event:
    """An event of a stream that passes at a known time."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, math.nan
        stream.num_events += 1

    def record(self, stream: Stream) -> None:
        assert stream is self.stream
        stream.last += 1
        self.at = stream.last

    def query(self) -> bool:
        return self.at <= self.stream.now

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1000


def test_on_a_device_the_times_are_read_once_it_has_passed_them() -> None:
    stream = Stream()
    clock = stream.clock()
    clock.restart()
    for step in range(3):
        clock.enter(Part.DATA_WAIT)
        assert clock.enter(Part.FORWARD) is Part.DATA_WAIT
        clock.enter(Part.BACKWARD)
        assert clock.end_step(step, 7) == [], "nobody waits for the device"
    stream.now = 8.0
    assert [one.step for one in clock.rest()] == [0]
    stream.now = 100.0
    timed = clock.rest()
    assert [(one.step, one.rows) for one in timed] == [(1, 7), (2, 7)]
    seconds = dict(zip(PARTS, timed[0].seconds, strict=True))
    assert {part: value for part, value in seconds.items() if value} == dict.fromkeys(
        ("data_wait", "forward", "backward", "other"), 1.0
    )
    assert clock.rest() == []


def test_the_place_of_a_device_is_the_first_mark_that_it_has_not_passed() -> None:
    stream = Stream()
    clock = stream.clock()
    clock.restart()  # at 2, after which each step has four marks
    for step in range(3):
        for part in (Part.FORWARD, Part.EXCHANGE, Part.UPDATE):
            clock.enter(part)
        clock.end_step(step, 7)
    clock.enter(Part.DATA_WAIT)
    clock.enter(Part.FORWARD)
    expected = {2: (None, Part.OTHER), 3: (None, Part.FORWARD), 4: (None, Part.EXCHANGE), 6: (0, Part.OTHER)}
    expected |= {7: (0, Part.FORWARD), 13: (1, Part.UPDATE), 14: (2, Part.OTHER), 15: (2, Part.DATA_WAIT)}
    expected |= {16: (2, Part.FORWARD), 99: (2, Part.FORWARD)}
    for now, (passed, part) in expected.items():
        stream.now = now
        assert clock.place() == DevicePlace(passed, part)
    assert [one.step for one in clock.rest()] == [0, 1, 2], "to look takes nothing away"
    assert clock.place() == DevicePlace(2, Part.FORWARD)
    assert StepClock().place() is None, "a loop on the host is where it is"


PARTS_OF_A_STEP = Part.DATA_WAIT, Part.FORWARD, Part.UPDATE


def test_events_that_were_read_are_used_again() -> None:
    """A step of the most parts needs them all; of the device's lag, only so many steps' events are ever made."""
    stream = Stream()
    clock = stream.clock()
    made, timed = [], list[TimedStep]()
    for step in range(12):
        for part in PARTS_OF_A_STEP * (2 if step == 1 else 1):
            clock.enter(part)
        stream.now = stream.last - 9  # two steps behind, and a part
        timed += clock.end_step(step, 7)
        made.append(stream.num_events)
    assert made[5:] == made[5:6] * 7
    stream.now = 1000.0
    timed += clock.rest()
    assert [one.step for one in timed] == list(range(12))
    for one in timed:
        times = 2.0 if one.step == 1 else 1.0
        own = {Part.DATA_WAIT: times, Part.FORWARD: times, Part.UPDATE: times, Part.OTHER: 1.0}
        assert {part: one.seconds[part] for part in Part if one.seconds[part]} == own


def test_the_place_of_a_device_is_right_though_its_marks_are_used_again_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread looks; between two of its looks the loop may read the steps, and set their marks anew."""
    stream = Stream()
    clock = stream.clock()
    runs = [2]  # steps, in the midst of the first look

    def run(step: int) -> None:
        for part in PARTS_OF_A_STEP:
            clock.enter(part)
        clock.end_step(step, 7)

    def query(event: Event) -> bool:
        while runs:
            number = runs.pop()
            stream.now = stream.last
            for step in range(number, number + 4):
                run(step)
        return event.at <= stream.now

    run(0)
    run(1)
    monkeypatch.setattr(Event, "query", query)
    stream.now = 3.0  # in the first step's second part
    assert clock.place() == DevicePlace(1, Part.OTHER)


def test_the_place_of_a_device_that_has_failed_is_what_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    clock = stream.clock()
    clock.end_step(0, 7)
    stream.now = 99.0
    clock.rest()
    clock.enter(Part.FORWARD)

    def fails(_: Event) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in ...")

    monkeypatch.setattr(Event, "query", fails)
    place = clock.place()
    assert place == DevicePlace(0, Part.FORWARD, "CUDA error: device-side assert triggered")
    assert str(place) == "raises CUDA error: device-side assert triggered"


def test_parts_may_lie_in_one_another() -> None:
    clock = StepClock()
    outer = time.perf_counter()
    clock.restart()
    inner = time.perf_counter()
    clock.enter(Part.UPDATE)
    before = clock.enter(Part.CHECKPOINT)
    time.sleep(SECONDS)
    clock.enter(before)
    time.sleep(2 * SECONDS)
    within = time.perf_counter() - inner
    (timed,) = clock.end_step(5, 3)
    around = time.perf_counter() - outer
    assert timed.seconds[Part.CHECKPOINT] >= SECONDS
    assert timed.seconds[Part.UPDATE] >= 2 * SECONDS
    assert within - 1e-6 <= sum(timed.seconds) <= around + 1e-6


def test_a_step_costs_microseconds() -> None:
    """A step of one shard has some ten marks."""
    clock, began = StepClock(), time.process_time()
    timed = []
    for step in range(2000):
        for part in (*Part, Part.FORWARD, Part.BACKWARD):
            clock.enter(part)
        timed += clock.end_step(step, 8)
    packed_steps(timed)
    assert (time.process_time() - began) / 2000 < 100e-6, "it takes about 4 on a quiet machine"


def steps(first: int, num: int, exchange: float = 0.0, forward: float = 1.0) -> TimedSteps:
    seconds = np.zeros((num, len(PARTS)), np.float32)
    seconds[:, Part.EXCHANGE], seconds[:, Part.FORWARD] = exchange, forward
    return TimedSteps(np.arange(first, first + num), np.full(num, 4, np.int32), seconds)


def written(run: Storage, *attempts: dict[World, TimedSteps]) -> None:
    """Write each attempt's steps to files of its own, as drivers one after another do."""
    for number, attempt in enumerate(attempts):
        parts = step_time_parts(run)
        for world, timed in attempt.items():
            parts.add(times_table(number, world, timed))
        parts.write()


def test_who_arrives_last_waits_for_nobody(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    worlds = [World(rank, 3, node=f"10.0.0.{rank}") for rank in range(3)]
    blocked = [0.5, 0.125, 2.0]
    written(run, {world: steps(0, 2, one) for world, one in zip(worlds, blocked, strict=True)})
    table = read_step_times(run)
    assert table.column("rank").to_pylist() == [0, 1, 2] * 2
    assert table.column("node").to_pylist() == ["10.0.0.0", "10.0.0.1", "10.0.0.2"] * 2
    assert seconds_of(table, "exchange") == [0.125] * 6
    assert seconds_of(table, "waiting") == [0.375, 0.0, 1.875] * 2


def test_a_step_that_ran_twice_is_there_as_it_ran_last(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    two, one = [World(rank, 2) for rank in range(2)], World()
    written(run, {two[0]: steps(0, 10), two[1]: steps(0, 9)}, {one: steps(6, 2, forward=3.0)})
    table = read_step_times(run)
    rows = list(zip(*(table.column(name).to_pylist() for name in ("step", "attempt", "rank")), strict=True))
    first = [(step, 0, rank) for step in range(6) for rank in range(2)]
    assert rows == [*first, (6, 1, 0), (7, 1, 0), (8, 0, 0), (8, 0, 1), (9, 0, 0)]
    assert seconds_of(table, "forward") == [1.0] * 12 + [3.0] * 2 + [1.0] * 3


def test_the_files_are_written_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "WRITE_SECONDS", 0.002)
    monkeypatch.setattr(reports, "SHARE_OF_WRITES", 1e9)
    monkeypatch.setattr("dp_ray.telemetry.times.ROWS_IN_A_PART", 5)
    run = Storage(str(tmp_path))
    assert read_step_times(run).num_rows == 0
    tables = ReportTables(run, 8)
    tables.begin(0)
    for step in range(0, 8, 2):
        tables.add(Report(World(), step + 1, None, steps(step, 2)))
        until = time.monotonic() + 20
        while read_step_times(run).num_rows < step + 2 and time.monotonic() < until:
            time.sleep(0.002)
        assert read_step_times(run).num_rows == step + 2
    tables.close()
    names = sorted(path.name for path in (tmp_path / TIMES).iterdir())
    assert names == ["part-0.parquet", "part-1.parquet"]
    assert [pq.read_table(tmp_path / TIMES / name).num_rows for name in names] == [6, 2]
    assert pq.read_schema(tmp_path / TIMES / "part-0.parquet").equals(SCHEMA)
