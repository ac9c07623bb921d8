"""A session: workers that stay, with torch imported, and run one job after another.

`session` is the public function; `keys_for` finds the keys of a session that runs several jobs.
"""

import os
import threading
from collections.abc import Hashable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ValidationError
from torch import nn

from dp_ray.cluster import connect
from dp_ray.cluster.own import OF_PROCESS
from dp_ray.cluster.ray_version import check_ray
from dp_ray.cluster.resources import Resources, resources_text
from dp_ray.cluster.serving import RayServing
from dp_ray.cluster.workers import CLOSE_SECONDS, LEAVE_SECONDS, check_can_be_shipped, start_workers
from dp_ray.driver.run import Options, ShortErrors, execute, options_of
from dp_ray.errors import ClusterError, JobError, RunInterrupted
from dp_ray.job.errors import explain
from dp_ray.job.files import job_from
from dp_ray.job.job import Job
from dp_ray.job.keys import WorkerKeys
from dp_ray.monitor.console import Console
from dp_ray.monitor.faults import Faults
from dp_ray.monitor.monitor import Monitor
from dp_ray.parallel.exchange import SharedWorkers
from dp_ray.parallel.module import DataParallel
from dp_ray.results.result import Result
from dp_ray.rundir.claim import RunDir
from dp_ray.system.imports import Sources
from dp_ray.system.process import own_folder
from dp_ray.system.threads import if_longer


def session(
    *,
    address: str | None = None,
    idle_seconds: float | None = None,
    quiet: bool = False,
    verbose: bool = False,
    **keys: Any,
) -> "Session":
    """Start workers that stay for several jobs; use it in a `with` statement, or call its `close`.

    `keys` are the job's keys that concern workers: `workers`, `gpus_per_worker`, `cpus_per_worker`,
    `resources_per_worker`, `accelerator_type`, `placement`, `devices`, `timeouts` and `env`, which is set before
    torch is imported. A session that runs no job for `idle_seconds` ends. Does not wait for the workers.
    Raises JobError if a key is wrong, and ClusterError if no Ray answers or if the workers can never fit.

    >>> import dp_ray, torch
    >>> job = {"model": torch.nn.Linear(1, 2), "dataset": [torch.zeros(1)] * 6, "batch_size": 4}
    >>> with dp_ray.session(workers=2, quiet=True) as session:
    ...     results = [session.run(**job, seed=seed, quiet=True) for seed in (1, 2)]
    >>> [result.outputs.shape for result in results]
    [torch.Size([6, 2]), torch.Size([6, 2])]
    """
    return Session(worker_keys(keys), Options(address, quiet=quiet, verbose=verbose), idle_seconds)


