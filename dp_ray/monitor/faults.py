"""The faults of `--inject`: their syntax, and which worker each one hits."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dp_ray.engine.world import World
from dp_ray.errors import JobError

if TYPE_CHECKING:  # a worker that serves modules needs no job
    from dp_ray.job.job import Job

_FAULT = re.compile(
    r"(?P<action>kill|pause|drain) (?P<what>worker|node|driver)(?: (?P<which>[\w.:]+?))?"
    r"(?: for (?P<seconds>\d+(?:\.\d+)?) ?s)? at step (?P<step>\d+)(?: in (?P<part>\w+))?"
)
_SLOW = re.compile(r"slow worker (?P<which>\d+) by (?P<number>\d+(?:\.\d+)?) ?(?P<unit>ms|s) from step (?P<step>\d+)")
PARTS = ("forward", "exchange", "update", "checkpoint", "evaluation")  # of a step, by their names in engine/clock.py
_ALLOWED = {("kill", "worker"), ("kill", "node"), ("kill", "driver"), ("pause", "worker"), ("drain", "node")}
_SAYS = (
    "must be faults with ';' between them: 'kill worker 1 at step 20', 'kill node 2 at step 40' (or its address), "
    f"'kill worker 1 at step 20 in exchange' (or {', '.join(part for part in PARTS if part != 'exchange')}), "
    "'kill driver at step 50', 'pause worker 0 for 30s at step 60', 'drain node 1 for 30s at step 70', "
    "'slow worker 1 by 50ms from step 10'"
)


@dataclass(frozen=True)
class Fault:
    """A fault to inject once, before its worker's first step at or after `step`; a slow worker stays slow.

    With a `part` it comes as the first such part begins, in that step or a later one.
    `which` is a worker's rank, or a node's rank or address. `seconds` is how long a pause lasts (None: for ever), how
    long a drained node has left, or by how much each step of a slow worker is slower.
    """

    number: int
    action: str
    what: str
    which: str
    seconds: float | None
    step: int
    part: str = ""

    def __str__(self) -> str:
        if self.action == "slow":
            return f"slow worker {self.which} by {(self.seconds or 0) * 1000:g}ms from step {self.step}"
        which = "" if self.what == "driver" else f" {self.which}"
        lasting = "" if self.seconds is None else f" for {self.seconds:g}s"
        part = f" in {self.part}" if self.part else ""
        return f"{self.action} {self.what}{which}{lasting} at step {self.step}{part}"

    def is_due(self, world: World, step: int) -> bool:
        """Return whether this worker has to inject the fault before `step`."""
        if step < self.step:
            return False
        if self.what == "worker":
            return str(world.rank) == self.which
        if self.what == "node":
            return world.local_rank == 0 and self.which in (str(world.node_rank), world.node)
        return world.rank == 0


Faults = tuple[Fault, ...]


def faults_for(job: "Job", text: str) -> Faults:
    """Parse the faults of `--inject`; also raises JobError if the job has no worker that one could hit."""
    faults = parse_faults(text)
    if faults and job.max_workers == 0:
        raise JobError("--inject: workers is 0, so the job runs in the driver's process; set workers to at least 1")
    for fault in faults:
        if fault.part and (why := _why_never(job, fault)):
            raise JobError(f"--inject '{fault}': {why}")
    return faults


def _why_never(job: "Job", fault: Fault) -> str:
    """Return why the part never comes for the worker of a fault; "" if it may come."""
    if fault.part != "forward" and job.task != "train":
        return f"a step of task {job.task} has no {fault.part}"
    if fault.part == "evaluation" and job.eval is None:
        return "the job has no eval"
    if fault.part == "exchange" and job.max_workers == 1:
        return "a single worker exchanges nothing"
    if fault.part == "checkpoint" and job.strategy == "ddp" and fault.which != "0":
        return "only worker 0 writes checkpoints"
    return ""


def parse_faults(text: str) -> Faults:
    """Parse the faults of `--inject`; raises JobError, which lists the valid forms."""
    return tuple(_parse(number, part.strip()) for number, part in enumerate(text.split(";")) if part.strip())


def _parse(number: int, text: str) -> Fault:
    if slow := _SLOW.fullmatch(text):
        seconds = float(slow["number"]) / (1000 if slow["unit"] == "ms" else 1)
        return Fault(number, "slow", "worker", slow["which"], seconds, int(slow["step"]))
    match = _FAULT.fullmatch(text)
    if not match or (match["action"], match["what"]) not in _ALLOWED:
        raise JobError(f"--inject {text!r}: {_SAYS}")
    is_named = bool(match["which"]) and (match["what"] == "node" or match["which"].isdecimal())
    if is_named == (match["what"] == "driver"):
        raise JobError(f"--inject {text!r}: which {match['what']}? {_SAYS}")
    if match["seconds"] and match["action"] == "kill":
        raise JobError(f"--inject {text!r}: only a pause or a drain takes 'for ...'; {_SAYS}")
    part = match["part"] or ""
    if part and (part not in PARTS or match["what"] != "worker"):
        raise JobError(f"--inject {text!r}: a worker's fault may be in {', '.join(PARTS)}; {_SAYS}")
    lasting = float(match["seconds"]) if match["seconds"] else None
    return Fault(number, match["action"], match["what"], match["which"] or "", lasting, int(match["step"]), part)
