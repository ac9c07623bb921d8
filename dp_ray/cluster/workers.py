"""A group of workers on Ray, which runs one job after another.

They belong to a session or, by `OwnWorkers`, to a single run. `launch` starts them: a TorchTrainer with dp_ray's
policies. While a job runs, its progress is in gauges of `ray.util.metrics`, which a Ray with dashboard agents
exports to Prometheus.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dp_ray.cluster.channel import RUN, SERVE, STOP, Terms, WorkerConfig, open_channel, receive
from dp_ray.cluster.connect import (
    check_fits,
    without_gpus,
    worker_resources,
)
from dp_ray.cluster.decisions import WorkerDemand
from dp_ray.cluster.internals.variables import TRAIN_ENVIRONMENT
from dp_ray.cluster.ray_version import unknown_ray
from dp_ray.cluster.resources import Resources, resources_text
from dp_ray.engine.devices import check_machine
from dp_ray.engine.ship import check_packs, refused, shipment
from dp_ray.errors import ClusterLost, Error, WorkerError
from dp_ray.job.job import Job
from dp_ray.job.keys import ModuleKeys, WorkerKeys
from dp_ray.messages import Failed, Finished, GaveUp, Note, StopRequested, WorkerReady, beat_interval, error_of
from dp_ray.monitor.attempts import NodeControl
from dp_ray.monitor.console import Progress
from dp_ray.monitor.gauges import GAUGES, values_of
from dp_ray.system.imports import own_folders, postponed
from dp_ray.system.process import environment
from dp_ray.system.threads import repeated

with postponed("ray.data", "pandas"):  # Ray Train imports both, and hardly ever uses them
    from ray.train import LoggingConfig, RunConfig, ScalingConfig

    from dp_ray.cluster.internals.core import autoscales, head_answers, put_apart
    from dp_ray.cluster.internals.train import WorkersStart, why_failed
    from dp_ray.cluster.internals.train_worker import WorkerBackendConfig
    from dp_ray.cluster.internals.trainer import ControlledTrainer
    from dp_ray.cluster.loop import train_loop_per_worker
    from dp_ray.cluster.policies import ElasticScalingPolicy, RestartPolicy, answers_at, nodes_that_answer

if TYPE_CHECKING:  # what jobs need: workers that serve modules start without it
    from dp_ray.monitor.faults import Faults
    from dp_ray.monitor.monitor import Monitor
    from dp_ray.rundir.claim import RunDir

CLOSE_SECONDS = 5.0
SIGNS = 5  # beats that a worker must miss at least, before the others go on without it
LOOK_SECONDS = 1.0  # between two looks at whether workers are waited for
LEAVE_SECONDS = 60.0  # more than Ray Train takes to start workers, and to end them

Say = Callable[[str], None]
_ENVIRONMENT = threading.Lock()  # several sessions may start workers at the same time


AWAY_SECONDS = 40.0  # Ray ends this process, with no word and status 1, when its head is away for 60 s
HEAD_SECONDS = 4.0  # between two looks at the head, and for its answer


@dataclass(eq=False)
class Reached:
    """The cluster to which this process is connected: the address of its head, and this node as Ray lists it.

    `is_cut_off` is set once the head has not answered for AWAY_SECONDS, and `away_since` by the first such look.
    """

    address: str
    node: dict[str, Any]
    is_cut_off: threading.Event = field(default_factory=threading.Event)
    away_since: float | None = None

    @classmethod
    def now(cls) -> "Reached":
        """Return the cluster that is connected now."""
        context = ray.get_runtime_context()
        here = context.get_node_id()
        return cls(context.gcs_address, next((node for node in ray.nodes() if node["NodeID"] == here), {}))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within the block, an error of Ray's own is one of ours, which says whether the cluster is lost."""
        try:
            yield
        except ray.exceptions.RayError as error:
            raise self.lost(error) from error
        if self.is_cut_off.is_set():
            raise self._cut_off("its head is away")

    def look(self, if_cut_off: Callable[[], object]) -> None:
        """Look at the head; call `if_cut_off` once it has been away for long."""
        now = time.monotonic()
        if head_answers(self.address, HEAD_SECONDS):
            self.away_since = None
        elif self.away_since is None:
            self.away_since = now
        elif now - self.away_since > AWAY_SECONDS:
            self.is_cut_off.set()
            if_cut_off()

    def lost(self, error: ray.exceptions.RayError) -> Error:
        """Return the error of a process that the driver has lost: with the cluster, or alone."""
        is_there = not self.is_cut_off.is_set() and head_answers(self.address) and answers_at(self.node)
        if is_there:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            return WorkerError(
                f"a process on this node that connects the driver with the workers was lost: {first.rstrip('.')}; "
                "run the same command again: it resumes"
            )
        return self._cut_off(type(error).__name__)

    def _cut_off(self, why: str) -> ClusterLost:
        return ClusterLost(
            f"the Ray at {self.address} was lost: it no longer answers ({why}); "
            "run the job again once there is a Ray: it resumes"
        )


