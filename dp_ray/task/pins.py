"""Pins the files of a dataset: a run reads the same ones to its end, however often it is resumed."""

import hashlib
import json
from typing import Any

from dp_ray.errors import DataError
from dp_ray.job import Job
from dp_ray.replica.sample_order import describe_blocks
from dp_ray.replica.world import World, gathered
from dp_ray.rundir.files import read_json, write_json
from dp_ray.storage import Storage
from dp_ray.text import listed

PINS = "files-of-{}.json"


def check_pins(run: Storage, key: str, dataset: Any, world: World) -> None:
    """Raise DataError, which names the files, if the dataset of `key` reads others than when the run began.

    Every rank calls this. Rank 0 writes what the run began with. Datasets without `pins` are not checked.
    """
    pins = getattr(dataset, "pins", None)
    if not isinstance(pins, dict):
        return
    name = PINS.format(key)
    digest = hashlib.sha256(json.dumps(sorted(pins.items())).encode()).hexdigest()
    if len(set(gathered(digest))) > 1:
        raise DataError(f"{key}: its files are not the same on all workers; see what each node holds")
    if run.exists(name):
        if others := list(_others(read_json(run, name), pins)):
            says = f"its files changed since the run began: {listed(others)}"
            raise DataError(f"{key}: {says}; put them back, or start a run of another name")
    elif world.rank == 0:
        write_json(run, name, pins)


def check_blocks(job: Job, dataset: Any) -> None:
    """Raise DataError, on every rank, unless all ranks have the blocks that the job shuffles in the same sizes.

    Every rank calls this. That a resumed training has the same ones is checked with its checkpoint.
    """
    if job.block_shuffle is not None and len(found := dict.fromkeys(gathered(describe_blocks(job, dataset)))) > 1:
        raise DataError(f"dataset: its blocks are not the same on all workers: {'; '.join(map(str, found))}")


def _others(there: dict[str, str], here: dict[str, str]) -> list[str]:
    """The files that differ, each with how."""
    gone = [f"{file} is not there any more" for file in there if file not in here]
    new = [f"{file} is new" for file in here if file not in there]
    changed = [f"{file} had {pin}, has {here[file]}" for file, pin in there.items() if here.get(file, pin) != pin]
    return [*changed, *gone, *new]
