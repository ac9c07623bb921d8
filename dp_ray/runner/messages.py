"""What workers tell the driver while they run."""

from dataclasses import dataclass
from typing import Any

from dp_ray.replica.world import World
from dp_ray.results.recorder import Report


@dataclass(frozen=True)
class Hello:
    """A worker of the attempt has its place and is about to start."""

    attempt: str
    world: World
    pid: int
    gpu_ids: tuple[str, ...]


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
    """A worker raised: the name of the error's class in dp_ray.errors (or none), its text and its traceback."""

    attempt: str
    world: World
    kind: str
    text: str
    traceback: str


Message = Hello | Shapes | Told | Printed | Failed


def message_of(attempt: str, what: Any) -> Message:
    """What a task sends, with the attempt that it is of."""
    return Shapes(attempt, what) if isinstance(what, Report) else Told(attempt, what)
