"""Merges a worker's files of the outputs in a thread, while its loop runs; `AgreedFilePlan` says which files there are."""

import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing

from dp_ray.engine.votes import StepControl
from dp_ray.engine.world import World, has_peers
from dp_ray.outputs.files import FileMerge
from dp_ray.plan.order import Order
from dp_ray.plan.split import FilePlan, Split, num_files
from dp_ray.rundir.ledger import (
    FILES,
    Ledger,
    check_newest,
    fenced,
    files_in,
    note_ended,
    note_files,
    num_ended,
    records_in,
)
from dp_ray.storage import Storage
from dp_ray.system.threads import waiting

SAMPLE_INDEX_BYTES = 8
LOOK_SECONDS = 0.5  # between two looks for new parts, while the loop runs
END_SECONDS = 0.02  # the same, once it has ended; at least as long as a look takes
CHECK_SECONDS = 5.0  # between two checks whether this attempt is superseded


class AgreedFilePlan:
    """How the outputs are cut into files: rank 0 finds out by its first rows, for all workers and later attempts."""

    def __init__(
        self,
        run: Storage,
        ledger: Ledger,
        split: Split,
        file_bytes: int,
        world: World,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._run = run
        self._ledger = ledger
        self._split = split
        self._file_bytes = file_bytes
        self._decides = world.rank == 0 or not has_peers()
        self._is_stopped = is_stopped

    def known(self) -> FilePlan | None:
        """The cut, None if no worker has found out yet."""
        files = files_in(self._ledger.found(self._run.child(FILES)))
        return FilePlan(files, self._split.total_steps) if files else None

    def find(self, row_bytes: float) -> FilePlan | None:
        """The cut for rows of so many bytes, or that of rank 0; None if the worker is to stop before it is known."""
        if (known := self.known()) is not None:
            return known
        if self._decides:
            total = self._split.rows_kept * (row_bytes + SAMPLE_INDEX_BYTES)
            files = num_files(int(total), self._file_bytes, self._split.total_steps)
            note_files(fenced(self._run, self._ledger.attempt), self._ledger.attempt, files)
        looks = Looks(self._run, self._ledger.attempt)
        with waiting("rank 0, which has not run its first step yet"):
            while (known := self.known()) is None and not self._is_stopped():
                looks.pause(END_SECONDS)
        return known


class Looks:
    """The pauses between looks into the run directory; they end with an error if this attempt is superseded."""

    def __init__(self, run: Storage, attempt: str) -> None:
        self._run = run
        self._attempt = attempt
        self._checked = self._paused = time.monotonic()

    def begin(self) -> None:
        """The next look begins now."""
        self._paused = time.monotonic()

    def pause(self, seconds: float, event: threading.Event | None = None) -> None:
        """Wait for so long, or as long as the last look took; `event` ends the wait."""
        now = time.monotonic()
        if now - self._checked > CHECK_SECONDS:
            check_newest(self._run, self._attempt)
            self._checked = now
        (event or threading.Event()).wait(min(1.0, max(seconds, now - self._paused)))
        self._paused = time.monotonic()


class Merger:
    """Merges this worker's share of the files that are not whole yet, each as its parts are committed."""

    def __init__(
        self,
        run: Storage,
        ledger: Ledger,
        split: Split,
        order: Order,
        cut: AgreedFilePlan,
        world: World,
        missing: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._missing = missing
        self._run = run
        self._ledger = ledger
        self._split = split
        self._order = order
        self._cut = cut
        self._world = world
        self._has_peers = has_peers()
        self._looks = Looks(run, ledger.attempt)
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
            while self._ahead > self._enough_room and not control.wants_stop:
                control.touch()
                self._has_moved.wait(END_SECONDS)
                self._has_moved.clear()
                self._check()
        self._is_waited_for.clear()

    @property
    def is_far_behind(self) -> bool:
        """Whether the loop is to wait for the merging before its next step."""
        return self._ahead > self._most_ahead

    @property
    def _ahead(self) -> float:
        """How many steps the loop is ahead of the merging."""
        return self._steps - self._through

    def finish(self, control: StepControl) -> bool:
        """Wait until this worker's files have their names; False if it is asked to stop before.

        Raises the error of the merging, if there is one.
        """
        if self._has_peers:
            note_ended(self._run, self._ledger.attempt, self._world.rank)
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
        """What the thread runs."""
        try:
            while (cut := self._cut.known()) is None:
                self._pause()
            self._limit_loop(cut)
            whole = records_in(self._ledger.parts)
            left = [number for number in range(cut.files) if number not in whole]
            for number in left[self._world.rank :: self._world.world_size]:
                merge = FileMerge(
                    self._run, self._ledger, cut, number, self._split, self._order, self._between, self._missing
                )
                with closing(merge):
                    self._merge(merge)
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._reach(math.inf)  # nobody waits for what no thread merges

    def _limit_loop(self, cut: FilePlan) -> None:
        """Have the loop wait if it is too far ahead, unless the other workers run later."""
        if self._has_peers or self._world.world_size == 1:
            num_mergers = min(cut.files, self._world.world_size)
            self._enough_room = cut.enough_room(num_mergers)
            self._most_ahead = cut.most_ahead(num_mergers)

    def _merge(self, merge: FileMerge) -> None:
        """Merge one file, or what is there of it if no other worker runs beside this one."""
        while True:
            before = merge.through
            self._reach(before)
            have_all_ended = self._have_all_ended()  # asked first: no part is committed after that
            if self._steps > merge.first_step or self._has_ended.is_set():
                if merge.advance():
                    return
                if have_all_ended:
                    self._give_up(merge)
                    return
            if merge.through > before:
                self._idle_looks = 0
                self._looks.begin()  # at once: parts may have come while these were merged
            else:
                self._pause()

    def _reach(self, through: float) -> None:
        """Tell the loop how far the merging is."""
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

    def _give_up(self, merge: FileMerge) -> None:
        """Give up a file of which parts are missing; that is an error, unless its other workers run later."""
        if self._has_peers or self._world.world_size == 1:
            merge.refuse()

    def _have_all_ended(self) -> bool:
        """Whether no worker of this attempt commits any more parts."""
        if not self._has_ended.is_set() or not self._has_peers:
            return self._has_ended.is_set()
        return num_ended(self._ledger.found(self._run.child(FILES))) == self._world.world_size

    def _between(self) -> None:
        """Called between two blocks of rows."""
        if self._is_stopped.is_set():
            raise _Stopped


class _Stopped(Exception):
    """The merging is to end before its files are whole."""
