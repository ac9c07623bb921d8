"""The monitor: it takes in what workers send, in order; an error while it listens ends the job.

It follows the newest attempt alone: what workers of a superseded one still send changes nothing.
"""

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dp_ray
from dp_ray import errors
from dp_ray.cluster.channel import NOTHING, STOP, Ask, Channel, Request, Terms
from dp_ray.engine.world import World
from dp_ray.errors import DataError
from dp_ray.messages import (
    Beat,
    Failed,
    Interrupted,
    Message,
    Note,
    Printed,
    Report,
    Sizes,
    Started,
    Starting,
    WorkerReady,
    error_of,
)
from dp_ray.monitor import attempts, console, in_process, watchdog
from dp_ray.monitor.attempts import NodeControl
from dp_ray.monitor.console import Console, Progress
from dp_ray.monitor.monitor import Monitor, listening
from dp_ray.plan.split import Shard, Split
from dp_ray.rundir.incidents import IncidentKind, Level
from dp_ray.telemetry.shapes import Recorder
from tests.support.builders import attempts_of, monitor_of
from tests.support.within import within

SEEN = Sizes("[5, 5]", "[5, 2]", 5)


def ready(attempt: str, rank: int, world_size: int = 2) -> WorkerReady:
    return WorkerReady(attempt, World(rank, world_size, node=f"10.0.0.{rank}"), 1, (), node_id=f"node {rank}")


def reported(attempt: str, rank: int, steps: int) -> list[Message]:
    """What a real Recorder of this rank sends for its shard of `steps` steps."""
    sent: list[Message] = []
    with Recorder(World(rank, 2), sent.append, 60, attempt) as recorder:
        for step in range(steps):
            recorder.on_shard(Shard(step, rank, 0, 5), SEEN, 1.0)
            recorder.on_step(step)
    return sent