class Session:
    """Workers that stay, with torch imported and their resources held, and run one job after another.

    `dp_ray.session` makes one. Of the `options`, the address of Ray, quiet and verbose are the session's.

    >>> import dp_ray, torch
    >>> with dp_ray.session(workers=2, quiet=True) as session, session.parallel(torch.nn.Linear(1, 2)) as model:
    ...     model(torch.zeros(6, 1)).shape
    torch.Size([6, 2])
    """

    def __init__(
        self, keys: WorkerKeys, options: Options, idle_seconds: float | None = None, at_a_time: int | None = 1
    ) -> None:
        check_ray()
        self._options = options
        self._idle_seconds = idle_seconds
        self._runs = threading.Lock()  # held while a job runs
        self._runner: int | None = None  # the thread that runs it
        self._timer: threading.Timer | None = None
        self._workers = SessionWorkers(keys, options, at_a_time)
        self._wait_idle()

    def run(self, job: Job | str | os.PathLike[str] | None = None, /, **keys: Any) -> Result:
        """Run a job on the session's workers, as `dp_ray.run` does on its own, and return its result.

        The job takes the first `workers` of them. Raises JobError if it needs more than the session has, before
        anything runs. Also raises ClusterError if the session has ended. Ctrl-C stops the job after its current step,
        and the session stays; a second one ends the session.
        """
        if "address" in keys:
            raise JobError("address: belongs to the session; give it to dp_ray.session")
        options = options_of(keys := {"quiet": self._options.quiet, "verbose": self._options.verbose, **keys})
        with ShortErrors(options.verbose):
            return self.execute(job_from(job, keys), options)

    def parallel(self, module: nn.Module, workers: int | None = None, **keys: Any) -> DataParallel:
        """Return a `dp_ray.DataParallel` of the module, on the session's workers; by default on all.

        While such a module is open, the session runs no job; with `workers=0` this process serves the module, and the
        session does not. Raises ClusterError if the session has ended or runs a job, and what `dp_ray.DataParallel`
        raises.
        """
        self._workers.check_open()
        if workers == 0:
            return DataParallel(module, 0, quiet=self._options.quiet, **keys)
        if not self._runs.acquire(blocking=False):
            raise ClusterError(RUNS_A_JOB)
        try:
            self._stay_awake()
            most = self._workers.most
            if workers is not None and workers > most:
                raise JobError(f"workers: the module asks for {workers}, the session has {most}")
            return DataParallel(module, workers or most, quiet=self._options.quiet, _kind=self._workers, **keys)
        finally:
            self._wait_idle()
            self._runs.release()

    def execute(self, job: Job, options: Options) -> Result:
        """Run a job on the session's workers and return its result."""
        self._workers.check_open()
        if self._shared is not None and not self._shared.users:
            self._shared.close()  # its modules are gone, without `close`
        if self._shared is not None:
            raise ClusterError(
                "the session's workers serve a dp_ray.DataParallel; close that first, and then run the job"
            )
        if not self._runs.acquire(blocking=False):
            raise ClusterError("the session runs another job; a session runs one at a time")
        self._runner = threading.get_ident()
        try:
            self._stay_awake()
            self._workers.check_open()
            if job.max_workers == 0:
                return execute(job, options)
            return execute(self._workers.renewed_for(job, options), options, self._workers)
        except RunInterrupted:
            if self._workers.started.is_interrupted_twice:
                self._end("it was interrupted")
            raise
        finally:
            self._wait_idle()
            self._runner = None
            self._runs.release()

    @property
    def _shared(self) -> SharedWorkers | None:
        """The session's workers while they serve parallel modules."""
        return SharedWorkers.by_owner.get(self._workers)

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended: it was closed, was idle for long, or was interrupted twice."""
        return bool(self._workers.ended)

    @property
    def at_a_time(self) -> int | None:
        """How many such sessions shall run at a time."""
        return self._workers.at_a_time

    def close(self) -> None:
        """End the session and free its resources; waits for a job that another thread runs.

        Raises ClusterError if this thread runs one, which it would wait for.
        """
        if self._runner == threading.get_ident():
            raise ClusterError(
                "a session cannot be closed from within its own job; close it after `run` has returned"
            )
        with self._runs:
            self._stay_awake()
            self._end("it was closed")

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abort(self) -> None:
        """End the workers at once, and so the job that another thread runs on them."""
        self._workers.started.close(0)

    def _wait_idle(self) -> None:
        """Begin to count the seconds without a job."""
        if self._idle_seconds is not None and not self.has_ended:
            self._timer = threading.Timer(self._idle_seconds, self._end_idle)
            self._timer.daemon = True
            self._timer.start()

    def _stay_awake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None  # so that it does nothing if it has come already

    def _end_idle(self) -> None:
        with self._runs:
            if self._shared is not None:
                self._wait_idle()  # it serves a module
            elif threading.current_thread() is self._timer:
                self._end(f"it ran no job for {self._idle_seconds:g} s")

    def _end(self, why: str) -> None:
        if self._shared is not None:
            self._shared.close()
        self._workers.close(why)


RUNS_A_JOB = "the session runs a job; make a parallel module of it before or after"


class SessionWorkers:
    """The workers of a session, which stay when a job ends, or what they serve.

    They start anew before the next one if it would find there what it must not.
    """

    is_here: ClassVar[bool] = False

    def __init__(self, keys: WorkerKeys, options: Options, at_a_time: int | None = 1) -> None:
        self.at_a_time = at_a_time  # how many such sessions shall run at a time; None: as many as fit
        self.ended = ""  # why, once they have
        self._runs_job = False
        self._keys = keys
        self._options = options
        self._sources = Sources(Path.cwd())
        self._open = ExitStack()
        self._is_own = not connect.is_connected()
        self._connect()

    @property
    def owners(self) -> tuple[Hashable, ...]:
        """Modules of the session share them, and those that name no session if they start none of their own."""
        return self, OF_PROCESS

    @property
    def most(self) -> int:
        """How many there are."""
        return self._keys.max_workers

    def __deepcopy__(self, _: object) -> "SessionWorkers":
        """Return the same: a copy of a session's module is the session's too."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Be None in a pickle: there a module names no session."""
        return type(None), ()

    def renewed_for(self, job: Job, options: Options) -> Job:
        """Start the workers anew if the job needs that; return the job with the session's `env`.

        Raises JobError if the job needs more than the session has.
        """
        check_covered(job, self._keys, self.started.each)
        check_can_be_shipped(job)
        self._renew(Console(job.run_name, options.quiet), job)
        return job.model_copy(update={"env": {**self._keys.env, **job.env}})  # in the driver too

    def check_open(self) -> None:
        """Raise ClusterError if the session has ended."""
        if self.ended:
            raise ClusterError(f"the session has ended: {self.ended}")

    def accept(self, job: Job, replaces: bool) -> Job:
        """Return the job: the session has checked it already, so that its workers start while it is prepared."""
        return job

    def run(self, job: Job, claimed: RunDir, rows: Mapping[str, int], monitor: Monitor, faults: Faults = ()) -> None:
        """Run a job to its end; the files of user code that it imports count as the session's from now on."""
        self._sources.note()
        monitor.begin("waiting for the workers")
        self._runs_job = True
        try:
            self.started.run(job, claimed, rows, monitor, faults)
        finally:
            self._runs_job = False
            self._note_imported()

    def serve(self, keys: WorkerKeys) -> RayServing:
        """Have all of them serve parallel modules, whatever `keys` ask for.

        Raises ClusterError if the session has ended or runs a job: a copy of a module may begin at any time.
        """
        self.check_open()
        if self._runs_job:
            raise ClusterError(RUNS_A_JOB)
        self._renew(Console("session", self._options.quiet))
        self._sources.note()
        of_all = self._keys.model_copy(update={"workers": self.most})
        return RayServing(self.started, of_all, Console("parallel", self._options.quiet).say, self._note_imported)

    def _note_imported(self) -> None:
        self._sources.note_imported(self.started.imported)

    def _connect(self) -> None:
        """Connect to Ray and start the workers."""
        address, verbose = self._options.address, self._options.verbose
        say = Console("session", self._options.quiet).say
        say(connect.what_begins(address))
        if connect.address_of(address) if self._is_own else connect.ships_callers_code():
            self._sources.note_sent()
        with ExitStack() as opening:
            all_workers = self.most * (self.at_a_time or 1)
            of_all = self._keys.model_copy(update={"workers": all_workers})
            with if_longer(connect.AWAIT_SECONDS, lambda: say(connect.what_is_awaited(address))):
                opening.enter_context(connect.connected(of_all, address, verbose))
            if self.at_a_time != 1:
                self.at_a_time = connect.sessions_that_fit(self._keys, self.at_a_time)
                # If several sessions run at a time, the others use this connection, which then stays.
                self._is_own = self._is_own and self.at_a_time == 1
            self._folder = opening.enter_context(own_folder())
            self.started = start_workers(self._keys, self._folder, self._is_own, verbose, say)
            opening.callback(lambda: self.started.close(0 if self._is_own else CLOSE_SECONDS))
            self._open = opening.pop_all()

    def _renew(self, console: Console, job: Job | None = None) -> None:
        """Start the workers anew if the next job would find there what it must not; a line says why."""
        is_fixed = self.at_a_time != 1 and connect.ships_callers_code()  # what was sent is what all sessions run
        edited = [] if is_fixed else self._sources.edited()
        if edited:
            why = f"{', '.join(edited)} {'was' if len(edited) == 1 else 'were'} edited"
        elif self.started.remains:
            why = f"the last job left {', '.join(self.started.remains)} behind"
        elif self.started.is_over:
            why = self.started.why_over
        elif job is not None and (anew := self.started.why_anew(job)):
            why = anew
        else:
            return
        if edited and not self._is_own and connect.ships_callers_code():
            raise ClusterError(
                f"{why}, and the workers would still import what your own ray.init(runtime_env=...) has sent; "
                "call ray.shutdown() and ray.init() again, or open the session without a ray.init of your own"
            )
        console.say(f"the workers are started anew: {why}")
        if edited:
            self._sources.forget()
        if self._is_own and edited and connect.address_of(self._options.address):
            self._reconnect()  # a connection sends the code to the cluster
        elif self.started.close(CLOSE_SECONDS if self._is_own else LEAVE_SECONDS) or not self._is_own:
            verbose, say = self._options.verbose, console.say
            self.started = start_workers(self._keys, self._folder, self._is_own, verbose, say, is_first=False)
        else:  # the end of the connection frees what these workers hold
            self._reconnect()

    def _reconnect(self) -> None:
        self._open.close()
        try:
            self._connect()
        except BaseException as error:
            self.close(str(error) or type(error).__name__)
            raise

    def close(self, why: str = "it was closed") -> None:
        """End the workers, and the connection if it is theirs."""
        if not self.ended:
            self.ended = why
            self._open.close()


