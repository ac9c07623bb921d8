"""The worker of `workers: 0`: the driver's own process, where a debugger can step into a job or a module."""

import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dp_ray.engine.devices import devices_here
from dp_ray.engine.ship import pickled_copy, reached, refused
from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.job.keys import Target, WorkerKeys
from dp_ray.messages import HERE, Message, Started, StepControl, WorkerReady
from dp_ray.monitor.faults import Faults
from dp_ray.monitor.monitor import Monitor
from dp_ray.rundir.claim import RunDir
from dp_ray.system.process import environment
from dp_ray.system.threads import planned_stops
from dp_ray.tasks.task import run_task

if TYPE_CHECKING:
    from dp_ray.serving.here import ServingHere

# Runs in threads take turns, also with what prepares a run: each changes the process's stdout, environment, random
# states and settings of torch.
ONE_AT_A_TIME = threading.RLock()


class InProcess:
    """This process as the only worker."""

    is_here: ClassVar[bool] = True
    owners: ClassVar[tuple[str]] = ("here",)
    most: ClassVar[None] = None

    def accept(self, job: Job, replaces: bool) -> Job:
        """Return the job with a copy of its model object, as each worker on Ray has one: the caller's stays as it is.

        So do the args of targets: a model may take a tensor as its weights, a scheduler writes into a rate. And so do
        a loss, a step and metrics that may keep a state. Other objects are copied with these if they share with them
        what can change, as a step does that reads what a hook keeps. A dataset is only read. Raises JobError if what
        has to be copied cannot be.
        """
        return _copied(job, all_objects=False)

    def run(self, job: Job, claimed: RunDir, rows: Mapping[str, int], monitor: Monitor, faults: Faults = ()) -> None:
        """Run a job to its end; waits until no other thread runs a task. There is no worker that `faults` could hit.

        What finds the number of shards leaves all objects from Python as they are for the job that follows. But a
        dataset, which is only read and may be large, is not copied, nor what cannot be.
        """
        if job.finds_shards:
            job = _copied(job, all_objects=True)
        devices = devices_here(job)
        world = World(device=devices[0], all_devices=devices)
        monitor.take(WorkerReady(HERE, world, os.getpid(), ()))

        control = DriverStepControl(monitor)
        stops = planned_stops(control.ask_to_stop)
        with ONE_AT_A_TIME, stops, contextlib.redirect_stdout(sys.stderr), environment(job.env):
            run_task(job, world, claimed.storage, control.send, control, rows)

    def serve(self, keys: WorkerKeys) -> "ServingHere":
        """Have this process serve parallel modules."""
        from dp_ray.serving.here import ServingHere  # jobs need none of it

        return ServingHere(keys)

    def close(self) -> None:
        """Nothing was started."""


REPORT_SECONDS = 0.1  # between two reports of a step that begins


@dataclass(eq=False)
class DriverStepControl(StepControl):
    """Step control in the driver's own process: it tells the monitor, ten times a second, which step begins."""

    monitor: Monitor
    attempt: str = field(default=HERE, init=False)
    _reported: float = field(default=0.0, init=False)
    # A recorder's thread sends reports, the task's thread the rest.
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, init=False)

    def send(self, message: Message) -> None:
        """Have the monitor take in a message, and all that follows from it."""
        with self._one_at_a_time:
            self.monitor.take(message)
            self.monitor.tick()

    def ask_to_stop(self, by: str) -> bool:
        """Ask the task to stop after its step; return whether it will."""
        self.wants_stop = self.monitor.ask_to_stop(by)
        return self.wants_stop

    def before(self, step: int) -> None:
        """Report the step that begins to the monitor, if it is time to."""
        now = time.monotonic()
        if now < self._reported + REPORT_SECONDS:
            return
        self._reported = now
        with self._one_at_a_time:
            self.monitor.take(Started(HERE, 0, step))


def _copied(job: Job, all_objects: bool) -> Job:
    """Return the job with copies of its model, of the args of targets, and of what shares something with these.

    All of them are copied at once, so that what they share is one thing in the copies too.
    """
    own: dict[str, Any] = {}
    others: dict[str, Any] = {}
    kept: list[Any] = []
    for key, target in job.targets.items():
        if key in job.dataset_keys:
            kept.append(target)
            continue
        made = target
        if isinstance(target, Target):
            own |= {f"{key}.args.{name}": value for name, value in target.args.items()}
            made = None if target.is_named else target.target
        if made is not None:
            # A loss, a step and metrics may have a state, which a training moves; a plain function has none.
            has_state = key.partition(".")[0] in ("loss", "step", "metrics") and not inspect.isfunction(made)
            (own if key == "model" or has_state or (all_objects and made is target) else others)[key] = made

    shared: dict[Any, Any] = {}
    for key, value in own.items():
        reach, error = reached(value, kept)
        if error is None:
            shared |= reach
        elif key == "model" and not all_objects:
            raise refused(key, value, error, lambda part: pickled_copy(part, kept)) from error
        else:
            kept.append(value)
    reaches = {key: reached(value, kept) for key, value in others.items()}
    while meeting := [key for key, (reach, _) in reaches.items() if not reach.keys().isdisjoint(shared)]:
        for key in meeting:
            reach, error = reaches.pop(key)
            if error is None:
                shared |= reach
            elif all_objects:
                kept.append(others[key])
            else:
                raise refused(key, others[key], error, lambda part: pickled_copy(part, kept)) from error
    kept += [others[key] for key in reaches]
    try:
        own_job: Job = pickled_copy(job, [target for target in kept if target is not None])
        return own_job
    except Exception as error:  # a user's __setstate__ may raise anything
        raise refused("model", job.model, error, lambda part: pickled_copy(part, kept)) from error
