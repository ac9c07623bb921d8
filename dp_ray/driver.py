"""Run a job: claim its run directory, start its workers, follow them, merge what they leave."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dp_ray.cluster.fault_injection import Fault, parse_faults
from dp_ray.cluster.launch import run_on_ray
from dp_ray.errors import DataError, Error, JobError, RunInterrupted, StorageError
from dp_ray.job import Job
from dp_ray.job_file import job_from
from dp_ray.job_target import Target
from dp_ray.monitor.console import Console
from dp_ray.monitor.messages import Started, WorkerReady, message_of
from dp_ray.monitor.monitor import Monitor
from dp_ray.monitor.tensorboard import TensorBoardWriter
from dp_ray.plan.order import Order
from dp_ray.plan.plan import remarks
from dp_ray.plan.split import Split, chunk_sizes
from dp_ray.plan.work import Done, Range
from dp_ray.replica.data import seeded_dataset
from dp_ray.replica.devices import with_devices
from dp_ray.replica.evaluation import unmeasured
from dp_ray.replica.model import check_model
from dp_ray.replica.optimizer import check_optimizer
from dp_ray.replica.targets import bind, resolve
from dp_ray.replica.world import World
from dp_ray.results.output_parts import reading
from dp_ray.results.outputs import MERGED, Merged, merge
from dp_ray.results.result import Result, with_best_weights
from dp_ray.results.shape_journal import REPORTS, Journal, read_journal
from dp_ray.results.shape_recorder import Run
from dp_ray.results.shape_reports import ReportFile, read_runs
from dp_ray.results.shapes import Seen
from dp_ray.results.shown import measured, relative
from dp_ray.rundir import ledger
from dp_ray.rundir.checkpoint import CHECKPOINTS, steps_of
from dp_ray.rundir.claim import RunDir, base_storage, check_ours, claim, located, with_shards_of_run
from dp_ray.rundir.files import SHAPES
from dp_ray.rundir.history_file import HISTORY, best_of, merge_history, summary
from dp_ray.rundir.incidents import INCIDENTS, IncidentLog, Interruption, read_incidents
from dp_ray.rundir.lease import held, wait_until_free
from dp_ray.rundir.ledger import PARTS
from dp_ray.rundir.unfinished import interruption, kept_steps, last_end
from dp_ray.rundir.weights import LINKS, WEIGHTS, first_step
from dp_ray.storage import Storage
from dp_ray.system.environment import environment
from dp_ray.system.stop_signals import planned_stops
from dp_ray.task.cut import split_of
from dp_ray.task.step_control import StepControl, StopRequested
from dp_ray.task.task import run_task
from dp_ray.tensors.file import sha256_of
from dp_ray.tracebacks import shorten


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run a job, beside what it is."""

    address: str | None = None
    overwrite: bool = False
    shapes: bool = False
    inject: str = ""
    quiet: bool = False
    verbose: bool = False
    resume: bool = False  # the Python objects are those of the run that is to be carried on