def worker_keys(keys: dict[str, Any]) -> WorkerKeys:
    """Validate the keys of a session. Raises JobError, which lists every wrong one."""
    try:
        checked = WorkerKeys.model_validate(keys)
    except ValidationError as error:
        raise JobError("\n".join(explain(error))) from None
    if checked.max_workers == 0:
        raise JobError("workers: a session needs at least one; `workers: 0` runs without a session")
    return checked


def keys_for(jobs: Iterable[Job]) -> WorkerKeys:
    """Return the keys of a session that can run each of these jobs. Raises JobError if they contradict each other."""
    jobs = [job for job in jobs if job.max_workers > 0]
    gpus = [gpus for job in jobs if (gpus := _gpus_of(job)) != "auto"]
    extra = {name for job in jobs for name in job.resources_per_worker}
    waits = [job.timeouts.capacity for job in jobs]  # None is without limit
    return worker_keys(
        {
            "workers": {"min": max(job.min_workers for job in jobs), "max": max(job.max_workers for job in jobs)},
            "gpus_per_worker": max(gpus) if len(gpus) == len(jobs) else max([1, *gpus]) if gpus else "auto",
            "cpus_per_worker": max(job.cpus_per_worker for job in jobs),
            "resources_per_worker": {
                name: max(job.resources_per_worker.get(name, 0) for job in jobs) for name in extra
            },
            "accelerator_type": _common("accelerator_type", [job.accelerator_type for job in jobs], None),
            "placement": _common("placement", [job.placement for job in jobs], "PACK"),
            "devices": jobs[0].devices if all(job.devices == jobs[0].devices for job in jobs) else None,
            "timeouts": {
                "capacity": None if None in waits else max(seconds for seconds in waits if seconds is not None)
            },
            "env": jobs[0].env if all(job.env == jobs[0].env for job in jobs) else {},
        }
    )


