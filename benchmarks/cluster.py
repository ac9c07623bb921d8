"""An embedded Ray with Ray Train's own defaults, and a folder, both gone when the block ends."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from dp_ray.cluster.internals.core import read_variables_anew
from dp_ray.cluster.internals.variables import TMPDIR, TRAIN_VARIABLES

NUM_CPUS = 4  # logical: two workers, and room for the tasks by which Ray Data reads and writes


@contextmanager
def local_ray() -> Iterator[None]:
    """Ray in this process, as `ray.init()` gives it, with no RAY_TRAIN_ variable set.

    It has a folder of its own: where a driver died, Ray's usual one names a dead cluster, and for that Ray Train
    waits 12 seconds at the end of every run.
    """
    before = dict(os.environ)
    with scratch() as folder:
        for key in before:
            if key.startswith(TRAIN_VARIABLES):
                del os.environ[key]
        os.environ[TMPDIR] = str(folder)
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init("local", num_cpus=NUM_CPUS, log_to_driver=False, logging_level="ERROR")
            yield
        finally:
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)
            read_variables_anew()  # else the next Ray's driver demands this one's token


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
