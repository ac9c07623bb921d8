"""The messages to the driver: of workers, their tasks and Ray Train's controller, all in the union `Message`.

`monitor.Monitor.take` dispatches on them. What the driver asks of a worker's loop between two steps, in return, is
`StepControl`. The reasons why a loop ends are here too, for the controller and the driver. It imports neither torch
nor numpy, so that the controller's process need not wait for them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from dp_ray.errors import ClusterError, DataError, Error, JobError, ModelError, StorageError, WorkerError
from dp_ray.rundir.incidents import IncidentKind, Level
from dp_ray.rundir.numerics import Kind
from dp_ray.text import counted

if TYPE_CHECKING:
    from queue import SimpleQueue

    import numpy as np
    import pyarrow as pa

    from dp_ray.engine.clock import DevicePlace, Flops, StepClock
    from dp_ray.engine.world import World

BEAT_SECONDS = 0.5


def beat_interval(world_size: int) -> float:
    """Return the seconds between two beats of a worker; they grow with the workers, who share one driver."""
    return max(BEAT_SECONDS, world_size / 1000)


HERE = "here"  # the attempt of a run without workers


@dataclass(frozen=True)
class WorkerReady:
    """A worker has its rank, node and device, and is about to start the task.

    One that serves parallel modules is the process of this `name`, in the view of this number: its `handle` takes
    calls. What `computes` there says which workers give the same bits.
    """

    attempt: str
    world: "World"
    pid: int
    gpu_ids: tuple[str, ...]
    node_id: str = ""
    name: str = ""
    view: int = 0
    computes: Mapping[str, str] = field(default_factory=dict)
    handle: Any = None


class WorkerPlace(NamedTuple):
    """Where a worker of parallel modules runs."""

    node: str  # its address
    node_id: str
    pid: int
    device: str
    computes: Mapping[str, str]  # by which workers give the same bits, or not


class MayLeave(NamedTuple):
    """Those who serve in the view of this attempt are to leave it between two calls: others come, or nodes go."""

    attempt: str


@dataclass(frozen=True)
class Computes:
    """What the workers of an attempt compute on, from rank 0."""

    attempt: str
    kinds: list[Kind]


STATES = ("scheduled", "started", "over")  # of a collective, in order; gloo records no start


class Collective(NamedTuple):
    """The oldest collective of a process group that is not over on a rank; if all are over, the newest.

    `number` counts the group's collectives, which all of its ranks run in the same order.
    """

    group: str  # the backend, and the group's name and description
    number: int
    name: str
    sizes: str  # of what goes in
    state: str  # of STATES

    @property
    def at(self) -> tuple[int, int]:
        """How far the group has come on the rank; larger is further."""
        return self.number, STATES.index(self.state)

    def __str__(self) -> str:
        return f"{self.name} {self.number} of {self.sizes}, {self.state}"


class Sizes(NamedTuple):
    """The sizes of a forward's inputs and outputs as JSON text, and the number of rows of the inputs."""

    input_size: str
    output_size: str
    rows: int


class TimedSteps(NamedTuple):
    """Steps of one worker, int64 [n]; the rows that it ran, int32 [n]; the seconds of PARTS, float32 [n, parts]."""

    steps: "np.ndarray[Any, np.dtype[np.int64]]"
    rows: "np.ndarray[Any, np.dtype[np.int32]]"
    seconds: "np.ndarray[Any, np.dtype[np.float32]]"


class Report(NamedTuple):
    """One worker's message: the last step done, and what was measured since the last message.

    `shapes` has a row for each shard, as `shapes.parquet`.
    """

    world: "World"
    through: int
    shapes: "pa.Table | None" = None
    times: TimedSteps | None = None
    attempt: str = ""


class Keep(NamedTuple):
    """A request to the driver to write the reports of steps that are about to be committed."""


class Note(NamedTuple):
    """A line for the user."""

    text: str


class Logged(NamedTuple):
    """New rows of the history, sent to the driver; a later row of a step replaces an earlier one."""

    rows: tuple[dict[str, Any], ...]


class Measured(NamedTuple):
    """The metrics of an evaluation, over the whole dataset."""

    metrics: dict[str, float]


class WorkerTimes(NamedTuple):
    """The time of a worker's loop, in seconds by what it went into; sent at the loop's end."""

    rank: int
    seconds: dict[str, float]


class FlopsCounted(NamedTuple):
    """The floating-point operations of a row, from rank 0 of a job that asks for them."""

    flops: "Flops"