def test_a_step_is_printed_once_all_workers_are_through(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = monitor_of(shapes=True)
    for message in (ready("a", 0), *reported("a", 0, 2), ready("a", 1)):
        monitor.take(message)
    monitor.tick()
    assert capsys.readouterr().out == ""
    for message in reported("a", 1, 2):
        monitor.take(message)
    monitor.tick()
    line = "\tIn Model: input size torch.Size([5, 5]) output size torch.Size([5, 2])"
    whole = "Outside: input size torch.Size([10, 5]) output_size torch.Size([10, 2])"
    assert capsys.readouterr().out.splitlines() == [line, line, whole] * 2
    monitor.close()


def test_attempts_are_counted_when_all_their_workers_are_there() -> None:
    monitor = monitor_of(quiet=True)
    for message in (ready("a", 0), ready("a", 1), ready("b", 0), ready("c", 0, 1)):
        monitor.take(message)
    assert [len(workers) for workers in monitor.attempts.begun] == [2, 1]
    monitor.close()


def test_the_first_error_told_is_the_one_that_counts() -> None:
    monitor = monitor_of(quiet=True)
    first = Failed("a", World(1, 2, node="n"), errors.DataError, "sample 7 ...", "all", "frames of rank 1")
    monitor.take(first)
    monitor.take(Failed("a", World(0, 2), errors.ModelError, "a consequence", "all of rank 0"))
    assert monitor.failed == first
    error = error_of(first)
    assert type(error) is errors.DataError
    assert str(error) == "rank 1 on n: sample 7 ..."
    assert error.__notes__ == ["frames of rank 1"]
    monitor.close()


def test_an_error_of_no_kind_of_ours_is_a_plain_one() -> None:
    assert type(error_of(Failed("a", World(), None, "text", "trace"))) is errors.Error


def test_an_error_replaces_the_loss_of_a_peer_that_it_caused() -> None:
    monitor = monitor_of(quiet=True)
    cause = Failed("a", World(1, 2), errors.ModelError, "the cause", "all")
    for failed in (Failed("a", World(0, 2), errors.WorkerError, "a peer was lost", "all"), cause):
        monitor.take(failed)
    assert monitor.failed == cause
    monitor.close()


def test_what_users_print_shows_its_rank_even_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = monitor_of(quiet=True)
    monitor.take(Printed(World(3, 4), ("[bold]hello[/bold]",)))
    assert capsys.readouterr().err == "[rank 3] [bold]hello[/bold]\n"
    monitor.close()


def test_trouble_while_listening_ends_the_block_and_is_raised() -> None:
    def receive(wait: bool) -> list[Message]:
        raise errors.StorageError("the disk is full")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have none
    started = time.monotonic()
    try:
        with pytest.raises(errors.StorageError, match="the disk is full"), listening(monitor_of(), receive):
            time.sleep(200)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 100, "the block must not run on to its end"


def test_what_was_sent_before_the_end_is_taken_in() -> None:
    waiting: list[Message] = [ready("a", 0), ready("a", 1)]

    def receive(wait: bool) -> list[Message]:
        time.sleep(0.01)
        taken, waiting[:] = list(waiting), []
        return taken

    monitor = monitor_of(quiet=True)
    with listening(monitor, receive):
        waiting.extend([ready("b", 0), ready("b", 1)])
    assert len(monitor.attempts.begun) == 2
    monitor.close()


def test_a_stop_can_be_asked_for_once_and_only_while_steps_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = monitor_of()
    assert not monitor.ask_to_stop("SIGINT"), "no workers yet"
    monitor.take(ready("a", 0))
    monitor.take(ready("a", 1))
    assert not monitor.ask_to_stop("SIGINT"), "they build their models"
    monitor.take(Started("a", 0, 0))
    monitor.take(Interrupted(IncidentKind.WORKER, "killed", (1,)))
    assert not monitor.ask_to_stop("SIGINT"), "they are being replaced"
    for message in (ready("b", 0), ready("b", 1), Started("b", 0, 0)):
        monitor.take(message)
    assert [monitor.ask_to_stop("SIGINT"), monitor.ask_to_stop("SIGINT")] == [True, False]
    monitor.close()


@pytest.mark.parametrize("level", [Level.MEMORY, Level.RESTART])
@pytest.mark.parametrize("come", [[], [ready("b", 0)]], ids=["at once", "in their next view"])
def test_survivors_are_asked_to_stop_since_what_they_hold_may_be_in_no_checkpoint(
    come: list[Any], level: Level
) -> None:
    monitor = monitor_of(ready("a", 0), ready("a", 1), Started("a", 0, 0), quiet=True)
    monitor.take(Interrupted(IncidentKind.WORKER, "killed", (1,), level))
    for message in come:
        monitor.take(message)
    assert monitor.ask_to_stop("SIGINT") == (level is Level.MEMORY)
    monitor.close()


def test_a_monitor_that_is_closed_asks_nobody_to_stop() -> None:
    monitor = monitor_of(quiet=True)
    for message in (ready("a", 0), ready("a", 1), Started("a", 0, 0)):
        monitor.take(message)
    monitor.close()
    assert not monitor.ask_to_stop("SIGINT")


def test_the_order_to_end_stays() -> None:
    async def requests() -> Request:
        channel = Channel()
        await channel.begin(Terms(1, 2), [])
        await channel.request(Request(Ask.RESTART, "there is room for 3 workers"))
        await channel.request(STOP)
        await channel.request(NOTHING)
        return (await channel.state())[0]

    assert asyncio.run(requests()) == Request(Ask.STOP, "the user stops the run")


class Clock:
    """The clock of console and watchdog, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (console, attempts, watchdog):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_progress_says_what_goes_on_and_how_far_it_is(clock: Clock) -> None:
    progress = Progress("job", steps=10, rows=100)
    assert str(progress) == "starting"
    progress.begin("starting Ray")
    assert str(progress) == "starting Ray"
    clock.now += 7
    assert str(progress) == "starting Ray, 7 s"
    progress.start([World(0), World(1)])
    assert torch.device("cpu") == progress.workers[0][0].device
    clock.now += 3
    assert str(progress) == "building the dataset and the model, 3 s"
    progress.run(0)
    clock.now += 20
    assert str(progress) == "in step 0, 0/10 steps done, 20 s", "nothing is done yet, and yet it works"
    progress.advance(1, 10)
    clock.now += 1
    assert str(progress) == "1/10 steps, 10 rows, 0.476 rows/s, 3:09 left"
    progress.advance(5, 40)
    assert str(progress) == "5/10 steps, 50 rows, 40 rows/s, 0:01 left", "the first step was no measure"
    progress.advance(10, 50)
    assert str(progress) == "10/10 steps, 100 rows, finishing"


def test_progress_of_a_run_that_is_resumed_is_that_of_its_own_steps(clock: Clock) -> None:
    progress = Progress("job", steps=10, rows=100)
    progress.advance(6, 60)
    progress.start([World(0)])
    progress.run(6)
    clock.now += 5
    assert str(progress) == "in step 6, 6/10 steps done, 5 s"
    progress.advance(7, 10)
    clock.now += 5
    assert str(progress) == "7/10 steps, 70 rows, 1 rows/s, 0:30 left"
    progress.begin("starting 2 workers")
    clock.now += 5
    assert str(progress) == "starting 2 workers, 5 s"


def test_what_goes_on_before_the_first_step_is_said_at_once(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = monitor_of()
    monitor.begin("starting Ray")
    for what in ("starting 2 workers", "2 workers importing torch"):
        monitor.take(Starting(what))
    clock.now += 6
    monitor.tick()
    for rank in (0, 1):
        monitor.take(ready("a", rank))
    clock.now += 6
    monitor.tick()
    monitor.take(Started("a", 0, 0))
    clock.now += 6
    monitor.tick()
    assert capsys.readouterr().err.splitlines() == [
        "job: starting Ray",
        "job: starting 2 workers",
        "job: 2 workers importing torch",
        "job: 2 workers importing torch, 6 s",
        "job: 2 workers on 2 nodes (cpu)",
        "job: building the dataset and the model, 6 s",
        "job: in step 0, 0/2 steps done, 6 s",
    ]
    monitor.close()


def test_a_long_wait_for_workers_says_what_is_missing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = monitor_of()
    monitor.begin("starting Ray Train")
    said: list[str] = []

    def pass_by(seconds: float) -> list[str]:
        """The lines of so many seconds, in which it is looked once a second."""

        def cluster() -> str:
            said.append("asked")
            return " (each needs 1 CPU); free are 0 of 2 CPU"

        capsys.readouterr()
        for _ in range(int(seconds)):
            clock.now += 1
            monitor.waits.look(cluster)
        return capsys.readouterr().err.splitlines()

    assert pass_by(10) == []
    assert said == []  # the cluster is asked only for the line
    line = "job: waiting for workers, 10 s so far: 0 of 2 are ready (each needs 1 CPU); free are 0 of 2 CPU; now: "
    assert pass_by(10) == [f"{line}starting Ray Train"]
    monitor.take(Starting("2 workers importing torch"))
    monitor.take(ready("a", 1))
    assert pass_by(2000) == [
        line.replace("10 s", f"{seconds} s").replace("0 of 2 are", "1 of 2 are") + "2 workers importing torch"
        for seconds in (60, 300, 900, 1500)
    ]
    monitor.take(ready("a", 0))
    assert pass_by(100) == []
    monitor.take(Interrupted(IncidentKind.WORKER, "died", (1,)))
    assert [line.partition(" are")[0] for line in pass_by(12)] == ["job: waiting for workers, 10 s so far: 0 of 2"]
    monitor.close()


def test_a_run_never_stands_at_no_step_and_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    job = {
        "model": "tests.support.models:Linear",
        "dataset": {"target": "tests.support.models:Rows", "args": {"length": 9}},
    }
    dp_ray.run(**job, batch_size=3, workers=0, storage=str(tmp_path))
    told = capsys.readouterr().err
    assert "3/3 steps, 9 rows" in told
    assert "0/3 steps, " not in told and " 0 rows" not in told


def test_what_takes_its_time_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def is_said() -> bool:
        said.append(capsys.readouterr().err)
        return any(said)

    with Console("job").if_slow("building the dataset", seconds=0.01):
        assert within(60, is_said)
    with Console("job").if_slow("never said", seconds=600):
        pass
    assert "".join(said) + capsys.readouterr().err == "job: building the dataset\n"


def test_with_no_workers_reports_of_two_threads_are_taken_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[int] = []
    most: list[int] = []

    def slowly(self: Monitor) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    def two_threads(job: Any, world: Any, run: Any, send: Any, *_: Any) -> None:
        threads = [threading.Thread(target=lambda: [send(Note("x")) for _ in range(5)]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    monkeypatch.setattr(Monitor, "tick", slowly)
    monkeypatch.setattr(in_process, "run_task", two_threads)
    job = {
        "model": "tests.support.models:Linear",
        "dataset": {"target": "tests.support.models:Rows", "args": {"length": 9}},
    }
    dp_ray.run(
        **job, task="evaluate", loss="torch.nn:MSELoss", batch_size=3, workers=0, storage=str(tmp_path), quiet=True
    )
    assert set(most) == {1}


LIMIT = 100.0
FAILED = Failed("a", World(1, 2), DataError, "sample 7", "all")


class Nodes(NodeControl):
    """Keeps the ranks that are killed; says of the nodes in `gone` that they do not answer."""

    def __init__(self, *gone: str) -> None:
        self.gone = gone
        self.killed: list[int] = []

    def kill(self, worker: WorkerReady) -> None:
        self.killed.append(worker.world.rank)

    def is_gone(self, node_id: str) -> bool:
        return node_id in self.gone


def following(*messages: Message, nodes: Nodes | None = None) -> Monitor:
    """A monitor of two workers that has taken in the messages."""
    return monitor_of(*messages, job={"timeouts": {"step": LIMIT}}, quiet=True, nodes=nodes or Nodes())


def workers_of(*attempts: str) -> list[Message]:
    return [ready(name, rank) for name in attempts for rank in range(2)]


def test_a_superseded_workers_beat_does_not_hide_that_the_newest_one_hangs(clock: Clock) -> None:
    nodes = Nodes()
    monitor = following(*workers_of("a", "b"), nodes=nodes)
    clock.now += 110
    monitor.take(Beat("b", 0, 3, 110.0, "stack", "the other workers' gradients"))
    monitor.take(Beat("b", 1, 3, 110.0, "stack"))
    monitor.take(Beat("a", 1, 9, 0.0, ""))
    monitor.tick()
    assert nodes.killed == [1]


def test_a_superseded_worker_that_starts_to_step_is_not_watched(clock: Clock) -> None:
    nodes = Nodes()
    monitor = following(*workers_of("a", "b"), Started("a", 1, 0), nodes=nodes)
    clock.now += 1000
    monitor.tick()
    assert nodes.killed == []
    monitor.take(Started("b", 1, 0))
    clock.now += 1000
    monitor.tick()
    assert nodes.killed == [1]


@pytest.mark.parametrize("reports", ["before", "with the loss", "never"])
def test_an_interruption_names_the_step_of_its_own_attempt_whatever_ran_before(reports: str) -> None:
    """Steps run again from a checkpoint, and a worker is lost in one of them; its last reports may be too."""
    lost = Interrupted(IncidentKind.WORKER, "killed", (1,), Level.CHECKPOINT, step=4 if reports == "never" else 0)
    job = {"task": "train", "loss": "a:d", "optimizer": "a:e"}
    monitor = monitor_of(*workers_of("a"), Started("a", 0, 0), job=job, split=Split(200, 10, 2))
    for message in [*reported("a", 0, 9), *reported("a", 1, 9)]:
        monitor.take(message)
    monitor.tick()
    monitor.take(lost)
    for message in [*workers_of("b"), Started("b", 0, 2)]:
        monitor.take(message)
    if reports != "never":
        for message in [*reported("b", 0, 4), *reported("b", 1, 4)]:
            monitor.take(message)
        if reports == "before":
            monitor.tick()
    monitor.take(lost)
    for message in [*workers_of("c"), Started("c", 0, 2)]:
        monitor.take(message)
    log = monitor.incidents.log.interruptions
    assert [(each.step, each.resumed_step) for each in log] == [(9, 2), (4, 2)]
    assert monitor.progress.step == 9
    assert log[1].resumption.endswith("2 steps again")


def test_a_worker_lost_with_its_node_is_told_as_the_nodes_end() -> None:
    monitor = following(*workers_of("a"), nodes=Nodes("node 1"))
    for rank in range(2):
        monitor.take(Interrupted(IncidentKind.WORKER, "its process was killed, or crashed", (rank,)))
    told = [
        (interruption.kind, interruption.ranks, interruption.nodes)
        for interruption in monitor.incidents.log.interruptions
    ]
    assert told == [("worker", (0,), ("10.0.0.0",)), ("node", (1,), ("10.0.0.1",))]


def test_an_error_is_forgotten_when_the_workers_are_replaced() -> None:
    assert following(*workers_of("a"), FAILED).failed == FAILED
    assert following(*workers_of("a"), FAILED, Interrupted(IncidentKind.ERROR, "sample 7", (1,))).failed is None
    assert following(*workers_of("a"), FAILED, *workers_of("b")).failed is None


def test_the_workers_of_an_attempt_stand_in_the_order_of_their_ranks() -> None:
    found = attempts_of()
    assert found.take(ready("a", 1)) == ()
    assert [worker.world.rank for worker in found.take(ready("a", 0))] == [0, 1]
    assert [worker.world.rank for worker in found.workers((1, 5))] == [1]


def test_reports_that_come_before_their_attempt_begins_are_given_once() -> None:
    found = attempts_of()
    early = [Report(World(0, 2), 0, attempt=name) for name in ("b", "a", "b")]
    for report in early:
        found.hold_early(report)
    for worker in (ready("a", 0), ready("a", 1), ready("b", 0)):
        found.take(worker)
    assert found.take_early() == [early[1]]
    found.take(ready("b", 1))
    assert (found.take_early(), found.take_early()) == ([early[0], early[2]], [])
    assert [found.is_current("a"), found.is_current("b")] == [False, True]
