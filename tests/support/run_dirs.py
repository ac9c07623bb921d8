"""Run directories that a test claims."""

from pathlib import Path

from dp_ray.job.job import Job
from dp_ray.rundir.claim import RunDir, claim
from dp_ray.storage import Storage


def claimed_in(folder: Path | str) -> RunDir:
    return claim(Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 1}, "run"), Storage(str(folder)))
