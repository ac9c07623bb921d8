"""A job on a worker: begin at `run_job`, which the loop of `cluster/loop.py` calls.

Around the job's task stand the process group of a view, a heartbeat (`heartbeat.py`), and a stream that sends to the
driver what user code prints (`prints.py`). After the loss of another worker a process goes on in the next view, with
what it holds of the job; if it holds nothing, it ends. Parallel modules are served so too: a call is a step of the
task `tasks/serve.py`.
"""

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
import torch

from dp_ray.cluster.channel import GROUP, OUT, SERVE, Ask, Terms, WorkerConfig, send
from dp_ray.cluster.group import SOON, leave_view, next_view, place_of_worker, process_group, report, with_devices
from dp_ray.cluster.heartbeat import Heartbeat
from dp_ray.cluster.prints import Lines, forwarded_prints
from dp_ray.engine.user_code import is_out_of_memory
from dp_ray.engine.world import Trouble, World, trouble_of, without_frames
from dp_ray.errors import JobError, StorageError, WorkerError
from dp_ray.messages import Ending, Finished, Logged, StopRequested, WorkerExit, WorkerReady
from dp_ray.process.isolation import isolated
from dp_ray.process.numerics import OtherKind, computes_on
from dp_ray.rundir.files import FLIGHT_RECORDER, NCCL_RECORD
from dp_ray.storage import Storage
from dp_ray.system.imports import import_from, imported_files
from dp_ray.system.process import environment

if TYPE_CHECKING:  # what jobs need: modules are served without it
    from dp_ray.job.job import Job
    from dp_ray.job.keys import WorkerKeys
    from dp_ray.monitor.faults import Faults
    from dp_ray.tasks.held import Held


@dataclass
class Assignment:
    """A job, or what parallel modules run on, as the driver hands it to each of its workers.

    `task` is the module whose `run_task` runs it, `backend` that of the process group. `step_seconds` are those of
    its `timeouts`. The job is None once a view has used its objects up.
    """

    task: str
    job: "Job | WorkerKeys | None"
    backend: str
    run_dir: str = field(default="", repr=False)  # a URL may hold a secret
    token: str = ""
    step_seconds: float | None = None
    faults: "Faults" = ()
    rows: Mapping[str, int] = field(default_factory=dict)


def run_job(worker: WorkerConfig, terms: Terms, packed: Any, env: dict[str, str], folders: list[str]) -> None:
    """Run the job's task on this worker, with `env` set, and report to the driver what happens.

    `packed` refers to the job's Assignment, packed. Modules are found in the script's `folders` too.
    """
    node_id, here = ray.get_runtime_context().get_node_id(), place_of_worker(terms.workers)
    name = uuid.uuid4().hex
    worker = replace(worker, number=terms.number, kind=terms.kind, node_id=node_id, name=name)
    prints = forwarded_prints(worker.channel, worker.number, worker.keep_prints, here)
    with isolated() as remains, environment(env), prints as lines:
        import_from(folders)
        ended = run_in_views(worker, terms, packed, here, lines)
    if ended is not None:
        attempt, rank, is_stopped = ended
        imported = imported_files() if rank == 0 and not terms.is_last else ()
        send(worker.channel, Finished(attempt, rank, is_stopped, tuple(remains), imported), worker.number)