def run(job: Job | str | os.PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Run a job to its end and return its result.

    `job` is a Job, the path of a job file, or None; the job's keys may be given, or overridden, as keywords,
    with objects in place of targets. So may `address`, `overwrite`, `shapes`, `inject`, `quiet` and `verbose`, which
    are the command line's flags of the same name. A run of Python objects, which cannot be compared, is carried on
    with `resume=True`: the caller says that they are the same. Without a `name`, a run from Python is named by its
    time. Raises an Error of dp_ray.errors, and RunInterrupted where SIGINT or SIGTERM stopped the run.
    """
    names = {field.name for field in dataclasses.fields(Options)}
    if not isinstance(keys.get("resume", False), bool):
        names.remove("resume")  # a file, as in other libraries: the job answers it as a key that it has not
    options = Options(**{name: keys.pop(name) for name in names & keys.keys()})
    try:
        return execute(job_from(job, keys), options)
    except Error as error:
        if not options.verbose:
            shorten(error)
        raise error  # from here, so that Python shows no frames of dp_ray
    except RunInterrupted as stopped:
        if options.verbose:
            raise
        raise stopped.with_traceback(None) from None


def execute(job: Job, options: Options) -> Result:
    """Run a job to its end; its result, also of a failure, is in the run directory."""
    started = time.monotonic()
    job = job.for_task()
    console = Console(job.run_name, options.quiet)
    faults = parse_faults(options.inject)
    if faults and job.max_workers == 0:
        raise JobError("--inject: workers is 0, so there is no worker but the driver itself; set workers")
    if job.init_from is not None:
        job = job.model_copy(update={"init_from": located(job.init_from).location})
    base, asked = base_storage(job), job
    if not options.overwrite:
        job = with_shards_of_run(asked, base)
    building = console.if_slow("building the dataset")
    with contextlib.redirect_stdout(sys.stderr), environment(job.env), building:
        split, rows = check_targets(job)  # what user code prints was not asked for
    killed = wait_until_free(base.child(job.run_name), console.say)
    claimed = claim(job, base, options.overwrite, rows, split.total_steps, options.resume)
    if claimed.carried_on and job is not asked:
        console.say(_taken_over(asked, job))
    if claimed.lengths:
        console.say(f"goes on to step {split.total_steps} ({claimed.lengths})")
    if claimed.carried_on and (end := last_end(job, split, claimed.storage, killed)):
        console.say(f"the last attempt was {end.what}")
    monitors: list[Monitor] = []
    with held(claimed, lambda: monitors[0].steps_done if monitors else 0):
        return _execute(job, split, rows, claimed, console, options, faults, started, monitors)


def _taken_over(asked: Job, job: Job) -> str:
    """What a run that is carried on keeps, though the job that was asked for would have it otherwise."""
    fewer = f"; at most so many workers share them, {asked.max_workers} were asked for"
    kept = f"shards: {job.num_shards}, with which this run began"
    return kept + fewer * (asked.max_workers > job.num_shards)


def _execute(
    job: Job,
    split: Split,
    rows: dict[str, int],
    claimed: RunDir,
    console: Console,
    options: Options,
    faults: tuple[Fault, ...],
    started: float,
    monitors: list[Monitor],
) -> Result:
    """Run a job, followed by a monitor that is added to `monitors`, in the directory that this driver holds."""
    where = relative(str(claimed.storage))
    console.say(f"{'carrying on in' if claimed.carried_on else 'run directory'} {where}")
    for line in (*remarks(split, job.max_workers), *unmeasured(job)):
        console.say(line)
    claimed.storage.remove_unfinished(recursive=True)
    try:
        with planned_stops(lambda name: any(one.ask_to_stop(name) for one in monitors)):
            with _monitor(job, split, claimed, console, options) as monitor:
                monitors.append(monitor)
                if job.max_workers == 0:
                    _run_here(job, claimed, monitor, rows)
                else:
                    run_on_ray(job, claimed, rows, monitor, console, options.address, options.verbose, faults)
            check_ours(claimed)
            _merge(job, split, claimed.storage, console)
    except (KeyboardInterrupt, StopRequested) as stopped:
        check_ours(claimed)
        told = RunInterrupted(interruption(job, claimed.storage, split, options.overwrite))
        result = _result(job, split, claimed, monitors, started, "interrupted", told)
        _save_unfinished(result, claimed.storage, split, monitors)
        raise told from (None if isinstance(stopped, StopRequested) else stopped)
    except BaseException as error:
        check_ours(claimed)
        result = _result(job, split, claimed, monitors, started, "failed", error)
        _save_unfinished(result, claimed.storage, split, monitors)
        raise
    result = _result(job, split, claimed, monitors, started, "done")
    result.save(claimed.storage)
    for folder in (PARTS, HISTORY, LINKS):
        claimed.storage.child(folder).remove()
    for name in (ledger.LEDGER, INCIDENTS):
        claimed.storage.delete(name)
    claimed.storage.remove_unfinished(recursive=True)
    console.say(_summary(result))
    return result


def _save_unfinished(result: Result, run: Storage, split: Split, monitors: list[Monitor]) -> None:
    """Keep the result of a run that did not come to its end and, if it had workers, how its driver ended."""
    with contextlib.suppress(StorageError):  # the storage may be what failed: the first error is the one to tell
        result.save(run)
        for monitor in (one for one in monitors if one.attempts):
            monitor.incidents.interrupted(_driver_end(result, monitor, kept_steps(run, result.task, split))).save(run)
        run.remove_unfinished(recursive=True)


def _driver_end(result: Result, monitor: Monitor, kept: int) -> Interruption:
    """How a driver ended that could still tell it."""
    step = max(monitor.steps_done, kept)
    if result.status == "failed":
        return Interruption("driver", f"ended after step {step} by {str(result.error).splitlines()[0]}", step)
    step = kept if monitor.is_stopping else step  # a planned stop is after the step that it keeps
    return Interruption("driver", f"stopped by {monitor.stopped_by or 'an interrupt'} after step {step}", step)


def _merge(job: Job, split: Split, run: Storage, console: Console) -> None:
    """What the workers left in pieces becomes whole, and is proven to be."""
    if job.task == "predict":
        console.say("merging the outputs")
        order = Order(split.rows, job.seed, 0, job.is_shuffled)
        merge(run.child(PARTS), run, order, split.rows_kept, ledger.committed(run))
    elif job.task == "train":
        merge_history(run.child(HISTORY), run, split.total_steps, first_step(run))


def _summary(result: Result) -> str:
    told = "".join(f", {name} {value}" for name, value in measured(result.metrics).items())
    rows = f"{result.rows} rows" if result.epochs == 1 else f"{result.epochs} epochs of {result.rows} rows"
    where = result.outputs_path or result.weights_path
    return f"done, {rows} in {result.seconds:.1f} s{told}" + (f": {relative(where)}" if where else "")


def check_targets(job: Job) -> tuple[Split, dict[str, int]]:
    """Find the job's targets before anything is started: how its dataset is cut, and the rows of each dataset."""
    for key, target in job.targets.items():
        if key == "model":
            check_model(target)
        if isinstance(target, Target) and key in ("model", "eval.dataset"):
            bind(key, with_devices(target, ()) if key == "model" else target)
        elif isinstance(target, Target) and key in ("optimizer", "scheduler"):
            if key == "optimizer":
                check_optimizer(resolve(key, target))
            bind(key, target, leading=1)
        elif isinstance(target, Target):
            resolve(key, target)
    for name in (*(job.devices or ()), *([job.input_device] if job.input_device else ())):
        try:
            torch.device(name)
        except RuntimeError as error:
            raise JobError(f"devices: {name!r} is no device of torch: {error}") from None
    dataset = seeded_dataset(job, job.dataset_key)
    rows, split = {"dataset": len(dataset)}, split_of(job, dataset)
    if job.task == "train" and job.eval is not None:
        rows["eval.dataset"] = len(seeded_dataset(job.over_eval(), "eval.dataset"))
    if split.steps == 0:
        raise DataError(f"drop_last leaves none of the {split.rows} rows: batch_size is {split.batch_size}")
    if job.sync_batchnorm and any(0 in chunk_sizes(rows, split.shards) for _, rows in split.batch_sizes()):
        raise JobError("sync_batchnorm: the last batch leaves workers without rows, who never meet; set drop_last")
    return split, rows


@contextmanager
def _monitor(job: Job, split: Split, claimed: RunDir, console: Console, options: Options) -> Iterator[Monitor]:
    """A monitor whose shape reports are a whole file when the block ends, also by an error."""
    error: BaseException | None = None

    def save_incidents(incidents: IncidentLog) -> None:
        with contextlib.suppress(StorageError):  # a full disk is for those to tell who keep what counts
            incidents.save(claimed.storage)

    reported = _reported(job, claimed.storage)
    with claimed.storage.writing(SHAPES) as stream:
        incidents = read_incidents(claimed.storage) if claimed.carried_on else IncidentLog()
        file, tensorboard = ReportFile(stream), TensorBoardWriter(claimed.storage)
        journal = Journal(claimed.storage.child(REPORTS))
        monitor = Monitor(
            job,
            split,
            file,
            tensorboard,
            console,
            options.shapes,
            incidents=incidents,
            save_incidents=save_incidents,
            journal=journal,
        )
        monitor.restore(reported)
        try:
            with console.live(monitor.progress):
                yield monitor
        except BaseException as raised:
            error = raised
        monitor.close()
    claimed.storage.child(REPORTS).remove()
    if error is not None:
        raise error


def _reported(job: Job, run: Storage) -> list[tuple[World, Seen, Run]]:
    """What an earlier run reported of the parts that it left."""
    done = Done([*ledger.done_ranges(ledger.committed(run)), *_trained(job, run)])
    runs = read_journal(run.child(REPORTS), done)
    if run.exists(SHAPES):
        with reading(run, SHAPES) as file:
            runs += read_runs(file, done)
    return sorted(runs, key=lambda one: one[2].first_step)


def _trained(job: Job, run: Storage) -> list[Range]:
    """The steps before the last checkpoint, from which a training is carried on."""
    steps = steps_of(run.child(CHECKPOINTS)) if job.task == "train" else []
    return [Range(0, steps[-1], 0, job.num_shards)] if steps else []


def _run_here(job: Job, claimed: RunDir, monitor: Monitor, rows: dict[str, int]) -> None:
    """`workers: 0`: the whole task in this process, where a debugger can step into it."""
    devices = _devices_here(job)
    world = World(device=devices[0], all_devices=devices)
    monitor.take(WorkerReady("here", world, os.getpid(), ()))

    one_at_a_time = threading.Lock()  # reports come from a thread of their own, the rest from the task's

    def send(what: Any) -> None:
        with one_at_a_time:
            monitor.take(message_of("here", what))
            monitor.tick()

    def started(step: int) -> None:
        with one_at_a_time:
            monitor.take(Started("here", 0, step))

    control = DriverStepControl(started)

    def ask_to_stop(signal_name: str) -> bool:
        control.wants_stop = monitor.ask_to_stop(signal_name)
        return control.wants_stop

    with planned_stops(ask_to_stop), contextlib.redirect_stdout(sys.stderr), environment(job.env):
        run_task(job, world, claimed.storage, send, control, rows)


class DriverStepControl(StepControl):
    """The border of the driver's own process: the monitor hears where it starts."""

    def __init__(self, started: Callable[[int], None]) -> None:
        self._started = started

    def before(self, step: int) -> None:
        self._started(step)


def _devices_here(job: Job) -> tuple[torch.device, ...]:
    """The devices that the job names, or as many GPUs of this machine as a worker takes."""
    if job.devices:
        return tuple(torch.device(name) for name in job.devices)
    if not torch.cuda.is_available() or job.gpus_per_worker == 0:
        if job.num_devices > 1:
            raise JobError(f"gpus_per_worker: this machine has no GPUs, {job.num_devices} are wanted; set devices")
        return (torch.device("cpu"),)
    if (there := torch.cuda.device_count()) < job.num_devices:
        raise JobError(f"gpus_per_worker: this machine has {there} GPUs, {job.num_devices} are wanted")
    return tuple(torch.device("cuda", number) for number in range(job.num_devices))


def _result(
    job: Job,
    split: Split,
    claimed: RunDir,
    monitors: list[Monitor],
    started: float,
    status: str,
    error: BaseException | None = None,
) -> Result:
    attempts = monitors[0].attempts if monitors else []
    incidents = monitors[0].incidents if monitors else IncidentLog()
    storage = claimed.storage
    merged = status == "done" and job.task == "predict"
    trained = status == "done" and job.task == "train"
    best, kept = job.checkpoint.best, steps_of(storage.child(CHECKPOINTS)) if trained else []
    return Result(
        run_dir=str(storage),
        location=storage.location,
        name=job.run_name,
        task=job.task,
        status=status,
        rows=split.rows_kept,
        steps=split.steps,
        epochs=split.epochs,
        total_steps=split.total_steps,
        batch_size=job.batch_size,
        shards=job.num_shards,
        batch_dim=job.batch_dim,
        world_sizes=list(incidents.world_sizes),
        workers=[_told(worker) for worker in attempts[-1].workers] if attempts else [],
        restarts=len(incidents.interruptions),
        interruptions=incidents.to_json()["interruptions"],
        metrics=summary(storage) if trained else monitors[0].metrics if monitors else {},
        seconds=round(time.monotonic() - started, 3),
        outputs_path=str(storage.child(MERGED)) if merged else None,
        outputs_sha256=Merged(storage).sha256() if merged else None,
        weights_path=str(storage.child(WEIGHTS)) if trained else None,
        weights_sha256=sha256_of(storage, WEIGHTS) if trained else None,
        best=with_best_weights(best_of(storage, best.metric, best.mode, kept), storage) if trained and best else None,
        error=None if error is None else f"{type(error).__name__}: {error}",
    )


def _told(worker: WorkerReady) -> dict[str, Any]:
    world = worker.world
    return {
        "rank": world.rank,
        "node": world.node,
        "node_rank": world.node_rank,
        "local_rank": world.local_rank,
        "device": str(world.device),
        "gpu_ids": list(worker.gpu_ids),
        "pid": worker.pid,
    }
