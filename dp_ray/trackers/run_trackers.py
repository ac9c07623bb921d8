"""The trackers of a run: fed while it runs, and ended with it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dp_ray.job import Job
from dp_ray.rundir.differences import dotted
from dp_ray.secrets import hide, hide_in
from dp_ray.storage import Storage
from dp_ray.trackers.feed import Ending, Feed
from dp_ray.trackers.process import PACKAGES, TrackerProcess

END_SECONDS = 30.0
STOP_SECONDS = 5.0  # after Ctrl-C


class RunTrackers:
    """The feeds of a run's trackers; without any, nothing happens."""

    def __init__(self, job: Job, run: Storage, say: Callable[[str], None]) -> None:
        names = [name for name in job.trackers or () if name in PACKAGES]
        about = about_run(job.describe(), str(run)) if names else {}
        self._feeds = [Feed(name, partial(TrackerProcess, name, about, job.env), run, say) for name in names]

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take rows of the history, without waiting."""
        for feed in self._feeds:
            feed.add(rows)

    def close(self) -> None:
        """Do nothing: the end of the run comes after its files are whole, with `finish`."""

    def finish(self, status: str, metrics: Mapping[str, float]) -> None:
        """End the trackers' runs; those that do not answer are left after a while."""
        end_all(self._feeds, status, metrics, END_SECONDS if status == "done" else STOP_SECONDS)


def end_all(feeds: Sequence[Feed], status: str, metrics: Mapping[str, float | None], seconds: float) -> None:
    """End the runs of several trackers, all within the same seconds."""
    until = time.monotonic() + seconds
    known = {name: value for name, value in metrics.items() if value is not None}
    for feed in feeds:
        feed.end(Ending(status, known), until)
    for feed in feeds:
        feed.leave()


def about_run(described: Mapping[str, Any], run_dir: str) -> dict[str, Any]:
    """What a tracker is told of a run when it opens: name, parameters and tags, without secrets.

    A list is one parameter, as JSON. The values of env are kept nowhere.
    """
    told = dotted(hide_in(described))
    kept = [(key, value) for key, value in told if "env" not in key.split(".") and value is not None]
    params = {key: value if isinstance(value, int | float) else _text(value) for key, value in kept}
    tags = {"dp_ray.task": str(described["task"]), "dp_ray.run_dir": hide(run_dir)}
    return {"name": hide(described["name"]), "params": params, "tags": tags}


def _text(value: Any) -> str:
    return hide(value if isinstance(value, str) else json.dumps(value, default=str))
