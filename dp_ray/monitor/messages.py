"""What workers tell the driver while they run."""

from dataclasses import dataclass
from typing import Any

from dp_ray.replica.world import World
from dp_ray.results.shape_recorder import Report

BEAT_SECONDS = 0.5


def beat_interval(world_size: int) -> float:
    """Seconds between two beats of a worker: thousands of them share one driver."""
    return max(BEAT_SECONDS, world_size / 1000)


@dataclass(frozen=True)
class WorkerReady:
    """A worker of the attempt has its place and is about to start."""

    attempt: str
    world: World
    pid: int
    gpu_ids: tuple[str, ...]
    node_id: str = ""


@dataclass(frozen=True)
class Shapes:
    attempt: str
    report: Report


@dataclass(frozen=True)
class Told:
    """What a task tells beside shapes: a Note, rows of the history, what was measured."""

    attempt: str
    what: Any


@dataclass(frozen=True)
class Printed:
    """Lines that user code printed."""

    world: World
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """A worker raised: the name of the error's class in dp_ray.errors (or none), its text and its traceback.

    `frames` are those of the user's code alone, which show where a mistake of the user's was made.
    """

    attempt: str
    world: World
    kind: str
    text: str
    traceback: str
    frames: str = ""


@dataclass(frozen=True)
class Starting:
    """What goes on before there is a step: workers are started, or import torch."""

    what: str


@dataclass(frozen=True)
class Started:
    """A worker is about to run its first step."""

    attempt: str
    rank: int
    step: int


@dataclass(frozen=True)
class Beat:
    """A worker is alive, and has been in `step` for `seconds`; `stack` is where, once that is too long.

    `step` is None before its first step and after its last; `waits_for` says what of other workers it waits for.
    """

    attempt: str
    rank: int
    step: int | None
    seconds: float
    stack: str
    waits_for: str = ""


@dataclass(frozen=True)
class FaultInjected:
    """A fault that the user asked for is being brought about; the driver's own it has to do itself."""

    attempt: str
    world: World
    what: str
    is_the_drivers: bool


@dataclass(frozen=True)
class Interrupted:
    """The workers of an attempt are being replaced, as Ray Train's controller tells; `ranks` were lost.

    `kind` is worker, network, error, preemption or resize.
    """

    kind: str
    what: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Waits:
    """No workers run, since there is no room for them."""

    what: str


class WorkerExit(Exception):
    """How a worker's loop ended, in plain words: all that Ray Train's controller needs to know of an error.

    `kind` is yielded, lost peer, raised (it may pass) or mistaken (it never will).
    """

    def __init__(self, kind: str, text: str, has_progressed: bool) -> None:
        super().__init__(kind, text, has_progressed)
        self.kind = kind
        self.text = text
        self.has_progressed = has_progressed

    def __str__(self) -> str:
        return self.text


Message = (
    WorkerReady | Shapes | Told | Printed | Failed | Starting | Started | Beat | FaultInjected | Interrupted | Waits
)


def message_of(attempt: str, what: Any) -> Message:
    """What a task sends, with the attempt that it is of."""
    return Shapes(attempt, what) if isinstance(what, Report) else Told(attempt, what)
