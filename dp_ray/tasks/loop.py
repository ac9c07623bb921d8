"""The steps of a task on one worker: begin at `Run.steps`.

A run has steps, a step has shards, and in a training an update ends it. `Run` is what all tasks share: it notes and
times each step, measures its shards, and reports both to the driver.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from dp_ray.engine.clock import clock_on
from dp_ray.engine.forward.step import StepEnd, StepOutput
from dp_ray.engine.loads.loader import StepTimes
from dp_ray.messages import Sizes, WorkerTimes
from dp_ray.plan.split import Shard, Split
from dp_ray.process.profiling import StepProfiler
from dp_ray.tasks.setup import Context
from dp_ray.telemetry.shapes import Probe, Recorder, encode_sizes
from dp_ray.tensors.tree import sizes


def times_of(context: Context) -> StepTimes:
    """Return the times of the worker's steps; their clock also knows how far the GPU is in a late step."""
    times = StepTimes(clock_on(context.world.device))
    context.control.runs_on(times.clock)
    return times


class Run:
    """The steps of a task on one worker, whose shapes and times it reports; use it in a `with` block.

    `called` is the module that the task calls: it is measured within the block. Set `stops` in a step to end with it.
    """

    def __init__(self, context: Context, called: nn.Module, split: Split, times: StepTimes) -> None:
        job, world, self._control = context.job, context.world, context.control
        self._send, self._rank, self._end = context.send, world.rank, split.total_steps
        self._times, self._clock = times, times.clock
        self.stops = False
        with ExitStack() as parts:
            # The recorder ends last: it sends what the others leave to it.
            self.recorder = parts.enter_context(Recorder(world, context.send, attempt=self._control.attempt))
            self.probe = parts.enter_context(Probe(called, job.batch_dim))
            if self._control.slows:
                parts.callback(called.register_forward_pre_hook(self._slow).remove)
            self.profiler: StepProfiler | None = None
            if job.profile is not None:
                profiler = StepProfiler(job.profile, world, context.run, self._end, context.send)
                self.profiler = parts.enter_context(profiler)
            self._parts = parts.pop_all()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: Any) -> None:
        self._parts.__exit__(*error)

    def steps(self, start: int = 0, goes_on: Callable[[int], bool] | None = None) -> Iterator[int]:
        """Yield the steps from `start` on, to the last one or the one that `stops`; time each, and report that.

        `goes_on` is for a task in which this worker may have no shard left in a step. It is asked before each step,
        and notes and profiles it if there is; False ends the steps. A step without rows is not timed then.
        """
        control, clock, recorder, profiler = self._control, self._clock, self.recorder, self.profiler
        if self.stops:
            return
        self._times.begin()
        for step in range(start, self._end):
            if goes_on is None:
                control.before(step)
                if profiler is not None:
                    profiler.before(step)
            elif not goes_on(step):
                self.stops = True
                return
            yield step
            rows, recorder.rows = recorder.rows, 0
            timed = clock.end_step(step, rows) if rows or goes_on is None else []
            if timed:
                recorder.on_times(timed)
            if profiler is not None:
                profiler.after(step, timed)
            if self.stops:
                return

    def on_shard(self, shard: Shard, batch: Any, step_output: StepOutput) -> None:
        """Record a shard with the sizes that the model saw, and its milliseconds."""
        seen, milliseconds = self.probe.last(shard.rows)
        if seen is None:  # the user's step bypassed the model's forward
            seen = Sizes(encode_sizes(sizes(batch)), encode_sizes(sizes(step_output.loss)), shard.rows)
            milliseconds = 0.0
        self.recorder.on_shard(shard, seen, milliseconds)

    def close(self) -> None:
        """After the last step, write its trace, and record the times that the device has come to since."""
        if self.profiler is not None:
            self.profiler.close()
        self.recorder.on_times(self._clock.rest())

    def send_times(self) -> None:
        """Send the times of the steps, and of their waits."""
        self._send(WorkerTimes(self._rank, self._times.to_json()))

    def _slow(self, *_: object) -> None:
        """Before the model's first forward of a step, sleep for as long as a fault of `--inject` asks."""
        time.sleep(self._control.take_delay(self._rank))


def shards_of_step(step: int, ran: Iterator[Any]) -> Iterator[Any]:
    """Return the shards that `ran` yields up to the end of the step; it holds none while the next one runs."""
    return iter(ran.__next__, StepEnd(step))
