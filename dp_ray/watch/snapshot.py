"""What a watched run's directory says at a moment; it imports no torch, and runs no code of the run."""

import time
from dataclasses import dataclass, field
from typing import Any

from dp_ray.errors import StorageError
from dp_ray.rundir.files import RESULT, RUN, read_json
from dp_ray.rundir.history_file import history_so_far
from dp_ray.rundir.incidents import INCIDENTS, IncidentLog, read_incidents
from dp_ray.rundir.listing import NO_RUN, ListedRun, listed_run
from dp_ray.rundir.progress_file import PROGRESS, read_progress
from dp_ray.storage import Storage

LOOK_SECONDS = {False: 1.0, True: 5.0}  # between two looks: at a disk, at an object store
ENDED = ("done", "failed", "interrupted")


@dataclass(frozen=True)
class Snapshot:
    """A run at a moment; `row` is its row in a list, `losses` those of its steps, `error` that of its result."""

    row: ListedRun
    progress: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    incidents: IncidentLog = field(default_factory=IncidentLog)
    error: str = ""

    @property
    def has_begun(self) -> bool:
        """Whether there is a run yet."""
        return self.row.status != NO_RUN

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens: the run ended, or its driver was killed, or its directory is damaged."""
        return self.has_begun and self.row.status != "running"


class Watched:
    """Reads a run's directory again and again; the history less often if reading it takes long."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._losses: list[float] = []
        self._due = 0.0

    def look(self) -> Snapshot:
        """What the directory says now; files that change while they are read are read at the next look."""
        run = self._run
        name = run.path.rstrip("/").rpartition("/")[2]
        if not _is_there(run):
            return Snapshot(ListedRun(name, NO_RUN))
        row = listed_run(run, name)
        try:
            return Snapshot(
                row,
                read_progress(run) if run.exists(PROGRESS) else {},
                self._read_losses(is_last=row.status in ENDED),
                read_incidents(run, RESULT if row.status == "done" else INCIDENTS),
                str(read_json(run, RESULT).get("error") or "") if row.status == "failed" else "",
            )
        except Exception:  # files of any content, which may be whole at the next look
            return Snapshot(row, losses=self._losses)

    def _read_losses(self, is_last: bool) -> list[float]:
        began = time.monotonic()
        if is_last or began >= self._due:
            table = history_so_far(self._run)
            has_losses = table is not None and "loss" in table.column_names
            self._losses = table.column("loss").to_pylist() if table is not None and has_losses else []
            self._due = time.monotonic() + 20 * (time.monotonic() - began)
        return self._losses


def _is_there(run: Storage) -> bool:
    try:
        return run.exists(RUN)
    except StorageError:  # an object store that does not answer for a moment
        return False
