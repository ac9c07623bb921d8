"""Workers that hang are replaced as often as `retries` allows, and end the job if the same ones hang again."""

import time

import pytest

from dp_ray.engine.world import World
from dp_ray.errors import ModelError, WorkerError
from dp_ray.messages import Beat, WorkerReady
from dp_ray.monitor.attempts import Hangs, NodeControl
from dp_ray.monitor.console import Console

LIMIT = 100.0
LATE = 110.0
WORKERS = tuple(WorkerReady("a", World(rank, 2, node=f"10.0.0.{rank}"), 100 + rank, ()) for rank in range(2))
READS = '  File "data.py", line 3, in __getitem__\n'


class Kills(NodeControl):
    """Keeps the ranks that are killed."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def kill(self, worker: WorkerReady) -> None:
        self.ranks.append(worker.world.rank)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by the test."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def hang(hangs: Hangs, clock: list[float], step: int, rank: int = 1) -> None:
    """An attempt in which `rank` hangs in `step`, and the other one waits for it."""
    hangs.watch(WORKERS)
    clock[0] += LATE
    for number in range(2):
        waits_for = "" if number == rank else "the other workers' gradients"
        hangs.watchdog.take(Beat("a", number, step, LATE, READS, waits_for))


def test_each_replacement_costs_a_retry(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    hangs, control = Hangs(LIMIT, 2, Console("job", False)), Kills()
    for step in (3, 7):
        hang(hangs, clock, step)
        hangs.check(control)
        hangs.check(control)
    assert control.ranks == [1, 1], "each is killed once"
    told = capsys.readouterr().err
    assert [f"rank 1 on 10.0.0.1 has been in step {step} for 110 s" in told for step in (3, 5, 7)] == [1, 0, 1]
    hang(hangs, clock, 9)
    with pytest.raises(WorkerError, match=r"(?s)^hangs: rank 1 on .* in step 9 .*timeouts\.step is 100\)$"):
        hangs.check(control)
    assert control.ranks == [1, 1]


def test_loops_that_make_other_calls_end_the_job_whatever_the_retries(clock: list[float]) -> None:
    hangs = Hangs(None, 9, Console("job", True))
    hangs.watch(WORKERS)
    for rank in range(2):
        hangs.watchdog.take(Beat("a", rank, 3, 0.1, "", call=(5, f"step 3, pass {rank}")))
    with pytest.raises(ModelError, match="other calls: rank 0: step 3, pass 0; rank 1: step 3, pass 1; each worker"):
        hangs.check(Kills())


def test_without_retries_the_first_one_ends_the_job(clock: list[float]) -> None:
    hangs, control = Hangs(LIMIT, 0, Console("job", True)), Kills()
    hang(hangs, clock, 3)
    with pytest.raises(WorkerError, match=r"^hangs: rank 1 on"):
        hangs.check(control)
    assert control.ranks == []


def test_the_same_worker_in_the_same_step_ends_the_job_though_retries_are_left(clock: list[float]) -> None:
    hangs, control = Hangs(LIMIT, 9, Console("job", True)), Kills()
    for step, rank in ((3, 1), (3, 0), (4, 1)):
        hang(hangs, clock, step, rank)
        hangs.check(control)
    hang(hangs, clock, 3)
    with pytest.raises(WorkerError, match=r"^hangs again: rank 1 on"):
        hangs.check(control)
    assert control.ranks == [1, 0, 1]


def test_an_attempt_that_lost_the_worker_that_was_killed_ended_by_its_hang(clock: list[float]) -> None:
    hangs = Hangs(LIMIT, 9, Console("job", True))
    hang(hangs, clock, 3)
    hangs.check(Kills())
    assert hangs.end((1,)) == "rank 1 on 10.0.0.1 has been in step 3 for 110 s; its stack is"
    assert hangs.end((1,)) == "", "the attempt after it lost the worker for another reason"
    hang(hangs, clock, 4)
    hangs.check(Kills())
    assert hangs.end((0,)) == "", "another worker was lost before"


def test_each_of_several_that_hang_is_told_so_where_the_others_go_on(clock: list[float]) -> None:
    hangs, control = Hangs(LIMIT, 9, Console("job", True)), Kills()
    hangs.watch(WORKERS)
    clock[0] += LATE
    for rank in range(2):
        hangs.watchdog.take(Beat("a", rank, 3, LATE, READS, ""))
    hangs.check(control)
    assert control.ranks == [0, 1]
    assert [hangs.end((rank,), survives=True) != "" for rank in (1, 1, 0)] == [True, False, True]
    hang(hangs, clock, 4)
    hangs.check(control)
    hangs.watch(WORKERS)
    assert hangs.end((1,), survives=True) == "", "a later attempt has lost another worker of that rank"


def test_between_two_attempts_nobody_hangs(clock: list[float]) -> None:
    hangs, control = Hangs(LIMIT, 9, Console("job", True)), Kills()
    hang(hangs, clock, 3)
    hangs.end(())
    hangs.check(control)
    assert control.ranks == []
