"""Merge a worker's files of the outputs in a thread, while its loop runs.

Begin at `Merger`. `AgreedFilePlan` says which files there are; a `FileMerge` of `files.py` merges one of them.
"""

import math
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from dp_ray.engine.world import World, has_peers
from dp_ray.messages import StepControl
from dp_ray.outputs.files import AttemptOutputs, FileMerge
from dp_ray.plan.split import FilePlan, num_files
from dp_ray.rundir import ledger
from dp_ray.storage import Storage
from dp_ray.system.threads import waiting

SAMPLE_INDEX_BYTES = 8
LOOK_SECONDS = 0.5  # between two looks for new parts while the loop runs
END_SECONDS = 0.02  # the same, once it has ended; at least as long as a look takes
CHECK_SECONDS = 5.0  # between two checks whether this attempt is superseded


@dataclass(frozen=True)
class AgreedFilePlan:
    """The plan of the files of the outputs: rank 0 makes it by its first rows, for all workers and later attempts."""

    outputs: AttemptOutputs
    file_bytes: int
    world: World
    is_stopped: Callable[[], bool]

    def known(self) -> FilePlan | None:
        """Return the plan, None if rank 0 has not made it yet."""
        files = ledger.files_in(self.outputs.ledger.found(self.outputs.run.child(ledger.FILES)))
        return FilePlan(files, self.outputs.split.total_steps) if files else None

    def agree(self, row_bytes: float) -> FilePlan | None:
        """Return the plan for rows of so many bytes, or that of rank 0; None if the worker is to stop before."""
        plan = self.known()
        if plan is not None:
            return plan
        run, split, attempt = self.outputs.run, self.outputs.split, self.outputs.ledger.attempt
        if self.world.rank == 0 or not has_peers():  # workers that run one after another cannot wait for rank 0
            total = split.rows_kept * (row_bytes + SAMPLE_INDEX_BYTES)
            files = num_files(int(total), self.file_bytes, split.total_steps)
            ledger.note_files(ledger.fenced(run, attempt), attempt, files)
        looks = Looks(run, attempt)
        with waiting("rank 0, which has not run its first step yet"):
            while (plan := self.known()) is None and not self.is_stopped():
                looks.pause(END_SECONDS)
        return plan


class Looks:
    """The pauses between looks into the run directory; one raises StorageError if this attempt is superseded."""

    def __init__(self, run: Storage, attempt: str) -> None:
        self._run = run
        self._attempt = attempt
        self._checked = self._paused = time.monotonic()

    def begin(self) -> None:
        """Note that the next look begins now."""
        self._paused = time.monotonic()

    def pause(self, seconds: float, event: threading.Event | None = None) -> None:
        """Wait for so long, or as long as the last look took; `event` ends the wait."""
        now = time.monotonic()  # the look lasted since the last pause: a slow storage is asked more seldom
        if now - self._checked > CHECK_SECONDS:
            ledger.check_newest(self._run, self._attempt)
            self._checked = now
        (event or threading.Event()).wait(min(1.0, max(seconds, now - self._paused)))
        self._paused = time.monotonic()