@dataclass(eq=False)
class StartedWorkers:
    """Workers on Ray, with torch imported and their resources held; they run one job at a time."""

    trainer: ControlledTrainer
    channel: Any
    each: Resources
    verbose: bool
    reached: Reached
    remains: tuple[str, ...] = ()  # what the last job left behind in their processes
    imported: tuple[str, ...] = ()  # the source files of user code that they have imported
    is_aborted: bool = False
    is_interrupted_twice: bool = False
    _number: int = 0

    def run(
        self,
        job: Job,
        claimed: "RunDir",
        rows: Mapping[str, int],
        monitor: "Monitor",
        faults: "Faults",
        is_last: bool = False,
    ) -> None:
        """Run a job to its end on the first `job.workers` of these workers; `is_last` says that no other follows.

        Raises StopRequested if the user stopped the job, else the error that ended it. The workers go on, unless
        the caller was interrupted or Ray Train has given up.
        """
        from dp_ray.monitor.monitor import listening

        why = job.why_restarts(self.each.get("GPU", 0))
        if why and job.on_lost_worker == "go_on" and job.max_workers > 1:
            monitor.take(Note(f"on_lost_worker: with {why}, all workers restart where one is lost"))
        terms = self._terms(
            job,
            is_last,
            retries=job.retries,
            can_stop=job.task != "evaluate" and not job.finds_shards,
            outlives=None if why else job.retries,
            step=job.timeouts.step,
            needs_all=job.sync_batchnorm,
        )
        monitor.take_control(RayNodeControl(self.channel, self._number))
        self.trainer.when_ended(monitor.end.has_come.set)
        run = {"run_dir": claimed.storage.location, "token": claimed.token}
        packed = self._packed(RUN, job, **run, step_seconds=job.timeouts.step, faults=faults, rows=rows)
        waits = repeated("waits", LOOK_SECONDS, lambda: monitor.waits.look(lambda: free_text(self.each)))
        head = repeated("head", HEAD_SECONDS, lambda: self.reached.look(monitor.end.has_come.set))
        try:
            with self.reached.kept(), waits, head:
                ray.get(self.channel.begin.remote(terms, packed))
                import_module("ray.dag")  # while there is time: ray.shutdown would import it
                gauges = gauged(job.run_name, monitor.progress, lambda: len(monitor.incidents.log.interruptions))
                with gauges, listening(monitor, lambda wait: receive(self.channel, wait), self._abort):
                    monitor.end.has_come.wait()
                if not self.trainer.has_ended and not self.reached.is_cut_off.is_set():
                    ray.get(self.channel.finish.remote(self._number))
        except BaseException as error:
            self.is_interrupted_twice = isinstance(error, KeyboardInterrupt) and monitor.planned_stop.is_asked
            self._abort()
            raise
        self._check_end(monitor)

    def why_anew(self, job: Job) -> str:
        """Say why a job needs workers that are started anew, since some were lost; "" if it does not."""
        if not self._number:
            return ""  # they are about to start
        with self.reached.kept():
            lost = set(range(job.max_workers)) & ray.get(self.channel.lost.remote())
        if len(lost) == job.max_workers:
            return "those that the job takes are lost"
        if lost and (why := job.why_restarts(self.each.get("GPU", 0))):
            return f"some that the job takes are lost, and it needs all of them ({why})"
        return ""

    def begin_serving(self, keys: WorkerKeys, is_last: bool) -> int:
        """Have all workers take calls of parallel modules, and return the number by which that ends."""
        terms = self._terms(keys, is_last, can_stop=False, outlives=math.inf)
        with self.reached.kept():
            ray.get(self.channel.begin.remote(terms, self._packed(SERVE, keys)))
        return self._number

    def _terms(self, keys: WorkerKeys, is_last: bool, **others: Any) -> Terms:
        """Return the terms of the next job, or of parallel modules."""
        self._number += 1
        rejoin = max(keys.timeouts.rejoin, SIGNS * beat_interval(keys.max_workers))
        return Terms(self._number, keys.max_workers, is_last=is_last, rejoin=rejoin, **others)

    def _packed(self, task: str, keys: WorkerKeys, **others: Any) -> list[Any]:
        """Return a reference to an Assignment of the keys, their `env`, and the folders of the script's own modules.

        Ray might write what is apart to a disk, and `env` with it. Folders are needed before the rest is unpacked.
        """
        from dp_ray.cluster.worker import Assignment

        backend = backend_of(keys, self.each.get("GPU", 0))
        assigned = Assignment(task, keys.model_copy(update={"env": {}}), backend, **others)
        return [put_apart(shipment(assigned, ray.cloudpickle.CloudPickler)), keys.env, own_folders()]

    def _check_end(self, monitor: "Monitor") -> None:
        if monitor.end.finished:
            self.take_end(monitor.end.finished)
            if any(worker.is_stopped for worker in monitor.end.finished):
                raise StopRequested("stopped as it was asked")
            return
        if monitor.planned_stop.is_asked and (monitor.failed is None or monitor.failed.is_lost_peer):
            raise StopRequested("stopped as it was asked")
        raise self.cause(monitor.failed, monitor.end.gave_up) from None

    def take_end(self, finished: Sequence[Finished]) -> None:
        """Note what the workers say at the end of a job, or of what they served."""
        self.remains = tuple(sorted({remain for worker in finished for remain in worker.remains}))
        self.imported = tuple({module for worker in finished for module in worker.imported})

    def cause(self, failed: Failed | None, gave_up: GaveUp | None = None) -> Error:
        """Return the error that ended the job: the controller's, else lost workers, else a worker's first one."""
        failure = self.trainer.failure() if self.trainer.has_ended else None
        cause = getattr(failure, "controller_failure", None)
        if isinstance(cause, Error):
            return cause
        if isinstance(failure, ray.exceptions.RayError):
            return self.reached.lost(failure)
        if gave_up is not None and (died := gave_up.died):
            says = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(died.items()))
            return WorkerError(f"workers were lost, more often than retries allows: {says}")
        if failed:
            return error_of(failed, self.verbose)
        if cause is not None:
            return WorkerError(f"the workers could not be started: {why_failed(cause)}")
        return Error(str(failure or "the workers have ended"))

    @property
    def is_over(self) -> bool:
        """Whether these workers have ended."""
        return self.is_aborted or self.trainer.has_ended

    @property
    def why_over(self) -> str:
        """Why these workers have ended."""
        if self.is_aborted:
            return "the last ones were ended at once"
        failure = self.trainer.failure()
        return why_failed(getattr(failure, "controller_failure", failure)) if failure else "the last ones have ended"

    def close(self, seconds: float) -> bool:
        """Have the workers leave, and wait for it; after so many seconds end them. Return whether they have left.

        Workers that had to be ended may keep their resources until the connection ends. Those that were ended before,
        maybe in a connection that has ended too, have not left.
        """
        if self.is_aborted:
            return False
        if not self.is_over and ray.is_initialized():  # without a connection, a call would start another Ray
            ray.get(self.channel.close.remote())
            self.trainer.wait(seconds)
        has_left = self.trainer.has_ended
        self._abort()
        return has_left

    def _abort(self) -> None:
        """End the workers at once."""
        self.is_aborted = True
        self.trainer.abort()