def run_in_views(
    worker: WorkerConfig, terms: Terms, packed: Any, here: World, prints: Lines
) -> tuple[str, int, bool] | None:
    """Run the job in one view after another, as long as workers are lost or come; return how it ended here.

    That is the last view's attempt, the rank in it, and whether the job stopped as the user asked; None if the job
    has ended without this worker.
    """
    attempt, has_lost_peer = f"{os.environ[GROUP]}-{terms.number}", False
    with reported_errors(worker, attempt, here, lambda: False):
        assigned, here = assignment_of(packed, here)
        task: Any = import_module(assigned.task)
        # From one view to the next. Without it, a loss ends the process.
        held = None if terms.outlives is None else task.Held()
        if held is not None and ray.get(worker.channel.has_views.remote(worker.number, os.environ[GROUP])):
            task.hold_in_advance(assigned.job, here, Storage(assigned.run_dir), held)
    while True:
        with reported_errors(worker, attempt, here, lambda: False):
            given = next_view(worker, here, -1 if held is None else held.finished, has_lost_peer)
        if given is None:
            return None if terms.has_steps else (attempt, here.rank, False)
        view, world, on_node = given
        prints.move(world)
        of_view = f"{attempt}-{view.number}"
        in_view = replace(worker, view=view.number)
        ended = run_in_view(in_view, packed, assigned, of_view, world, on_node, held)
        has_lost_peer = ended is Next.AFTER_LOSS
        if held is None or held.lets_go():
            assigned.job = None  # before the view is left: a sharded model holds its groups
        leave_view(has_lost_peer)
        if isinstance(ended, bool):
            return of_view, world.rank, ended


def assignment_of(packed: Any, here: World) -> tuple[Assignment, World]:
    """Return a job with objects of its own, and this worker's world with its devices."""
    assigned: Assignment = ray.get(packed).load()
    assert assigned.job is not None
    return assigned, with_devices(here, assigned.job, assigned.job.num_devices)


class Next(Enum):
    """Why a worker goes on in another view."""

    AS_PLANNED = auto()
    AFTER_LOSS = auto()


def run_in_view(
    worker: WorkerConfig,
    packed: Any,
    assigned: Assignment,
    attempt: str,
    world: World,
    on_node: int,
    held: "Held | None",
) -> bool | Next:
    """Run the job in a view; return whether it stopped as the user asked, or why it goes on in the next view.

    `on_node` workers of the view are on this node. Then nobody but `assigned` and `held` has the job's objects.
    """
    run = Storage(assigned.run_dir)
    heartbeat = Heartbeat(worker, attempt, world, run, assigned.step_seconds, assigned.faults)
    with reported_errors(worker, attempt, world, lambda: heartbeat.has_progressed), heartbeat:
        try:
            run_assigned(worker, packed, assigned, world, on_node, heartbeat, held)
        except WorkerError as lost:
            if held is None:
                raise
            without_frames(lost)  # so that the group can be left
            return Next.AFTER_LOSS
        except StopRequested:
            if heartbeat.is_to_rejoin:
                return Next.AS_PLANNED
            if ray.get(worker.channel.state.remote())[0].ask is not Ask.STOP:
                raise  # so that the workers are started anew, more or fewer of them
            return True
        except OtherKind as other:
            ray.get(worker.channel.learn.remote(worker.number, avoided=other.node_ids))
            raise
        except Exception as error:
            if ray.get(worker.channel.is_out.remote(worker.name)):
                raise WorkerError(OUT) from None  # the error follows from it
            if trouble_of(error) is Trouble.BROKEN_GPU:
                ray.get(worker.channel.learn.remote(worker.number, broken=(worker.node_id,)))
            raise
    return False


