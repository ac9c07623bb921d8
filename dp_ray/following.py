"""Sets up the monitor of a run directory; it continues the reports and incidents of the run's earlier drivers."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from dp_ray.errors import StorageError
from dp_ray.job import Job
from dp_ray.monitor.console import Console
from dp_ray.monitor.monitor import Monitor
from dp_ray.monitor.progress_writer import progress_noted
from dp_ray.monitor.recent import RecentHistory
from dp_ray.monitor.tensorboard import TensorBoardWriter
from dp_ray.monitor.writers import Writer, Writers
from dp_ray.plan.split import Split
from dp_ray.plan.work import Done, Range
from dp_ray.replica.world import World
from dp_ray.results.output_parts import reading
from dp_ray.results.shape_journal import REPORTS, Journal, read_journal
from dp_ray.results.shape_recorder import ShardSpan
from dp_ray.results.shape_reports import ReportFile, read_spans
from dp_ray.results.shapes import Seen
from dp_ray.results.short import relative
from dp_ray.results.step_time_files import TIMES, StepTimeWriter
from dp_ray.rundir import ledger
from dp_ray.rundir.checkpoint import CHECKPOINTS, steps_of
from dp_ray.rundir.claim import RunDir
from dp_ray.rundir.files import SHAPES
from dp_ray.rundir.incidents import IncidentLog, read_incidents
from dp_ray.storage import Storage
from dp_ray.trackers.run_trackers import RunTrackers


@contextmanager
def monitoring(
    job: Job, split: Split, claimed: RunDir, console: Console, shapes: bool, trackers: RunTrackers
) -> Iterator[Monitor]:
    """A monitor for the block; when the block ends, also by an error, the file of shape reports is complete."""
    error: BaseException | None = None

    def save_incidents(incidents: IncidentLog) -> None:
        with contextlib.suppress(StorageError):  # on a full disk, the outputs or the checkpoints raise the error
            incidents.save(claimed.storage)

    reported = _reported(job, claimed.storage)
    with claimed.storage.writing(SHAPES) as stream:
        incidents = read_incidents(claimed.storage) if claimed.is_resumed else IncidentLog()
        file, writer = ReportFile(stream), Writers(_writers(job, claimed.storage, trackers))
        journal = Journal(claimed.storage.child(REPORTS))
        monitor = Monitor(
            job,
            split,
            file,
            writer,
            console,
            shapes,
            incidents=incidents,
            save_incidents=save_incidents,
            journal=journal,
            times=StepTimeWriter(claimed.storage.child(TIMES)),
            run_dir=relative(str(claimed.storage)),
        )
        monitor.restore(reported)
        try:
            with console.live(monitor.progress), progress_noted(claimed.storage, monitor.progress):
                yield monitor
        except BaseException as raised:
            error = raised
        monitor.close()
    claimed.storage.child(REPORTS).remove()
    if error is not None:
        raise error


def _writers(job: Job, run: Storage, trackers: RunTrackers) -> Iterator[Writer]:
    """What writes the rows of the history, besides the workers."""
    if job.trackers is None or "tensorboard" in job.trackers:
        yield TensorBoardWriter(run)
    yield RecentHistory(run)
    yield trackers


def _reported(job: Job, run: Storage) -> list[tuple[World, Seen, ShardSpan]]:
    """The shape reports of earlier attempts, only of steps and shards whose work is kept."""
    done = Done([*ledger.done_ranges(ledger.committed(run)), *_trained(job, run)])
    spans = read_journal(run.child(REPORTS), done)
    if run.exists(SHAPES):
        with reading(run, SHAPES) as file:
            spans += read_spans(file, done)
    return sorted(spans, key=lambda one: one[2].first_step)


def _trained(job: Job, run: Storage) -> list[Range]:
    """The steps before the newest checkpoint, from which a training resumes."""
    steps = steps_of(run.child(CHECKPOINTS)) if job.task == "train" else []
    return [Range(0, steps[-1], 0, job.num_shards)] if steps else []