def start_workers(
    keys: WorkerKeys,
    folder: str,
    is_own: bool,
    verbose: bool,
    say: Say,
    is_first: bool = True,
) -> StartedWorkers:
    """Start workers on the Ray that is connected; does not wait for them.

    `say` gets lines on an unknown Ray, on what they must wait for, and if they take no GPU where an autoscaler might
    add some.
    `folder` is for Ray Train's own files; `is_own` says that its Ray, or the connection to it, ends with the workers,
    `is_first` that no others were started in that connection.
    Raises ClusterError if they can never fit.
    """
    each = worker_resources(keys)
    reached = Reached.now()
    with reached.kept():
        for told in (unknown_ray(), without_gpus(keys, each), check_can_run(keys, each)):
            if told:
                say(told)
        channel = open_channel(keys.max_workers, keeps_idle=not each.get("GPU", 0))
        node_id = ray.get_runtime_context().get_node_id()
        task = SERVE if isinstance(keys, ModuleKeys) else RUN
        config = WorkerConfig(channel, is_own and not verbose, node_id, imports=task)
        trainer = launch(keys, each, config, folder, is_own, is_first, verbose)
        return StartedWorkers(trainer, channel, each, verbose, reached)


def check_can_run(keys: WorkerKeys, each: Resources) -> str | None:
    """Return what workers must wait for, None if nothing; raise an Error if they can never run on this Ray.

    GPUs that are named as the machine's can be looked for here if all workers will run on this machine.
    """
    if keys.devices and not keys.own_gpus:
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        if alive == [ray.get_runtime_context().get_node_id()] and not autoscales():
            check_machine("devices", keys.devices)
    return check_fits(keys, each)


def free_text(each: Resources) -> str:
    """Say what a worker needs, and how much of it the cluster has free; as far as Ray answers."""
    if not each:
        return ""
    needs = f" (each needs {resources_text(each)})"
    try:
        free, there = ray.available_resources(), ray.cluster_resources()
    except Exception as error:  # Ray's own of many types: the connection may end meanwhile
        return f"{needs}; the cluster does not say what is free: {type(error).__name__}"
    shares = ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in each)
    return f"{needs}; free in the cluster are {shares}"


