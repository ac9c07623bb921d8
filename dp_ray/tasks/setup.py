"""What a task sets up first: its dataset, and the weights to run.

Pins the files of a dataset: a run reads the same ones to its end, however often it is resumed.

Begin to set the bad samples of a dataset aside, if the job asks for it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dp_ray.engine.bad_samples import Reference
from dp_ray.engine.loading import Skipping, seeded_dataset
from dp_ray.engine.model import build_model, synchronise
from dp_ray.engine.quarantine import Quarantine, find_reference
from dp_ray.engine.random import has_drawn
from dp_ray.engine.sharded.rounds import sharded_model
from dp_ray.engine.sharded.state import Sharded
from dp_ray.engine.world import World, broadcast, check_rows, gathered, is_rank_0
from dp_ray.errors import DataError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.samples import describe_blocks
from dp_ray.rundir.files import read_json, write_json
from dp_ray.rundir.quarantine import QuarantineFiles, forget
from dp_ray.rundir.start import NEW_HEAD, describe_start, load_weights, open_start, read_start
from dp_ray.storage import Storage
from dp_ray.tasks.hooks import Note, Send, telling
from dp_ray.text import hide_in, listed

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


def load_dataset(job: Job, world: World, run: Storage, rows_on_driver: Mapping[str, int]) -> Any:
    """The task's dataset; every rank calls this.

    Raises DataError, on every rank, unless all ranks and the driver have a dataset of the same length, of the files
    with which the run began.
    """
    dataset = seeded_dataset(job, job.dataset_key)
    check_rows("dataset", len(dataset), rows_on_driver)
    check_pins(run, "dataset", dataset, world)
    check_blocks(job, dataset)
    return dataset


def model_to_run(job: Job, world: World, run: Storage, send: Send) -> tuple[nn.Module, Sharded | None]:
    """The model with the weights to run, and how it is sharded; None if each worker holds it whole."""
    sharded = sharded_with_weights(job, world, run, send)
    return (model_with_weights(job, world, run, send) if sharded is None else sharded.model), sharded


def sharded_with_weights(job: Job, world: World, run: Storage, send: Send) -> Sharded | None:
    """The model with the weights to run, sharded over the workers; None if each worker is to hold it whole."""
    tell = telling(world, send)
    sharded = sharded_model(job, world, tell)
    if sharded is None:
        return None
    if job.init_from is not None:
        weights = open_start(run, job.init_from, job.strict)[0]
        loaded = sharded.load_weights(weights, job.init_from, job.strict, NEW_HEAD)
        tell(describe_start(run, job.init_from) + loaded)
    elif isinstance(job.model, Target) and has_drawn(job.seed):
        tell(_untrained(job.model))
    synchronise(sharded.model)
    return sharded


def _untrained(model: Target) -> str:
    return f"untrained weights: init_from is not set (unless {model.label} loads trained ones itself)"


def model_with_weights(job: Job, world: World, run: Storage, send: Send) -> nn.Module:
    """Build the model with the weights to run, the same on every rank; rank 0 reports untrained weights."""
    model = build_model(job, world.devices)
    if job.init_from is not None:
        weights = read_start(run, job.init_from, job.strict)[0]
        loaded = load_weights(model, weights, job.init_from, job.strict)
        if world.rank == 0:
            send(Note(describe_start(run, job.init_from) + loaded))
    elif world.rank == 0 and isinstance(job.model, Target) and has_drawn(job.seed):
        send(Note(_untrained(job.model)))
    synchronise(model)
    return model


REFERENCE = "reference-of-{}.json"


class SetAside:
    """What a task sets aside of a dataset: the quarantine, and the files that keep it."""

    def __init__(
        self, job: Job, key: str, dataset: Any, reference: Reference, run: Storage, send: Send, attempt: str | None
    ) -> None:
        assert job.on_error is not None
        self._files = QuarantineFiles(run, key, job.on_error.quarantine, attempt, lambda text: send(Note(text)))
        self.quarantine = Quarantine(job, reference, self._files.keep, Skipping(job, dataset))

    def begin_evaluation(self, after: int) -> None:
        """The dataset is evaluated after step `after` of a training."""
        self._files.after = after


def set_aside(
    job: Job, key: str, dataset: Any, run: Storage, send: Send, attempt: str | None = None
) -> SetAside | None:
    """Begin to set bad samples of the dataset of `key` aside; None if the job does not. Every rank calls this."""
    if job.on_error is None:
        return None
    return SetAside(job, key, dataset, _reference(job, key, dataset, run), run, send, attempt)


def unkept_quarantine(job: Job, key: str, dataset: Any, run: Storage) -> Quarantine | None:
    """The quarantine for steps that are run again to be looked at: nothing of what it sets aside is kept."""
    if job.on_error is None:
        return None
    return Quarantine(job, _reference(job, key, dataset, run), lambda *_: None, Skipping(job, dataset))


def quarantine_of(found: SetAside | None) -> Quarantine | None:
    """Its quarantine, if there is one."""
    return None if found is None else found.quarantine


def forget_from(run: Storage, is_kept: Callable[[int, str], bool]) -> None:
    """On rank 0, remove what was set aside in steps that are run again, or that are not run after all.

    Other ranks may set samples aside only after a broadcast of rank 0.
    """
    if is_rank_0():
        forget(run, is_kept)
    broadcast("")


def _reference(job: Job, key: str, dataset: Any, run: Storage) -> Reference:
    """The run's reference sample of a dataset, which rank 0 chooses when the run begins."""
    name = REFERENCE.format(key)
    if not is_rank_0():
        return Reference(**json.loads(broadcast("")))
    if run.exists(name):
        chosen = Reference(**read_json(run, name))
    else:
        chosen = find_reference(job, dataset, key)
        # As it is: write_json would hide the form of a key that is called like a secret, such as `api_key`.
        run.write_text(name, json.dumps(chosen._asdict(), indent=2) + "\n")
    broadcast(json.dumps(chosen._asdict()))
    return chosen
