"""Sends to a run's trackers, after its end, what they lacked when it ended."""

from collections.abc import Iterator
from functools import partial

from dp_ray.errors import JobError, StorageError
from dp_ray.rundir.files import RESULT, RUN, read_json
from dp_ray.rundir.lease_file import last_alive
from dp_ray.storage import Storage
from dp_ray.trackers.feed import Feed
from dp_ray.trackers.memory import read_memory
from dp_ray.trackers.process import PACKAGES, TrackerProcess, check_installed
from dp_ray.trackers.run_trackers import about_run, end_all

LATE_SECONDS = 600.0


def send_late(run_dir: str) -> Iterator[str]:
    """Send what the trackers of an ended run lack; yield a line for each.

    Raises JobError if the run goes on, or has no trackers, and StorageError if they still do not answer.
    """
    run = Storage(run_dir)
    job, result = read_json(run, RUN)["job"], read_json(run, RESULT) if run.exists(RESULT) else {}
    names = [name for name in job.get("trackers") or () if name in PACKAGES]
    if not names:
        raise JobError(f"{run}: the job has no trackers but TensorBoard's files")
    if not result or last_alive(run)[0]:
        raise JobError(f"{run}: has not ended; its trackers get what they lack when it goes on")
    check_installed(names)
    said: list[str] = []
    feeds = [
        Feed(name, partial(TrackerProcess, name, about_run(job, str(run)), {}), run, said.append) for name in names
    ]
    end_all(feeds, result["status"], result["metrics"], LATE_SECONDS)
    if lacking := [feed.name for feed in feeds if not feed.is_done]:
        raise StorageError(f"{run}: {', '.join(lacking)} did not answer: {said[-1]}")
    for name in names:
        yield f"{name} has all {read_memory(run, name).next_step} steps"
