"""What interrupted a run: kept beside it while it runs, so that a driver that takes over knows of it too."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dp_ray.errors import StorageError
from dp_ray.storage import Storage

INCIDENTS = "story.json"


@dataclass(frozen=True)
class Interruption:
    """One time that the workers were replaced.

    `kind` is worker (a process was lost), node, network, hang, error (of the user's code, which may pass),
    preemption, resize or driver; `ranks` and `nodes` those that were lost. `step` was being run, or was next when a
    driver ended; the next attempt went on from `resumed_step`, `seconds` after the last step was done (None: there
    was none, or nobody knows).
    """

    kind: str
    what: str
    step: int
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    resumed_step: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        where = f" (rank {', '.join(map(str, self.ranks))} on {', '.join(self.nodes)})" if self.ranks else ""
        when = "" if self.kind == "driver" else f", in step {self.step}"  # that of a driver's end stands in `what`
        return f"{self.kind}: {self.what}{where}{when}"

    @property
    def resumption(self) -> str:
        """How it went on."""
        if self.resumed_step is None:
            return "not resumed"
        again = f", {self.step - self.resumed_step} steps again" if self.step > self.resumed_step else ""
        after = "" if self.seconds is None else f" after {self.seconds:.1f} s"
        return f"resumed from step {self.resumed_step}{after}{again}"


@dataclass(frozen=True)
class IncidentLog:
    """The workers of each attempt so far, in order, and what lay between them."""

    world_sizes: tuple[int, ...] = ()
    interruptions: tuple[Interruption, ...] = field(default=())

    def begun(self, world_size: int) -> "IncidentLog":
        return replace(self, world_sizes=(*self.world_sizes, world_size))

    def interrupted(self, by: Interruption) -> "IncidentLog":
        return replace(self, interruptions=(*self.interruptions, by))

    def resumed(self, step: int, seconds: float | None) -> "IncidentLog":
        """The last interruption is over."""
        *before, last = self.interruptions
        # What was kept may be further than what was heard of.
        over = replace(last, step=max(last.step, step), resumed_step=step, seconds=seconds)
        return replace(self, interruptions=(*before, over))

    @property
    def driver_end(self) -> Interruption | None:
        """How the last driver ended, if that is told and nothing was done since."""
        return self.interruptions[-1] if self.is_interrupted and self.interruptions[-1].kind == "driver" else None

    @property
    def is_interrupted(self) -> bool:
        return bool(self.interruptions) and self.interruptions[-1].resumed_step is None

    def to_json(self) -> dict[str, Any]:
        told = [{**asdict(one), "ranks": list(one.ranks), "nodes": list(one.nodes)} for one in self.interruptions]
        return {"world_sizes": list(self.world_sizes), "interruptions": told}

    def save(self, run: Storage) -> None:
        run.write_text(INCIDENTS, json.dumps(self.to_json(), indent=2) + "\n")


def read_incidents(run: Storage, name: str = INCIDENTS) -> IncidentLog:
    """What earlier drivers of the run told, in its log or in its result.

    It is none where the file is not there or is damaged: it is for reading only.
    """
    try:
        if not run.exists(name):
            return IncidentLog()
        values = json.loads(run.read_text(name))
        told = [
            Interruption(**{**one, "ranks": tuple(one["ranks"]), "nodes": tuple(one["nodes"])})
            for one in values["interruptions"]
        ]
        return IncidentLog(tuple(map(int, values["world_sizes"])), tuple(told))
    except (StorageError, ValueError, KeyError, TypeError):
        return IncidentLog()