def launch(
    keys: WorkerKeys,
    each: Resources,
    config: WorkerConfig,
    folder: str,
    is_own: bool,
    is_first: bool,
    verbose: bool,
) -> ControlledTrainer:
    """Start the workers with the resources `each`, and return the trainer that keeps them; it does not wait.

    Ray Train's own files go to `folder`, a temporary one of the driver.
    """
    channel, most = config.channel, keys.max_workers
    wanted = WorkerDemand(
        min_workers=keys.min_workers,
        max_workers=most,
        each=each,
        placement=keys.placement,
        accelerator_type=keys.accelerator_type,
        capacity_seconds=keys.timeouts.capacity,
    )
    trainer = ControlledTrainer(
        train_loop_per_worker,
        train_loop_config={"worker": config},
        torch_config=WorkerBackendConfig(),
        scaling_config=ScalingConfig(
            num_workers=(keys.min_workers, most) if keys.min_workers != most else most,
            use_gpu=each.get("GPU", 0) > 0,
            resources_per_worker=dict(each),
            placement_strategy=keys.placement,
            accelerator_type=keys.accelerator_type,
        ),
        run_config=RunConfig(
            name="dp_ray",
            storage_path=folder,
            logging_config=LoggingConfig("INFO" if verbose else "CRITICAL"),
        ),
        scaling=ElasticScalingPolicy(wanted, channel),
        restarts=RestartPolicy(channel),
        start=WorkersStart(dict(keys.env), channel),
        is_own=is_own,
        is_first=is_first,
    )
    variables = {key: value for key, value in TRAIN_ENVIRONMENT.items() if key not in os.environ}  # the user's stay
    with _ENVIRONMENT, environment(variables):
        trainer.start()
    return trainer


def backend_of(job: WorkerKeys, gpus_per_worker: float) -> str:
    """Return the backend of the process group of a job, or of parallel modules, on workers of so many GPUs each.

    Workers with a fraction of a GPU may share one, which NCCL refuses ("Duplicate GPU"). gloo takes CUDA tensors in
    all collectives used here (broadcast, all_reduce, all_gather, all_to_all), by way of the host's memory. Beside
    NCCL it moves what is on the CPU, as Python objects are: they need not wait for a GPU.
    """
    may_share = 0 < gpus_per_worker < 1 and job.max_workers > 1
    return "gloo" if may_share or not job.takes_gpus(gpus_per_worker) else "cpu:gloo,cuda:nccl"


def check_can_be_shipped(job: Job) -> None:
    """Raise JobError, which names the key, if a Python object of the job cannot be pickled for the workers."""
    for key, given in job.targets.items():
        try:
            check_packs(given, ray.cloudpickle.CloudPickler)
        except Exception as error:
            raise refused(
                key, given, error, lambda value: check_packs(value, ray.cloudpickle.CloudPickler)
            ) from error


@dataclass
class RayNodeControl(NodeControl):
    """Control of workers and nodes by way of Ray, while job `number` runs."""

    channel: Any
    number: int

    def stop(self) -> None:
        """Ask all workers to stop for good, by way of the channel."""
        with contextlib.suppress(ray.exceptions.RayError):  # the run has ended already
            ray.get(self.channel.request.remote(STOP, self.number))

    def kill(self, worker: WorkerReady) -> None:
        """Kill a worker's process, by a Ray task on its node; this does not wait for it."""
        there = NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
        ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(worker.pid)

    def is_gone(self, node_id: str) -> bool:
        """Return whether a node is not alive by Ray's list, or does not take a connection."""
        return not nodes_that_answer({node_id})


def end_process(pid: int) -> None:
    """Kill a worker's process on this node."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


GAUGE_SECONDS = 2.0  # Ray itself reports every 10 s


@contextmanager
def gauged(run: str, progress: Progress, interruptions: Callable[[], int]) -> Iterator[None]:
    """Keep the gauges of a run up to date while the block runs; without an agent that exports them, do nothing."""
    if not exports_metrics():
        yield
        return
    gauges = {name: Gauge(name, text, tag_keys=("run", *tags)) for name, (text, tags) in GAUGES.items()}

    def update(is_running: bool) -> None:
        for name, tags, value in values_of(progress, interruptions(), is_running):
            gauges[name].set(value, {"run": run, **tags})

    try:
        with repeated("gauges", GAUGE_SECONDS, lambda: update(True)):
            yield
    finally:
        update(False)


def exports_metrics() -> bool:
    """Return whether any node has an agent that exports metrics; the nodes of an embedded Ray have none."""
    return any(node["Alive"] and node.get("MetricsExportPort", 0) > 0 for node in ray.nodes())
