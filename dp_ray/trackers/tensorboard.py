"""The history of a training as TensorBoard scalars, in the run directory's `tensorboard`."""

import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyarrow import fs as pafs

from dp_ray.storage import Storage
from dp_ray.system.imports import postponed
from dp_ray.system.process import OWNER, own_folder

with postponed("tensorboardX"):  # it imports boto3 where that is installed; predictions never use it
    import tensorboardX

TENSORBOARD = "tensorboard"
NOT_SCALARS = {"step", "epoch", "rows"}
FLUSH_SECONDS = 10.0


class TensorBoardWriter:
    """A writer of scalars as they arrive; a repeated step replaces all that was written from that step on.

    A step is one event with all of its values. The package's SummaryWriter takes ten times as long: an event for each
    value goes through a queue to a thread. A full disk ends only this writer, not the run: `metrics.parquet` holds
    the same values, and raises if it cannot.
    """

    def __init__(self, run: Storage) -> None:
        self._folder = run.child(TENSORBOARD)
        self._is_local = isinstance(run.fs, pafs.LocalFileSystem)
        self._made = contextlib.ExitStack()
        self._path = Path(self._folder.path if self._is_local else self._made.enter_context(own_folder()))
        self._writer: Any = None
        self._next = -1
        self._flushed = 0.0
        self._is_broken = False

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the scalars of some rows of the history."""
        if self._is_broken:
            return
        event, summary_of = tensorboardX.proto.event_pb2.Event, tensorboardX.proto.summary_pb2.Summary
        try:
            for row in rows:
                step = row["step"]
                if self._writer is None or step < self._next:
                    self._open(step)
                self._next = step + 1
                summary = summary_of()
                for name, value in row.items():
                    if name not in NOT_SCALARS and value is not None:
                        summary.value.add(tag=_tag(name), simple_value=float(value))
                self._writer.write_event(event(wall_time=time.time(), step=step, summary=summary))
            if self._writer is not None and time.monotonic() >= self._flushed + FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()
        except OSError:
            self._is_broken = True

    def close(self) -> None:
        """Write the remaining scalars; an object store gets the files only now."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
        if not self._is_local and self._path.exists():
            files = [path for path in self._path.iterdir() if path.name != OWNER]
            if files:
                self._folder.create()
            for path in files:
                pafs.copy_files(str(path), self._folder.file(path.name), destination_filesystem=self._folder.fs)
        self._made.close()

    def _open(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close()
        suffix = f".{time.time_ns()}"  # the writer's own file name has only whole seconds
        self._path.mkdir(parents=True, exist_ok=True)
        self._writer = tensorboardX.event_file_writer.EventsWriter(str(self._path / "events"), suffix)
        log, event = tensorboardX.proto.event_pb2.SessionLog, tensorboardX.proto.event_pb2.Event
        # It replaces what was written from this step on.
        self._writer.write_event(event(wall_time=time.time(), step=step, session_log=log(status=log.START)))


@functools.cache
def _tag(name: str) -> str:
    """Return the name as TensorBoard takes it."""
    return str(tensorboardX.summary.scalar(name, 0.0).value[0].tag)