class ShardsFound(NamedTuple):
    """The number of shards that `shards: auto` has found: the first that fits on all workers; sent by rank 0."""

    shards: int


class StoppedEarly(NamedTuple):
    """The training has ended before its last step: `column` did not improve on `best` in `times` measurements.

    Or `best`, the last one, is `below` what was asked for; or its loop has stopped it, for its own `reason`.
    `step` steps are done. `best` is None if the column was never a number.
    """

    step: int
    column: str
    mode: str
    min_delta: float
    best: float | None
    times: int
    reason: str = ""
    below: float | None = None

    @property
    def text(self) -> str:
        """The reason, in a line."""
        if self.reason:
            return f"stopped early after {counted(self.step, 'step')}: {self.reason}"
        if self.below is not None:
            done = counted(self.step, "step")
            return f"stopped early after {done}: {self.column} is {self.best:.6g}, below {self.below:.6g}"
        each = {"epoch_loss": "epoch", "loss": "step"}.get(self.column, "evaluation")
        did = "was never a number" if self.best is None else f"did not improve on {self.best:.6g}"
        return f"stopped early after {counted(self.step, 'step')}: {self.column} {did} in {counted(self.times, each)}"

    def to_json(self) -> dict[str, Any]:
        """Return the values for `result.json`."""
        best = self.best if self.best is not None and math.isfinite(self.best) else None
        values = self._replace(best=best)._asdict()
        for name in ("reason", "below"):
            if values[name] in ("", None):
                del values[name]  # earlier versions do not know it
        return {"step": values.pop("step"), "metric": values.pop("column"), **values, "text": self.text}


@dataclass(frozen=True)
class Printed:
    """Lines that user code printed."""

    world: "World"
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """A worker raised an error; `kind` is the class of dp_ray.errors that it is of, None for any other error.

    `traceback` has all frames. `frames` has only those of user code, which show the user where the mistake is.
    """

    attempt: str
    world: "World"
    kind: type[Error] | None
    text: str
    traceback: str
    frames: str = ""

    @property
    def is_lost_peer(self) -> bool:
        """Whether the worker only lost another one, so that the cause is elsewhere."""
        return self.kind is WorkerError


@dataclass(frozen=True)
class Starting:
    """The phase before the first step: workers are started, or import torch."""

    what: str


@dataclass(frozen=True)
class Started:
    """A worker is about to run its first step.

    `reads` says why it goes on from the newest checkpoint, and not from memory; "" if it does that.
    """

    attempt: str
    rank: int
    step: int
    reads: str = ""


@dataclass(frozen=True)
class Beat:
    """A worker is alive, and has been in `step` for `seconds`; `stack` is its loop's stack, once that is too long.

    `step` is None before its first step and after its last. `waits_for` names the collective in which it waits for
    other workers, if any. Once the step is too long, `device` says how far its GPU has come, if it has one, and
    `collectives` has the last of each process group. `call` is the last one that a loop of the user's began, with its
    number: all workers make the same.
    """

    attempt: str
    rank: int
    step: int | None
    seconds: float
    stack: str
    waits_for: str = ""
    device: "DevicePlace | None" = None
    collectives: tuple[Collective, ...] = ()
    call: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class FaultInjected:
    """A fault of `--inject` is about to happen; a fault of the driver is left to the driver itself."""

    attempt: str
    world: "World"
    what: str
    is_the_drivers: bool


@dataclass(frozen=True)
class Interrupted:
    """The workers of an attempt are being replaced, as Ray Train's controller reports; `ranks` were lost.

    The driver turns `kind` WORKER into NODE or HANG where it finds so. By `level` only the lost ones are replaced;
    `why` says why it is not the level before. `step` is one that some worker had begun: those that
    were lost may not have reported it.
    """

    kind: IncidentKind
    what: str
    ranks: tuple[int, ...]
    level: Level = Level.RESTART
    why: str = ""
    step: int = 0


@dataclass(frozen=True)
class Waits:
    """No workers run, because the cluster has no room for them."""

    what: str


@dataclass(frozen=True)
class Finished:
    """A worker has left the job with all its work kept, at the job's end or, if `is_stopped`, as it was asked.

    `remains` names what the job left behind in the worker's process and what cannot be undone there. `imported` are
    the source files of user code that rank 0 has imported.
    """

    attempt: str
    rank: int
    is_stopped: bool = False
    remains: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()


