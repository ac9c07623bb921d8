"""An embedded Ray with Ray Train's own defaults, and a folder, both gone when the block ends."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

NUM_CPUS = 4  # logical: two workers, and room for the tasks by which Ray Data reads and writes


@contextmanager
def local_ray() -> Iterator[None]:
    """Ray in this process, as `ray.init()` gives it, with no RAY_TRAIN_ variable set."""
    before = dict(os.environ)
    for key in before:
        if key.startswith("RAY_TRAIN_"):
            del os.environ[key]
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init("local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder."""
    with tempfile.TemporaryDirectory(prefix="dp-ray-bench-") as folder:
        yield Path(folder)