class Merger:
    """The merging of this worker's share of the files that are not whole yet, each as its parts are committed.

    A worker without peers in its group merges the parts that exist, and never waits: it is alone, or the other ranks
    run later.
    """

    def __init__(self, outputs: AttemptOutputs, plan: AgreedFilePlan, world: World) -> None:
        self._outputs = outputs
        self._plan = plan
        self._world = world
        self._has_peers = has_peers()
        self._do_all_run = self._has_peers or world.world_size == 1
        self._looks = Looks(outputs.run, outputs.ledger.attempt)
        self._steps = 0  # that the loop has run
        self._through: float = 0  # the first step that is not merged, of the files that this worker merges
        self._most_ahead: float = math.inf
        self._enough_room: float = math.inf
        self._has_moved = threading.Event()
        self._is_waited_for = threading.Event()
        self._idle_looks = 0  # since something was merged
        self._has_ended = threading.Event()
        self._is_stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._merge_files, name="merging", daemon=True)

    def __enter__(self) -> "Merger":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._end()
        self._thread.join()

    def on_step(self, step: int) -> None:
        """Note that the loop has run `step`; raises the error of the merging, if there is one."""
        self._steps = step + 1
        self._check()

    def make_room(self, commit: Callable[[], None], control: StepControl) -> None:
        """Wait before a step while the merging is too far behind, so that little of it is left after the last step.

        `commit` is called first: what this worker holds may be what others wait for. No two workers can wait for
        each other: each waits for parts of steps before those of which it has committed all its own. It does not
        count as a hang. Raises the error of the merging, if there is one.
        """
        if not self.is_far_behind:
            return
        commit()
        self._is_waited_for.set()
        with waiting("the merging of the outputs"):
            while self._steps - self._through > self._enough_room and not control.wants_stop:
                control.touch()
                self._has_moved.wait(END_SECONDS)
                self._has_moved.clear()
                self._check()
        self._is_waited_for.clear()

    @property
    def is_far_behind(self) -> bool:
        """Whether the loop is to wait for the merging before its next step."""
        return self._steps - self._through > self._most_ahead

    def finish(self, control: StepControl) -> bool:
        """Wait until this worker's files have their names; False if it is asked to stop before.

        Raises the error of the merging, if there is one.
        """
        if self._has_peers:
            ledger.note_ended(self._outputs.run, self._outputs.ledger.attempt, self._world.rank)
        self._end()
        while self._thread.is_alive() and not control.wants_stop:
            self._thread.join(END_SECONDS)
        self._check()
        return not self._thread.is_alive()

    def _end(self) -> None:
        self._has_ended.set()
        self._is_waited_for.set()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _merge_files(self) -> None:
        """Merge this worker's files, in the thread; an error is raised in the loop."""
        try:
            while (plan := self._plan.known()) is None:
                self._pause()
            if self._do_all_run:
                num_mergers = min(plan.files, self._world.world_size)
                self._enough_room = plan.enough_room(num_mergers)
                self._most_ahead = plan.most_ahead(num_mergers)
            whole = ledger.records_in(self._outputs.ledger.parts)
            left = [number for number in range(plan.files) if number not in whole]
            for number in left[self._world.rank :: self._world.world_size]:
                with closing(FileMerge(self._outputs, plan, number, self._between)) as merge:
                    self._merge(merge)
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._reach(math.inf)  # nobody waits for what no thread merges

    def _merge(self, merge: FileMerge) -> None:
        """Merge a file; without peers, merge the parts of it that exist."""
        while True:
            before = merge.through
            self._reach(before)
            # Asked before the parts are looked for: after all workers have ended, no part is committed any more.
            have_all_ended = self._has_ended.is_set()
            if have_all_ended and self._has_peers:
                names = self._outputs.ledger.found(self._outputs.run.child(ledger.FILES))
                have_all_ended = ledger.num_ended(names) == self._world.world_size
            if self._steps > merge.first_step or self._has_ended.is_set():
                if merge.advance():
                    return
                if have_all_ended:
                    if self._do_all_run:
                        merge.refuse()
                    return
            if merge.through > before:
                self._idle_looks = 0
                self._looks.begin()  # at once: parts may have come while these were merged
            else:
                self._pause()

    def _reach(self, through: float) -> None:
        """Note how far the merging is, and wake the loop if it waits for that."""
        if through != self._through:
            self._through = through
            self._has_moved.set()

    def _pause(self) -> None:
        """Wait before the next look, which comes soon while the loop waits, or once it has ended."""
        self._between()
        if self._has_ended.is_set():
            self._looks.pause(END_SECONDS, self._is_stopped)
        elif self._is_waited_for.is_set():  # ever more seldom: other workers may take long
            self._looks.pause(min(LOOK_SECONDS, END_SECONDS * 2**self._idle_looks), self._is_stopped)
            self._idle_looks = min(self._idle_looks + 1, 10)
        else:
            self._idle_looks = 0
            self._looks.pause(LOOK_SECONDS, self._is_waited_for)

    def _between(self) -> None:
        """End the merging between two blocks of rows, if the task has ended."""
        if self._is_stopped.is_set():
            raise _Stopped


class _Stopped(Exception):
    """The request to end the merging before its files are whole."""
