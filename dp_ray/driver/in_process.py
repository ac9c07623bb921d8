"""Run a task with `workers: 0`: in the driver's own process, where a debugger can step into it."""

import contextlib
import copy
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from dp_ray.engine.model import devices_here
from dp_ray.engine.votes import StepControl
from dp_ray.engine.world import World
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.messages import HERE, Message, Started, WorkerReady
from dp_ray.monitor.monitor import Monitor
from dp_ray.rundir.claim import RunDir
from dp_ray.system.process import environment
from dp_ray.system.threads import planned_stops
from dp_ray.tasks.task import run_task

# Runs in threads take turns, also with what prepares a run: each changes the process's stdout, environment, random
# states and settings of torch.
ONE_AT_A_TIME = threading.RLock()


def run_in_process(job: Job, claimed: RunDir, monitor: Monitor, rows: dict[str, int]) -> None:
    """Run the task in this process, as one worker; `rows` are the lengths of the datasets, by their keys.

    It waits until no other thread runs a task.
    """
    devices = devices_here(job)
    world = World(device=devices[0], all_devices=devices)
    monitor.take(WorkerReady(HERE, world, os.getpid(), ()))

    control = DriverStepControl(monitor)

    def send(message: Message) -> None:
        with control.one_at_a_time:
            monitor.take(message)
            monitor.tick()

    def ask_to_stop(signal_name: str) -> bool:
        control.wants_stop = monitor.ask_to_stop(signal_name)
        return control.wants_stop

    with ONE_AT_A_TIME, planned_stops(ask_to_stop), contextlib.redirect_stdout(sys.stderr), environment(job.env):
        run_task(job, world, claimed.storage, send, control, rows)


REPORT_SECONDS = 0.1  # between two reports of a step that begins


@dataclass(eq=False)
class DriverStepControl(StepControl):
    """Step control in the driver's own process: it tells the monitor, ten times a second, which step begins."""

    monitor: Monitor
    attempt: str = field(default=HERE, init=False)
    _reported: float = field(default=0.0, init=False)
    # A recorder's thread sends reports, the task's thread the rest.
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock, init=False)

    def before(self, step: int) -> None:
        """Report the step that begins to the monitor, if it is time to."""
        now = time.monotonic()
        if now < self._reported + REPORT_SECONDS:
            return
        self._reported = now
        with self.one_at_a_time:
            self.monitor.take(Started(HERE, 0, step))


def with_own_model(job: Job) -> Job:
    """Return the job with a copy of its model object, as each worker on Ray has one: the caller's stays as it is.

    So do the tensors and lists among args: a model may take one as its weights, a scheduler writes into a rate. A
    dataset is only read. Raises JobError if the model object cannot be copied.
    """
    own: dict[str, Any] = {}
    for key, target in ((key, getattr(job, key)) for key in job.TARGETED if key != "dataset"):
        if isinstance(target, Target):
            own[key] = target.model_copy(update={"args": {name: _copy_of(one) for name, one in target.args.items()}})
    job = job.model_copy(update=own)
    # A loss, a step and metrics may hold the model, and have a state of their own, which training moves.
    copies: dict[int, Any] = {}
    try:
        model = job.model if isinstance(job.model, Target) else copy.deepcopy(job.model, copies)
    except Exception as error:  # a user's __deepcopy__ may raise anything
        advice = "give its class, or a function that makes it"
        raise JobError(f"model: the object cannot be copied: {type(error).__name__}: {error}; {advice}") from error
    loss, step = _copy_of(job.loss, copies), _copy_of(job.step, copies)
    metrics = {name: _copy_of(one, copies) for name, one in job.metrics.items()}
    return job.model_copy(update={"model": model, "loss": loss, "step": step, "metrics": metrics})


def with_own_objects(job: Job) -> Job:
    """Return the job with copies of its objects from Python, for a task that must leave them as they are.

    A dataset is only read, and may be large: it is not copied. What cannot be copied is taken itself.
    """
    objects = {key: getattr(job, key) for key in job.TARGETED if key != "dataset"}
    copies = {key: _copy_of(one) for key, one in objects.items() if one is not None and not isinstance(one, Target)}
    return job.model_copy(update=copies)


def _copy_of(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a copy, or the value itself if it cannot be copied; `copies` has what is copied already."""
    try:
        return copy.deepcopy(value, copies)
    except Exception:  # a user's __deepcopy__ may raise anything
        return value