def _gpus_of(job: Job) -> float | Literal["auto"]:
    """Return the GPUs that each of a job's workers takes, by `gpus_per_worker` or by `devices`; else auto."""
    return (job.own_gpus or "auto") if job.gpus_per_worker == "auto" else job.gpus_per_worker


def _common(key: str, values: list[Any], default: Any) -> Any:
    """Return the value that jobs have in common; those with the default take any."""
    named = list(dict.fromkeys(value for value in values if value != default))
    if len(named) > 1:
        raise JobError(f"{key}: jobs of one session must agree, got {' and '.join(map(repr, named))}")
    return named[0] if named else default


def check_covered(job: Job, held: WorkerKeys, each: Resources) -> None:
    """Raise JobError, which names both, if a job needs more than a session with the keys `held` has.

    `each` are the resources that each of its workers holds.
    """
    lacks = []
    if job.max_workers > held.max_workers:
        lacks.append(f"workers: the job needs {job.max_workers}, the session has {held.max_workers}")
    elif job.min_workers > held.min_workers:
        most = held.min_workers
        lacks.append(f"workers: the job needs at least {job.min_workers}, the session may have only {most}")
    wanted = {"CPU": job.cpus_per_worker, **job.resources_per_worker}
    if (gpus := _gpus_of(job)) != "auto":
        wanted["GPU"] = gpus
    if any(amount > each.get(name, 0) for name, amount in wanted.items()):
        named = f" for devices: {', '.join(job.devices)}" if job.devices and job.own_gpus else ""
        lacks.append(
            f"a worker of the job needs {resources_text(wanted)}{named}; one of the session has "
            f"{resources_text(each)}"
        )
    if job.accelerator_type not in (None, held.accelerator_type):
        has = held.accelerator_type or "any"
        lacks.append(f"accelerator_type: the job needs {job.accelerator_type}, the session has {has}")
    if job.placement not in ("PACK", held.placement):
        lacks.append(f"placement: the job needs {job.placement}, the session has {held.placement}")
    if lacks:
        raise JobError("; ".join(lacks))
