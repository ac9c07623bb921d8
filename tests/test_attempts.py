"""The driver follows the newest attempt alone: what workers of a superseded one still send changes nothing."""

import time

import pytest

from dp_ray.engine.world import World
from dp_ray.errors import DataError
from dp_ray.monitor.attempts import NodeControl
from dp_ray.monitor.messages import Beat, Failed, Interrupted, Message, Shapes, Started, WorkerReady
from dp_ray.monitor.monitor import Monitor
from dp_ray.rundir.incidents import IncidentKind
from dp_ray.steps.shapes import Report
from tests.support.builders import attempts_of, monitor_of

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by the test."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def ready(attempt: str, rank: int) -> WorkerReady:
    return WorkerReady(attempt, World(rank, 2, node=f"10.0.0.{rank}"), 1, (), node_id=f"node {rank}")


def following(*messages: Message, nodes: Nodes | None = None) -> Monitor:
    """A monitor of two workers that has taken in the messages."""
    return monitor_of(*messages, job={"timeouts": {"step": LIMIT}}, quiet=True, nodes=nodes or Nodes())


def attempts(*names: str) -> list[Message]:
    return [ready(name, rank) for name in names for rank in range(2)]


def test_a_superseded_workers_beat_does_not_hide_that_the_newest_one_hangs(clock: list[float]) -> None:
    nodes = Nodes()
    monitor = following(*attempts("a", "b"), nodes=nodes)
    clock[0] += 110
    monitor.take(Beat("b", 0, 3, 110.0, "stack", "the other workers' gradients"))
    monitor.take(Beat("b", 1, 3, 110.0, "stack"))
    monitor.take(Beat("a", 1, 9, 0.0, ""))
    monitor.tick()
    assert nodes.killed == [1]


def test_a_superseded_worker_that_starts_to_step_is_not_watched(clock: list[float]) -> None:
    nodes = Nodes()
    monitor = following(*attempts("a", "b"), Started("a", 1, 0), nodes=nodes)
    clock[0] += 1000
    monitor.tick()
    assert nodes.killed == []
    monitor.take(Started("b", 1, 0))
    clock[0] += 1000
    monitor.tick()
    assert nodes.killed == [1]


def test_a_worker_lost_with_its_node_is_told_as_the_nodes_end() -> None:
    monitor = following(*attempts("a"), nodes=Nodes("node 1"))
    for rank in range(2):
        monitor.take(Interrupted(IncidentKind.WORKER, "its process was killed, or crashed", (rank,)))
    told = [(one.kind, one.ranks, one.nodes) for one in monitor.incidents.log.interruptions]
    assert told == [("worker", (0,), ("10.0.0.0",)), ("node", (1,), ("10.0.0.1",))]


def test_an_error_is_forgotten_when_the_workers_are_replaced() -> None:
    assert following(*attempts("a"), FAILED).failed == FAILED
    assert following(*attempts("a"), FAILED, Interrupted(IncidentKind.ERROR, "sample 7", (1,))).failed is None
    assert following(*attempts("a"), FAILED, *attempts("b")).failed is None


def test_the_workers_of_an_attempt_stand_in_the_order_of_their_ranks() -> None:
    found = attempts_of()
    assert found.take(ready("a", 1)) == ()
    assert [one.world.rank for one in found.take(ready("a", 0))] == [0, 1]
    assert [one.world.rank for one in found.workers((1, 5))] == [1]


def test_reports_that_come_before_their_attempt_begins_are_given_once() -> None:
    found = attempts_of()
    early = [Shapes(name, Report(World(0, 2), 0, {}, [])) for name in ("b", "a", "b")]
    for one in early:
        found.hold_early(one)
    for worker in (ready("a", 0), ready("a", 1), ready("b", 0)):
        found.take(worker)
    assert found.take_early() == [early[1]]
    found.take(ready("b", 1))
    assert (found.take_early(), found.take_early()) == ([early[0], early[2]], [])
    assert [found.is_current("a"), found.is_current("b")] == [False, True]
