"""Trace some steps of one worker with torch.profiler, for Perfetto."""

import gzip
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from dp_ray.engine.clock import Part, TimedStep
from dp_ray.engine.world import World, gathered
from dp_ray.errors import StorageError
from dp_ray.messages import Note, Send
from dp_ray.plan.costs import profiled_of
from dp_ray.storage import Storage

PROFILE = "profile"
NOT_OWN = (Part.EXCHANGE, Part.EVALUATION, Part.CHECKPOINT)  # the time in which a worker may wait for others


class StepProfiler:
    """The trace of the steps that `wanted`, a job's `profile`, names, on the rank it names.

    A step calls `before` and `after`. The trace goes to `profile/rank-R.json.gz`. If the rank is the slowest so far,
    all workers decide on it before the first of these steps: the one whose own work took longest. At the end of a
    `with` block it traces no more.
    """

    def __init__(self, wanted: str, world: World, run: Storage, total_steps: int, send: Send) -> None:
        self._wanted = profiled_of(wanted, total_steps)
        self._world = world
        self._run = run
        self._send = send
        self._own = 0.0
        self._rank: int | None = None
        self._running: profile | None = None
        self._mark: AbstractContextManager[object] | None = None

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop to trace; after an error nothing is written."""
        self._unmark()
        traced, self._running = self._running, None
        if traced is not None:
            traced.stop()

    def before(self, step: int) -> None:
        """Begin to trace, if `step` is the first one to trace that this worker runs."""
        if step not in self._wanted:
            return
        if self._rank is None:
            self._rank = self._wanted.rank
            if self._rank is None:  # the slowest so far: all workers gather, before the same step
                own = gathered(self._own)
                self._rank = own.index(max(own))
            if self._rank == self._world.rank:
                activities = [ProfilerActivity.CPU]
                if self._world.device.type == "cuda":
                    activities.append(ProfilerActivity.CUDA)
                self._running = profile(activities=activities)
                self._running.start()
        if self._running is not None:
            self._mark = record_function(f"dp_ray step {step}")
            self._mark.__enter__()  # type: ignore[no-untyped-call]

    def after(self, step: int, timed: Sequence[TimedStep] = ()) -> None:
        """Take in how long the parts of earlier steps took; end the trace, if `step` is the last one to trace."""
        self._own += sum(sum(step.seconds) - sum(step.seconds[part] for part in NOT_OWN) for step in timed)
        self._unmark()
        if step >= self._wanted.last:
            self.close()

    def close(self) -> None:
        """Write the trace, unless it is written."""
        if self._running is None:
            return
        traced, self._running = self._running, None
        traced.stop()
        folder, name = self._run.child(PROFILE), f"rank-{self._world.rank}.json.gz"
        try:
            folder.create()
            with folder.writing(name) as stream, tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary, "trace.json")  # torch writes to local paths only
                traced.export_chrome_trace(str(path))
                stream.write(gzip.compress(path.read_bytes(), 6))
        except StorageError as error:  # a trace only informs
            self._send(Note(f"the profile cannot be kept: {error}"))
        else:
            self._send(Note(f"profile: {folder.shown(name)}, for https://ui.perfetto.dev"))

    def _unmark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