def run_assigned(
    worker: WorkerConfig,
    packed: Any,
    assigned: Assignment,
    world: World,
    on_node: int,
    heartbeat: Heartbeat,
    held: "Held | None",
) -> None:
    """Run the task within the process group of a view's workers, and wait for all of them at its end.

    The caller leaves the group at once: that is how others hear of a loss. If this raises anything but StopRequested
    or WorkerError, the group stays: peers may wait in it, and the process is about to end.
    Raises StopRequested if it stopped as it was asked, and WorkerError if another worker was lost.
    """
    channel, attempt, run = worker.channel, heartbeat.attempt, Storage(assigned.run_dir)
    flight = run.child(FLIGHT_RECORDER)
    recorder = recorder_variables(assigned.backend, flight, attempt) if assigned.run_dir else {}
    step_seconds, within = assigned.step_seconds, None if held is None else SOON
    with (
        environment(recorder),
        process_group(worker, attempt, world, assigned.backend, step_seconds, on_node, within),
    ):
        if assigned.token:
            from dp_ray.rundir.claim import check_shared  # modules are served without it

            check_shared(run, assigned.token, str(world))
        if DUMP_FILE in recorder:
            with suppress(StorageError):
                flight.create()  # NCCL makes no folder
        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", []))
        ready = WorkerReady(attempt, world, os.getpid(), gpus, worker.node_id, worker.name, worker.view)
        if assigned.task == SERVE:
            ready = replace(ready, computes=computes_on(str(world.device)), handle=context.current_actor)
        send(channel, ready, worker.number, name=worker.name)
        if assigned.job is None:
            assigned.job = assignment_of(packed, world)[0].job
        import_module(assigned.task).run_task(
            assigned.job,
            world,
            run,
            # The loop waits for no row of the history: messages of a worker arrive in order.
            # Those of a worker that was left out would be taken for newer ones: the others have sent them again.
            lambda message: (
                send(channel, message, worker.number, wait=False, name=worker.name)
                if isinstance(message, Logged)
                else send(channel, message, worker.number)
            ),
            heartbeat,
            assigned.rows,
            held,
        )
        if ray.get(channel.end.remote(worker.view, world.rank, world.world_size, True)):
            raise WorkerError("another worker was lost before all were through")
    if DUMP_FILE in recorder and world.rank == 0:
        with suppress(StorageError):
            if flight.is_empty():
                flight.remove()


DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch appends the rank


def recorder_variables(backend: str, folder: Storage, attempt: str) -> dict[str, str]:
    """Return the variables with which NCCL writes its flight recorder before it ends a process, but for the user's.

    It does so if a collective fails, or takes longer than the group's time-out. The files go to `folder` if that is
    one of a file system, since NCCL writes to no other storage. torch's `torchfrtrace` reads them.
    """
    size = "TORCH_FR_BUFFER_SIZE"
    older = {size: "TORCH_NCCL_TRACE_BUFFER_SIZE", DUMP_FILE: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}  # torch reads both
    values = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", size: "2000"} if "nccl" in backend else {}
    if values and folder.is_local:
        values[DUMP_FILE] = folder.file(NCCL_RECORD.format(attempt, ""))
    takes_older = torch.__version__ < "2.12"
    return {
        older[name] if name == size and takes_older else name: value
        for name, value in values.items()
        if not {name, older.get(name, name)} & os.environ.keys()
    }


@contextmanager
def reported_errors(
    worker: WorkerConfig, attempt: str, world: World, has_progressed: Callable[[], bool]
) -> Iterator[None]:
    """Report an error to the driver at once, before the errors that it causes on other ranks.

    For Ray Train's controller it becomes a WorkerExit, which says how the loop ended.
    """
    try:
        yield
    except WorkerExit:
        raise
    except StopRequested as stopped:
        raise WorkerExit(Ending.STOPPED, str(stopped), True) from None
    except BaseException as error:
        text = report(worker.channel, worker.number, attempt, world, error)
        raise WorkerExit(_ending_of(error), text, has_progressed()) from None


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, WorkerError):
        return Ending.LOST_PEER
    if isinstance(error, OtherKind):
        return Ending.OTHER_KIND
    if not isinstance(error, Exception) or getattr(error, "comes_back", False):
        return Ending.MISTAKEN
    trouble = trouble_of(error)
    if trouble is Trouble.BROKEN_GPU:
        return Ending.BROKEN_GPU
    if trouble is Trouble.BUSY_GPU or is_out_of_memory(error):  # a JobError too, if the model finds no room at first
        return Ending.OUT_OF_MEMORY
    is_final = trouble is not None and trouble.is_final
    return Ending.MISTAKEN if is_final or isinstance(error, JobError) else Ending.RAISED