@dataclass(frozen=True)
class GaveUp:
    """Ray Train's controller gives the job up: these workers died, by rank, with the cause in a line."""

    died: Mapping[int, str]


class Ending(StrEnum):
    """How a worker's loop can end before its work is done."""

    STOPPED = "stopped"  # it stopped because it was asked to
    LOST_PEER = "lost peer"
    OUT_OF_MEMORY = "out of memory"  # or the GPU is busy: that passes once the processes that hold it end
    BROKEN_GPU = "broken GPU"
    RAISED = "raised"  # an error that may be transient
    OTHER_KIND = "other kind"  # workers came that would compute differently from those before
    MISTAKEN = "mistaken"  # an error that every attempt would raise


class WorkerExit(Exception):
    """How a worker's loop ended, in plain values: all that Ray Train's controller needs to know of an error."""

    def __init__(self, kind: Ending, text: str, has_progressed: bool) -> None:
        super().__init__(kind, text, has_progressed)
        self.kind = kind
        self.text = text
        self.has_progressed = has_progressed

    def __str__(self) -> str:
        return self.text

    @property
    def first_line(self) -> str:
        """The first line of the text, or the class's name if the text is empty."""
        return next(iter(self.text.strip().splitlines()), type(self).__name__)


Message = (
    WorkerReady
    | MayLeave
    | Computes
    | Report
    | Keep
    | Note
    | Logged
    | Measured
    | WorkerTimes
    | FlopsCounted
    | ShardsFound
    | StoppedEarly
    | Printed
    | Failed
    | Starting
    | Started
    | Beat
    | FaultInjected
    | Interrupted
    | Waits
    | Finished
    | GaveUp
)

Send = Callable[[Message], None]

KINDS = (JobError, ClusterError, DataError, ModelError, StorageError, WorkerError, Error)


def kind_of(error: BaseException) -> type[Error] | None:
    """Return the class of dp_ray.errors that an error is of, also by a class derived from it; None if of none."""
    return next((kind for kind in KINDS if isinstance(error, kind)), None)


def error_of(failed: Failed, is_verbose: bool = False) -> Error:
    """Return the error that a worker reported, with its rank, node and traceback.

    An error of `dp_ray.errors` shows only the frames of user code, unless verbose; any other error shows all frames.
    """
    error = (failed.kind or Error)(f"{failed.world}: {failed.text}")
    if note := failed.traceback if is_verbose or failed.kind is None else failed.frames:
        error.add_note(note)
    return error


class StopRequested(Error):
    """The worker stopped between two steps on request, and kept all its work; this is no failure."""


class StepControl:
    """The interface of a worker's loop between two steps; this base class requests nothing of the worker.

    `wants_stop` asks the worker to stop once all workers agree, or after its current step if it is the only one; if
    `is_to_rejoin`, only to go on with what it holds, among more or fewer workers.
    `take_save` asks, once, to keep the work so far now. `slows` says whether `take_delay` may ask to sleep.
    `attempt` names the workers that were started together for a job, for the driver. `node_id` is the cluster's name
    of the worker's node. `kind` is what the workers of the job's last attempt computed on, empty if it is the first.
    """

    attempt = ""
    node_id = ""
    kind = ""
    wants_stop = False
    is_to_rejoin = False
    slows = False

    def settle(self, kind: str) -> None:
        """Note what all workers of a bitwise job compute on, which later ones have to compute on too."""

    def runs_on(self, clock: "StepClock") -> None:
        """Note the clock of the worker's steps: it knows how far its GPU has come."""

    def before(self, step: int) -> None:
        """Note that the worker is about to run `step`."""

    def touch(self) -> None:
        """Note that the worker is still at work in its step, on an evaluation for instance."""

    def reads(self, why: str) -> None:
        """Note why the worker begins with the newest checkpoint, even if it was in another group before."""

    def through(self) -> None:
        """Note that the worker has run its last step; its remaining writes have no time limit."""

    def take_save(self) -> bool:
        """Return whether to keep the work so far now; true once for each request."""
        return False

    def take_delay(self, rank: int) -> float:
        """Return by how many seconds to slow down the current step; 0 from the second call in a step on."""
        return 0.0

    def leave(self) -> None:
        """Wait until all workers have kept their work, as this one has; then raise StopRequested."""
        raise StopRequested("stopped as it was asked")

    def take_calls(self) -> "Iterator[tuple[Any, SimpleQueue[tuple[Any, Exception | None]]]]":
        """Yield each call with what takes the answer, or an error, until the worker leaves."""
        yield from ()
