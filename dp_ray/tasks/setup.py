"""Set up a task: its dataset, the model with the weights to run, and the quarantine of bad samples.

A run reads the same files of a dataset to its end, however often it is resumed: `check_unchanged` raises if not.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dp_ray.engine.forward.model import has_own_modes, set_modes
from dp_ray.engine.forward.weights import synchronise
from dp_ray.engine.loads.bad_samples import Quarantine, Reference
from dp_ray.engine.loads.loader import remarks_on
from dp_ray.engine.loads.loading import find_reference, seeded_dataset
from dp_ray.engine.placement import Placement, place
from dp_ray.engine.random import has_drawn
from dp_ray.engine.world import World, broadcast, gathered, is_rank_0
from dp_ray.errors import DataError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.samples import describe_order, mixture_of
from dp_ray.messages import Note, Send, StepControl
from dp_ray.records import Record
from dp_ray.rundir.files import replacing
from dp_ray.rundir.quarantine import QuarantineFiles, forget_unkept
from dp_ray.rundir.start import NEW_HEAD, describe_start, read_start
from dp_ray.storage import Storage
from dp_ray.text import hide_in, listed

if TYPE_CHECKING:
    from dp_ray.tasks.held import Held

PINS = "files-of-{}.json"
REFERENCE = "reference-of-{}.json"
PINS_JSON = Record[dict[str, str | None]](dict[str, str | None], missing={}, indent=2)
# As it is: else the form of a key that is called like a secret, such as `api_key`, would be hidden.
REFERENCE_JSON = Record[Reference](Reference, hides=False, indent=2)


@dataclass(frozen=True)
class Context:
    """All that a task is given on its worker.

    `send` takes the reports for the driver. `rows_on_driver` has the lengths of the datasets, by their keys, as the
    driver found them. `attempt` names the attempt of a task that writes parts or checkpoints. `held` is what the
    process holds of the job, if its group may change.
    """

    job: Job
    world: World
    run: Storage
    send: Send
    control: StepControl = field(default_factory=StepControl)
    rows_on_driver: Mapping[str, int] = field(default_factory=dict)
    attempt: str = ""
    held: "Held | None" = None

    def dataset(self, job: Job, key: str) -> Any:
        """Build the dataset of `key`, or return the one that the process holds."""
        is_new = self.held is None or key not in self.held.datasets
        dataset = seeded_dataset(job, key) if self.held is None else self.held.dataset(job, key)
        for line in remarks_on(job, key, dataset) if is_new and self.world.rank == 0 else ():
            self.say(line)
        return dataset

    def place(self) -> Placement:
        """Build the model, or return the one that the process holds; every rank calls this."""
        held = self.held
        if held is None or self.job.why_reads:
            return place(self.job, self.world, self.say)
        if held.placement is None:
            held.placement = place(self.job, self.world, self.say)
        before = held.placement
        world = replace(self.world, device=before.world.device)
        return replace(before, world=world, say=functools.cache(self.say), outlives_group=True)

    def say(self, text: str) -> None:
        """Send a line for the user, from rank 0 alone: the other ranks would repeat it."""
        if self.world.rank == 0:
            self.send(Note(text))


def load_dataset(context: Context) -> Any:
    """Build the task's dataset; every rank calls this.

    Raises DataError, on every rank, unless all ranks and the driver have a dataset of the same length, of the files
    with which the run began.
    """
    dataset = context.dataset(context.job, context.job.dataset_key)
    check_same_rows("dataset", len(dataset), context.rows_on_driver)
    check_unchanged(context, "dataset", dataset)
    check_blocks(context.job, dataset)
    return dataset


def check_same_rows(key: str, rows: int, on_driver: Mapping[str, int]) -> None:
    """Raise DataError, on every rank, unless all ranks and the driver have a dataset of the same length.

    Every rank calls this. `rows` is this rank's length of the dataset `key`. `on_driver` maps keys to the lengths
    that the driver found.
    """
    holders: dict[int, list[str]] = {on_driver[key]: ["the driver"]} if key in on_driver else {}
    for rank, length in enumerate(gathered(rows)):
        holders.setdefault(length, []).append(f"rank {rank}")
    if len(holders) > 1:
        lengths = "; ".join(f"{length} rows on {', '.join(where)}" for length, where in holders.items())
        raise DataError(
            f"{key}: its length differs: {lengths}; all must read the same data: see what each node holds"
        )


def check_unchanged(context: Context, key: str, dataset: Any) -> None:
    """Raise DataError, which names the files, if the dataset of `key` reads others than when the run began.

    Every rank calls this. Rank 0 writes the files' state at the run's start, and for a retry their state now.
    Datasets without `pins` are not checked.
    """
    pins = getattr(dataset, "pins", None)
    if not isinstance(pins, dict):
        return
    pins = hide_in(pins)  # as they are kept
    run, name = context.run, PINS.format(key)
    digest = hashlib.sha256(json.dumps(sorted(pins.items())).encode()).hexdigest()
    if len(set(gathered(digest))) > 1:
        raise DataError(f"{key}: its files are not the same on all workers; see what each node holds")
    there = PINS_JSON.read(run, name)
    changes = _changes(there, pins) if there else []
    if changes:
        says = f"its files changed since the run began: {listed(changes)}"
        raise DataError(f"{key}: {says}; put them back, or start anew {replacing(run)}")
    is_of_retry = None in there.values()
    if is_of_retry:
        gathered(None)  # all have read what rank 0 replaces now
    if context.world.rank == 0 and (is_of_retry or not there):
        PINS_JSON.write(run, pins, name)


def _changes(there: dict[str, str | None], here: dict[str, str]) -> list[str]:
    """List the files that differ, each with how; of None any contents are good."""
    gone = [f"{file} is not there any more" for file in there if file not in here]
    new = [f"{file} is new" for file in here if file not in there]
    changed = []
    for file, before in there.items():
        if before is None or file not in here or before == here[file]:
            continue
        (size_before, _, version), (size_now, _, now) = before.partition(", "), here[file].partition(", ")
        if size_before != size_now:
            changed.append(f"{file} had {size_before}, has {size_now}")
        elif not version.isdecimal() or now.isdecimal():  # else the run kept the time of what has an ETag now
            changed.append(f"{file} was written again ({size_now}, as before)")
    return [*changed, *gone, *new]


def let_files_change(run: Storage, key: str) -> None:
    """Have the next attempt accept the files of a dataset as they are now: they were mended. Their names stay."""
    name = PINS.format(key)
    if pins := PINS_JSON.read(run, name):
        PINS_JSON.write(run, dict.fromkeys(pins), name)


def check_blocks(job: Job, dataset: Any) -> None:
    """Raise DataError, on every rank, unless all have the blocks, or the sources of a mixture, in the same sizes.

    Every rank calls this. Its checkpoint shows whether a resumed training has the same ones.
    """
    for what, told in describe_order(job, dataset).items():
        every = dict.fromkeys(map(str, gathered(told)))
        if len(every) > 1:
            has = f"{what} are" if what.endswith("s") else f"{what} is"
            raise DataError(f"dataset: its {has} not the same on all workers: {'; '.join(every)}")


def model_to_run(context: Context) -> Placement:
    """Build the model with the weights to run, the same on every rank; rank 0 reports untrained weights.

    Nothing is read, nor sent, in a view whose workers all have them from one before.
    """
    job, run, held = context.job, context.run, context.held
    placement = context.place()
    has_weights = held is not None and held.has_weights
    if held is not None and all(gathered(has_weights)):
        return placement
    if held is not None and has_weights and has_own_modes(placement.model):
        held.forget()  # `eval()` has left it as no newcomer's is
        placement = context.place()
    if job.init_from is not None:
        set_modes(placement.model, True)  # weights are kept as they are in train mode
        weights, _ = read_start(run, job.init_from, job.strict, placement.sharers)
        loaded = placement.load_weights(weights, job.init_from, job.strict, NEW_HEAD)
        if not has_weights:
            context.say(describe_start(run, job.init_from) + loaded)
    elif not has_weights and isinstance(job.model, Target) and has_drawn(job.seed):
        context.say(f"untrained weights: init_from is not set (unless {job.model.label} loads trained ones itself)")
    synchronise(placement.model)
    if held is not None:
        held.has_weights = held.placement is not None
    return placement


def begin_quarantine(context: Context, dataset: Any, is_kept: Callable[[int, str], bool]) -> Quarantine | None:
    """Return the quarantine of the task's dataset, None if the job has none. Every rank calls this.

    Remove the samples that earlier attempts set aside in steps and shards (by name) that this one runs again.
    """
    drop_set_aside(context.run, is_kept)  # first: from here on the workers set samples aside
    return set_aside(context, "dataset", dataset)[0]


def set_aside(context: Context, key: str, dataset: Any) -> tuple[Quarantine | None, QuarantineFiles | None]:
    """Return the quarantine of the dataset of `key`, and its files; twice None if the job sets no samples aside.

    Every rank calls this.
    """
    job, run = context.job, context.run
    if job.on_error is None:
        return None, None
    reference = _reference(job, key, dataset, run)
    files = QuarantineFiles(
        run,
        key,
        job.on_error.quarantine,
        context.attempt or None,
        lambda text: context.send(Note(text)),
        mixture=mixture_of(dataset),
    )
    return Quarantine(reference, files.keep), files


def unkept_quarantine(job: Job, key: str, dataset: Any, run: Storage) -> Quarantine | None:
    """Return the quarantine for steps that are replayed: it writes nothing."""
    if job.on_error is None:
        return None
    return Quarantine(_reference(job, key, dataset, run), lambda *_: None)


def _reference(job: Job, key: str, dataset: Any, run: Storage) -> Reference:
    """Return the run's reference sample of a dataset, which rank 0 chooses when the run begins."""
    name = REFERENCE.format(key)
    if not is_rank_0():
        return REFERENCE_JSON.parse(broadcast(""))
    if run.exists(name):
        reference = REFERENCE_JSON.read(run, name)
    else:
        reference = find_reference(job, dataset, key)
        REFERENCE_JSON.write(run, reference, name)
    broadcast(REFERENCE_JSON.text(reference))
    return reference


def drop_set_aside(run: Storage, is_kept: Callable[[int, str], bool]) -> None:
    """On rank 0, remove the samples that were set aside in steps that run again, or that do not run after all.

    Other ranks may set samples aside only after a broadcast of rank 0.
    """
    if is_rank_0():
        forget_unkept(run, is_kept)
    broadcast("")
