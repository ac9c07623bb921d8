"""Pins the files of a dataset: a run reads the same ones to its end, however often it is resumed."""

import hashlib
import json
from typing import Any

from dp_ray.errors import DataError
from dp_ray.job import Job
from dp_ray.replica.sample_order import describe_blocks
from dp_ray.replica.world import World, gathered
from dp_ray.rundir.files import read_json, write_json
from dp_ray.secrets import hide_in
from dp_ray.storage import Storage
from dp_ray.text import listed

PINS = "files-of-{}.json"


def check_pins(run: Storage, key: str, dataset: Any, world: World) -> None:
    """Raise DataError, which names the files, if the dataset of `key` reads others than when the run began.

    Every rank calls this. Rank 0 writes what the run began with, and of a retry what the files are now. Datasets
    without `pins` are not checked.
    """
    pins = getattr(dataset, "pins", None)
    if not isinstance(pins, dict):
        return
    pins = hide_in(pins)  # as they are kept
    name = PINS.format(key)
    digest = hashlib.sha256(json.dumps(sorted(pins.items())).encode()).hexdigest()
    if len(set(gathered(digest))) > 1:
        raise DataError(f"{key}: its files are not the same on all workers; see what each node holds")
    there = read_json(run, name) if run.exists(name) else {}
    if there and (others := list(_others(there, pins))):
        says = f"its files changed since the run began: {listed(others)}"
        raise DataError(f"{key}: {says}; put them back, or start a run of another name")
    is_of_retry = None in there.values()
    if is_of_retry:
        gathered(None)  # all have read what rank 0 replaces now
    if world.rank == 0 and (is_of_retry or not there):
        write_json(run, name, pins)


def let_files_change(run: Storage, key: str) -> None:
    """Have the next attempt take the files of a dataset as they are now: they were mended. Their names stay."""
    name = PINS.format(key)
    if run.exists(name):
        write_json(run, name, dict.fromkeys(read_json(run, name)))


def check_blocks(job: Job, dataset: Any) -> None:
    """Raise DataError, on every rank, unless all ranks have the blocks that the job shuffles in the same sizes.

    Every rank calls this. That a resumed training has the same ones is checked with its checkpoint.
    """
    if job.block_shuffle is not None and len(found := dict.fromkeys(gathered(describe_blocks(job, dataset)))) > 1:
        raise DataError(f"dataset: its blocks are not the same on all workers: {'; '.join(map(str, found))}")


def _others(there: dict[str, str | None], here: dict[str, str]) -> list[str]:
    """The files that differ, each with how; of None any contents are good."""
    gone = [f"{file} is not there any more" for file in there if file not in here]
    new = [f"{file} is new" for file in here if file not in there]
    both = [(file, pin, here[file]) for file, pin in there.items() if pin is not None and file in here]
    changed = [f"{file} {_change(before, now)}" for file, before, now in both if before != now]
    return [*changed, *gone, *new]


def _change(before: str, now: str) -> str:
    """What is another about a file: its size, or only its version."""
    sizes = [pin.partition(",")[0] for pin in (before, now)]
    return f"had {sizes[0]}, has {sizes[1]}" if sizes[0] != sizes[1] else f"was written again ({before}, now {now})"
