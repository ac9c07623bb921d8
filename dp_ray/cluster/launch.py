"""Runs a job's workers on Ray: a TorchTrainer with dp_ray's policies, followed to its end."""

import contextlib
import os
import signal
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.train import LoggingConfig, RunConfig, ScalingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dp_ray.cluster.channel import open_channel, receive, send
from dp_ray.cluster.connect import address_of, check_fits, connected, train_environment, worker_resources
from dp_ray.cluster.network import BoundTorchConfig
from dp_ray.cluster.ray_internals.failures import is_death, why_failed
from dp_ray.cluster.ray_internals.train import ControlledTrainer, WorkersStart
from dp_ray.cluster.requests import END
from dp_ray.cluster.restarts import RestartPolicy
from dp_ray.cluster.scaling import ElasticScalingPolicy, answers_at
from dp_ray.cluster.scaling_decision import Wanted
from dp_ray.cluster.worker import WorkerConfig, train_loop_per_worker
from dp_ray.errors import Error, JobError, WorkerError
from dp_ray.job import Job
from dp_ray.monitor.console import Console
from dp_ray.monitor.failures import error_of
from dp_ray.monitor.faults import Fault
from dp_ray.monitor.hangs import NodeControl
from dp_ray.monitor.listening import listening
from dp_ray.monitor.messages import Starting, WorkerReady
from dp_ray.monitor.monitor import Monitor
from dp_ray.rundir.claim import RunDir
from dp_ray.system.environment import set_environment
from dp_ray.system.stop_signals import planned_stops
from dp_ray.task.step_control import StopRequested
from dp_ray.text import counted


class StartCallback(WorkersStart):
    """Reports the progress of the workers' start to the driver, and sets the job's `env` in each worker's process.

    It sets `env` before torch or user code is imported there. Ray's runtime_env must not hold the values, since Ray's
    agent logs it.
    """

    def __init__(self, env: dict[str, str], channel: Any) -> None:
        self._env = env
        self._channel = channel

    def on_placing(self, count: int) -> None:
        """Report that workers are being started."""
        send(self._channel, Starting(f"starting {counted(count, 'worker')}"))

    def on_processes(self, count: int, call: Callable[..., list[Any]]) -> None:
        """Report that the workers import torch, and set `env` in each process."""
        send(self._channel, Starting(f"{counted(count, 'worker')} importing torch"))
        if self._env:
            call(set_environment, self._env)


def run_on_ray(
    job: Job,
    claimed: RunDir,
    rows: dict[str, int],
    monitor: Monitor,
    console: Console,
    address: str | None,
    verbose: bool,
    faults: tuple[Fault, ...],
) -> None:
    """Run the job's workers on Ray to their end.

    Raises StopRequested if the user stopped the run, else the error that ended it.
    """
    is_own = not ray.is_initialized()
    keep_prints = is_own and not verbose
    monitor.begin(what_begins(address))
    with connected(job, address, verbose), train_environment(), TemporaryDirectory() as folder:
        each = worker_resources(job)
        if waiting := check_fits(job, each):
            console.say(waiting)
        check_can_be_shipped(job)
        channel = open_channel(job.max_workers)
        monitor.node_control = RayNodeControl(channel)
        here = ray.get_runtime_context().get_node_id()
        shipped = job.model_copy(update={"env": {}})  # StartCallback sets it earlier
        config = WorkerConfig(
            shipped, claimed.storage.location, claimed.token, channel, keep_prints, faults, here, rows
        )
        trainer = ControlledTrainer(
            train_loop_per_worker,
            train_loop_config={"worker": config},
            torch_config=BoundTorchConfig(backend=backend_of(job, each.get("GPU", 0))),
            scaling_config=_scaling(job, each),
            run_config=_run_config(job, folder, verbose),
            scaling=lambda given: ElasticScalingPolicy(given, _wanted_workers(job, each), channel),
            restarts=lambda given: RestartPolicy(given, job.retries, channel),
            start=StartCallback(dict(job.env), channel),
            is_own=is_own,
        )
        monitor.begin("starting Ray Train")
        try:
            # Ray has replaced our SIGTERM handler by its own, so install ours again.
            with planned_stops(monitor.ask_to_stop), listening(monitor, lambda: receive(channel), trainer.abort):
                trainer.fit()
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
            if monitor.is_stopping and (monitor.failed is None or monitor.failed.is_lost_peer):
                raise StopRequested("stopped as it was asked") from None
            raise _cause(error, monitor, verbose) from None


