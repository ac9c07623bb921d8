"""The interruptions of a run, kept in its directory while it runs, so that the next driver knows them too."""

import re
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from dp_ray.records import IGNORE, Record
from dp_ray.text import counted

INCIDENTS = "story.json"


class Level(StrEnum):
    """What an interruption has cost: the first of these that was possible."""

    MEMORY = "memory"  # the survivors have gone on with what they held
    CHECKPOINT = "checkpoint"  # the survivors' processes have gone on, from the newest checkpoint
    RESTART = "restart"  # all workers were started again, from the newest checkpoint


class IncidentKind(StrEnum):
    """The kinds of events that end an attempt before the job is done."""

    WORKER = "worker"  # a worker's process was lost
    NODE = "node"
    NETWORK = "network"  # workers lost a connection, and all of them live
    HANG = "hang"
    ERROR = "error"  # of user code, perhaps transient
    PREEMPTION = "preemption"
    RESIZE = "resize"
    DRIVER = "driver"


@dataclass(frozen=True)
class Interruption:
    """The end of an attempt before the job was done.

    `ranks` and `nodes` are those that were lost. `step` is the step that was running;
    for a driver's end, the step that was next. The next attempt resumed from `resumed_step`, None if there was none.
    `seconds` is the time from the last finished step to the resumption, None if unknown. `level` says who went on,
    and `why` why not by the level before it; "" if it is the first one, or if the job has all restart.
    """

    kind: IncidentKind
    what: str
    step: int
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    resumed_step: int | None = None
    seconds: float | None = None
    level: Level = Level.RESTART
    why: str = ""

    def __str__(self) -> str:
        on = f" on {', '.join(self.nodes)}" if self.nodes else ""  # unknown of one that was lost as it began
        where = f" (rank {', '.join(map(str, self.ranks))}{on})" if self.ranks else ""
        # For a driver's end `what` names the step that was next; most errors of user code, and hangs, name theirs.
        is_named = self.kind is IncidentKind.DRIVER or re.search(rf"\bstep {self.step}\b", self.what)
        when = "" if is_named else f", in step {self.step}"
        return f"{self.kind}: {self.what}{where}{when}"

    def to_json(self) -> dict[str, Any]:
        """Return the interruption as JSON values, of which an IncidentLog is read again."""
        values = {**asdict(self), "level": self.level.value}
        if self.level is Level.RESTART:
            del values["level"]  # earlier versions do not know it
        if not self.why:
            del values["why"]
        return {**values, "kind": self.kind.value, "ranks": list(self.ranks), "nodes": list(self.nodes)}

    @property
    def survives(self) -> bool:
        """Whether survivors go on in their processes."""
        return self.level is not Level.RESTART

    @property
    def resumption(self) -> str:
        """How the run was resumed, for people: from which step, after how long, how many steps are repeated."""
        if self.resumed_step is None:
            return "not resumed"
        again = f", {counted(self.step - self.resumed_step, 'step')} again" if self.step > self.resumed_step else ""
        after = "" if self.seconds is None else f" after {self.seconds:.1f} s"
        if self.level is Level.MEMORY:
            return f"the others go on from step {self.resumed_step}{after}, from memory{again}"
        if self.level is Level.CHECKPOINT:
            why = f" ({self.why})" if self.why else ""
            return f"the others go on from step {self.resumed_step}{after}, from the newest checkpoint{why}{again}"
        why = f" ({self.why})" if self.why else ""
        return f"resumed from step {self.resumed_step}{after}{why}{again}"


@dataclass(frozen=True)
class IncidentLog:
    """The number of workers of each attempt so far, in order, and the interruptions between them."""

    world_sizes: tuple[int, ...] = ()
    interruptions: tuple[Interruption, ...] = ()

    def begun(self, world_size: int) -> "IncidentLog":
        """Return the log after an attempt with this many workers has begun."""
        return replace(self, world_sizes=(*self.world_sizes, world_size))

    def interrupted(self, by: Interruption) -> "IncidentLog":
        """Return the log after an interruption."""
        return replace(self, interruptions=(*self.interruptions, by))

    def resumed(self, step: int, seconds: float | None, why: str = "") -> "IncidentLog":
        """Return the log after the run has resumed from `step`, `seconds` after the last finished step.

        If survivors read a checkpoint, `why` says why. Those of several losses go on together, or all start again.
        """
        first, last = len(self.interruptions) - 1, self.interruptions[-1]
        while first and (before := self.interruptions[first - 1]).resumed_step is None and before.survives:
            first -= 1
        over = []
        for earlier in self.interruptions[first:]:
            level = Level.CHECKPOINT if why and last.survives else last.level
            # More steps may be kept than the workers had reported.
            most = max(earlier.step, step)
            told = why if last.survives else last.why
            over.append(replace(earlier, step=most, resumed_step=step, seconds=seconds, level=level, why=told))
        return replace(self, interruptions=(*self.interruptions[:first], *over))

    @property
    def driver_end(self) -> Interruption | None:
        """How the last driver ended, if the log has it and the run has not resumed since."""
        last = self.interruptions[-1] if self.is_interrupted else None
        return last if last is not None and last.kind is IncidentKind.DRIVER else None

    @property
    def is_interrupted(self) -> bool:
        """Whether the run has not resumed since its last interruption."""
        return bool(self.interruptions) and self.interruptions[-1].resumed_step is None


# A result holds the same two keys, so it can be read as a log too.
INCIDENTS_JSON = Record[IncidentLog](
    IncidentLog, INCIDENTS, missing=IncidentLog(), damaged=IGNORE, unreachable=IGNORE, indent=2
)
