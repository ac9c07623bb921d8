"""The run that `--overwrite` replaces: it is kept until the new one has done a step.

It waits aside under the name `.NAME.replaced`, beside the new run. A killed driver leaves both; the next one puts the
old run back, or removes it if the new one holds work. An object store cannot rename: there the old run is removed at
once.
"""

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass

from dp_ray.errors import JobError, StorageError
from dp_ray.job.job import Job
from dp_ray.job.targets import paths_of
from dp_ray.rundir import files
from dp_ray.rundir.files import RUN
from dp_ray.rundir.start import files_of_start
from dp_ray.storage import Storage
from dp_ray.text import hide


@dataclass(frozen=True)
class ReplacedRun:
    """The run that was in the directory `run` before the one that is there now; it may not exist."""

    run: Storage

    @property
    def exists(self) -> bool:
        """Whether it waits aside."""
        return self.run.is_local and os.path.isdir(self._aside)

    def keep(self) -> bool:
        """Free the name of the run: rename its folder, or remove it; returns whether it waits aside now.

        A link to a folder, a mounted disk, and what is on an object store are removed.
        """
        if self.exists:  # then what is here has not begun
            self.run.remove()
            return True
        if self.run.is_local and self.run.exists(RUN) and not os.path.islink(self.run.path):
            with suppress(OSError):
                os.rename(self.run.path, self._aside)
                return True
        self.run.remove()
        return False

    def returns(self, steps_done: int) -> bool:
        """Return whether it is to be put back: the new run has done no step, as far as is known, and kept nothing."""
        return not (steps_done or files.is_finished(self.run) or files.holds_work(self.run))

    def settle(self, steps_done: int) -> str:
        """Put it back, or remove it if the new run has begun; returns a line on that."""
        if self.returns(steps_done):
            self.restore()
            return "the run that was there before is back, since the one that was to replace it did no step"
        self.discard()
        return "the run that it replaces is removed"

    def discard(self) -> None:
        """Remove it."""
        try:
            os.rename(self._aside, self._left())  # first, so that a crash leaves no part of it to be put back
        except OSError as error:
            raise StorageError(f"{self._aside}: cannot be removed: {error}") from error
        self._clear()

    def restore(self) -> None:
        """Put it back under its name, in place of the new one; it is never removed, whatever fails."""
        left = self._left()
        try:
            is_there = os.path.isdir(self.run.path)
            if is_there:
                os.rename(self.run.path, left)
            try:
                os.rename(self._aside, self.run.path)
            except OSError:  # another driver was first, and what is there is the old run
                if is_there:
                    os.rename(left, self.run.path)
                raise
        except OSError as error:
            raise StorageError(f"{self.run}: the run that was there before cannot be put back: {error}") from error
        self._clear()

    @property
    def _aside(self) -> str:
        return self.run.parent.file(f".{self.run.name}.replaced")

    def _left(self) -> str:
        """Return a new name for what is to be removed."""
        return self.run.parent.file(f".{self.run.name}.removed-{uuid.uuid4().hex[:8]}")

    def _clear(self) -> None:
        """Remove what is to be removed, also what killed drivers left of it."""
        for name in os.listdir(self.run.parent.path):
            if name.startswith(f".{self.run.name}.removed-"):
                self.run.parent.child(name).remove()


def check_reads_nothing_of(run: Storage, job: Job) -> None:
    """Raise JobError if the job reads files of a run that it is to replace: it would delete them first.

    They are those of `init_from`, and each path among the args of targets and in datasets from Python.
    """
    if not run.exists(RUN):
        return
    starts = [] if job.init_from is None else files_of_start(job.init_from)
    for key, location in [*(("init_from", file) for file in starts), *paths_of(job)]:
        if run.holds(location):
            raise JobError(
                f"{key}: {hide(location)} lies in {run}, which --overwrite (overwrite=True) would delete before it "
                "is read; give the new run another name (--name, name=), or copy what it reads to another place first"
            )