def what_begins(address: str | None) -> str:
    """The first phase to show: what the user waits for until Ray is there."""
    if ray.is_initialized():
        return "looking at the cluster"
    found = address_of(address)
    return f"connecting to Ray at {found}" if found else "starting Ray"


def backend_of(job: Job, gpus_per_worker: float) -> str | None:
    """The backend of the process group; None leaves the choice to Ray Train: NCCL on GPUs, else gloo.

    Workers with a fraction of a GPU may share one, which NCCL refuses ("Duplicate GPU"). gloo takes CUDA tensors in
    all collectives used here (broadcast, all_reduce, all_gather, all_to_all), by way of the host's memory.
    """
    types = {name.partition(":")[0] for name in job.devices or ()}
    if types == {"cpu", "cuda"}:
        return "cpu:gloo,cuda:nccl"
    may_share = 0 < gpus_per_worker < 1 and job.max_workers > 1
    return "gloo" if types == {"cpu"} or may_share else None


def check_can_be_shipped(job: Job) -> None:
    """Raise JobError, which names the key, if a Python object of the job cannot be pickled for the workers."""
    for key, given in job.targets.items():
        try:
            with open(os.devnull, "wb") as nowhere:
                ray.cloudpickle.dump(given, nowhere)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            advice = "give a target instead, which each worker calls for itself"
            raise JobError(f"{key}: cannot be pickled for the workers: {why}; {advice}") from error


def _scaling(job: Job, each: dict[str, float]) -> ScalingConfig:
    elastic = job.min_workers != job.max_workers
    return ScalingConfig(
        num_workers=(job.min_workers, job.max_workers) if elastic else job.max_workers,
        use_gpu=each.get("GPU", 0) > 0,
        resources_per_worker=each,
        placement_strategy=job.placement,
        accelerator_type=job.accelerator_type,
    )


def _wanted_workers(job: Job, each: dict[str, float]) -> Wanted:
    return Wanted(
        min_workers=job.min_workers,
        max_workers=job.max_workers,
        each=each,
        placement=job.placement,
        accelerator_type=job.accelerator_type,
        can_stop=job.task != "evaluate",  # an evaluation keeps nothing to resume from
        capacity_seconds=job.timeouts.capacity,
    )


class RayNodeControl(NodeControl):
    """Node control by way of Ray."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def stop(self) -> None:
        """Ask all workers to stop for good, by way of the channel."""
        with contextlib.suppress(ray.exceptions.RayError):  # the run has ended already
            ray.get(self._channel.request.remote(END))

    def kill(self, worker: WorkerReady) -> None:
        """Kill a worker's process, by a Ray task on its node; this does not wait for it."""
        there = NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
        ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(worker.pid)

    def is_gone(self, node_id: str) -> bool:
        """Whether a node is not alive by Ray's list, or does not take a connection."""
        return not any(node["NodeID"] == node_id and node["Alive"] and answers_at(node) for node in ray.nodes())


def end_process(pid: int) -> None:
    """Kill a worker's process on this node."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _run_config(job: Job, folder: str, verbose: bool) -> RunConfig:
    """Ray Train's own files go to a temporary folder of the driver; dp_ray writes the run directory itself."""
    return RunConfig(
        name=job.run_name,
        storage_path=folder,
        logging_config=LoggingConfig("INFO" if verbose else "CRITICAL"),
    )


def _cause(error: Exception, monitor: Monitor, verbose: bool) -> Error:
    """The error that ended the run: the controller's own, else lost workers, else the first that workers reported."""
    cause = getattr(error, "controller_failure", None)
    if isinstance(cause, Error):
        return cause
    failures = getattr(error, "worker_failures", {})
    deaths = {rank: one for rank, one in failures.items() if is_death(one)}
    if deaths:
        says = "; ".join(f"rank {rank}: {why_failed(one)}" for rank, one in sorted(deaths.items()))
        return WorkerError(f"workers were lost, more often than retries allows: {says}")
    if monitor.failed:
        return error_of(monitor.failed, verbose)
    if cause is not None:
        return WorkerError(f"the workers could not be started: {why_failed(cause)}")
    return Error(str(error))
