"""Who hangs: the one that does not step, not those that wait for it; found once, after the time that is stated."""

import time

import pytest

from dp_ray.engine.world import World
from dp_ray.messages import Beat, WorkerReady
from dp_ray.monitor.watchdog import SILENT_BEATS, Watchdog

READS = '  File "data.py", line 3, in __getitem__\n    time.sleep(1e9)\n'
WAITS = '  File "train.py", line 9, in _backward\n  File "torch/autograd/graph.py", line 8, in _engine_run\n'
LIMIT = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by the test."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def watchdog(limit: float | None = LIMIT, num_workers: int = 3) -> Watchdog:
    workers = [
        WorkerReady("a", World(rank, num_workers, node=f"10.0.0.{rank}"), 100 + rank, ())
        for rank in range(num_workers)
    ]
    return Watchdog(limit, workers)


def beat(rank: int, step: int | None, seconds: float, stack: str) -> Beat:
    """A worker's beat: where it stands is told once it is late."""
    is_late = seconds > LIMIT
    return Beat("a", rank, step, seconds, stack * is_late, "the others' gradients" * (is_late and stack == WAITS))


def beats(dog: Watchdog, seconds: float, stacks: list[str], steps: list[int | None] | None = None) -> None:
    for rank, stack in enumerate(stacks):
        step = steps[rank] if steps else 7
        dog.take(beat(rank, step, seconds, stack))


def test_the_one_that_does_not_wait_is_blamed_once_with_its_stack(clock: list[float]) -> None:
    dog = watchdog()
    for seconds in (50.0, 99.0, 101.0):
        clock[0] = 1000.0 + seconds
        beats(dog, seconds, [WAITS, READS, WAITS])
        assert dog.hang() is None, "those that are late by a beat are waited for"
    clock[0] = 1103.0
    beats(dog, 103.0, [WAITS, READS, WAITS])
    hang = dog.hang()
    assert hang is not None
    assert (hang.ranks, hang.step) == ((1,), 7)
    assert str(hang) == f"rank 1 on 10.0.0.1 has been in step 7 for 103 s; its stack is\n{READS.rstrip()}"
    assert dog.hang() is None, "it is told once"


def test_a_worker_that_does_not_answer_is_blamed_first(clock: list[float]) -> None:
    dog = watchdog()
    beats(dog, 0.0, [WAITS, READS, WAITS])
    for seconds in range(10, 120, 10):
        clock[0] = 1000.0 + seconds
        for rank in (0, 2):
            dog.take(beat(rank, 7, float(seconds), WAITS))
    hang = dog.hang()
    assert hang is not None
    assert hang.ranks == (1,)
    assert "it does not answer" in str(hang)
    assert SILENT_BEATS * 0.5 < 110


def test_the_one_behind_is_blamed_where_workers_need_not_meet(clock: list[float]) -> None:
    dog = watchdog()
    clock[0] = 1110.0
    beats(dog, 110.0, [READS, READS, WAITS], [9, 4, 4])
    hang = dog.hang()
    assert hang is not None
    assert (hang.ranks, hang.step) == ((1,), 4)


def test_where_all_wait_all_are_named(clock: list[float]) -> None:
    dog = watchdog()
    clock[0] = 1110.0
    beats(dog, 110.0, [WAITS, WAITS, WAITS])
    hang = dog.hang()
    assert hang is not None
    assert hang.ranks == (0, 1, 2)
    assert "have been in step 7" in str(hang)


def test_who_has_not_begun_or_is_through_hangs_never_and_no_limit_is_for_ever(clock: list[float]) -> None:
    idle, limitless = watchdog(), watchdog(None)
    clock[0] = 1e6
    beats(idle, 1e5, ["", "", ""], [None, None, None])
    beats(limitless, 1e5, [READS, READS, READS])
    assert idle.hang() is None
    assert limitless.hang() is None


def test_those_who_wait_for_slow_ones_do_not_hang(clock: list[float]) -> None:
    dog = watchdog()
    clock[0] = 1200.0
    for rank, (seconds, stack) in enumerate([(150.0, WAITS), (5.0, ""), (150.0, WAITS)]):
        dog.take(beat(rank, 7, seconds, stack))
    assert dog.hang() is None
    clock[0] = 1320.0
    beats(dog, 120.0, [WAITS, READS, WAITS])
    hang = dog.hang()
    assert hang is not None
    assert hang.ranks == (1,)


def test_a_beat_of_workers_that_are_over_is_passed_over() -> None:
    dog = watchdog(None, 0)
    dog.take(Beat("a", 3, 7, 1.0, ""))
    assert dog.hang() is None


def test_a_worker_that_is_stopped_right_after_its_start_is_found(clock: list[float]) -> None:
    dog = watchdog()
    for rank in range(3):
        dog.start(rank, 7)
    for seconds in range(10, 120, 10):
        clock[0] = 1000.0 + seconds
        for rank in (0, 2):
            dog.take(beat(rank, 7, float(seconds), WAITS))
    hang = dog.hang()
    assert hang is not None
    assert hang.ranks == (1,)
