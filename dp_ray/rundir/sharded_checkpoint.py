"""Checkpoints of a training of which each worker holds a part: written by all workers, and read row by row."""

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dp_ray.errors import StorageError
from dp_ray.replica.average import weights_of_average
from dp_ray.replica.world import World, broadcast, gathered, new_group
from dp_ray.rundir.checkpoint import CHECKPOINTS, NAME, CheckpointWriter, name_of, steps_of, unpack
from dp_ray.rundir.pieces import PIECES, described, open_pieces, piece_name, stored_in
from dp_ray.rundir.weights import BEST, TORCH_FILES, check_pinned, file_of, pin_start, read_torch
from dp_ray.rundir.weights_files import INDEXES, open_index
from dp_ray.storage import Storage
from dp_ray.system.waiting import waiting
from dp_ray.tensors.file import write_tensors
from dp_ray.tensors.shards import is_sharded, local
from dp_ray.tensors.stored import Stored, TensorFile, held


class ShardedWriter(CheckpointWriter):
    """Writes this worker's piece of each checkpoint in the background; rank 0 writes the rest after all pieces.

    Every rank makes one, and all save after the same steps, on which they `agree`.
    """

    def __init__(self, checkpoints: Storage, keep: int, world: World, passed_over: Collection[int] = ()) -> None:
        super().__init__(checkpoints, keep, passed_over)
        self._world = world
        self._shapes: dict[str, list[int]] = {}
        # Two groups: the thread's collectives must not mix with the loop's.
        self._votes, self._commits = new_group("gloo"), new_group("gloo")
        if world.rank == 0:
            for folder in (checkpoints, checkpoints.child(PIECES)):
                folder.create()
            checkpoints.child(PIECES).remove_unfinished()

    def agree(self, is_due: bool) -> bool:
        """Whether all workers save now, because rank 0's checkpoint is due; every rank calls this after each step."""
        vote = torch.tensor(int(is_due))
        with waiting("rank 0"):
            dist.broadcast(vote, src=0, group=self._votes)
        return bool(vote)

    def _own(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This worker's rows of the sharded tensors, and on rank 0 the others."""
        self._shapes = {key: list(one.shape) for key, one in tensors.items() if is_sharded(one)}
        return {key: local(one) for key, one in tensors.items() if is_sharded(one) or self._world.rank == 0}

    def _write(self, step: int, text: str, best_step: int | None, before: Callable[[], None]) -> None:
        began = time.monotonic()
        before()
        rank, size = self._world.rank, self._world.world_size
        mine = {key: self._staged[key] for key in self._shapes}
        checksum = write_tensors(self._checkpoints.child(PIECES), piece_name(step, rank, size), mine)
        checksums: list[Any] = [None] * size
        dist.all_gather_object(checksums, checksum, group=self._commits)
        if rank == 0:
            whole = {**json.loads(text), PIECES: described(step, checksums, self._shapes)}
            rest = {key: one for key, one in self._staged.items() if key not in self._shapes}
            write_tensors(self._checkpoints, name_of(step), rest, json.dumps(whole))
            self._remove_old(step, best_step)
        self.seconds += time.monotonic() - began


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose tensors are read when they are needed: its description, its state, and its files."""

    about: dict[str, Any]
    state: Any
    files: list[TensorFile]

    def check(self, world: World) -> None:
        """Raise StorageError if a file of this rank's share is damaged: the ranks share the reading."""
        for one in self.files[world.rank :: world.world_size]:
            one.check()


def open_checkpoint(storage: Storage, name: str) -> OpenCheckpoint:
    """Open a checkpoint, of one file or of pieces; its state has a `Stored` for each tensor.

    Raises StorageError if a file is missing or no checkpoint; only `check` reads the tensors.
    """
    first = TensorFile(storage, name)
    try:
        about = dict(json.loads(first.text))
        said = about.pop(PIECES, None)
        files = [] if said is None else open_pieces(storage, said)
        tensors = {**first.tensors(), **({} if said is None else stored_in(files, said))}
        state = unpack(about.pop("state"), tensors, _with_strides)
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{first.where}: is no checkpoint of dp_ray: {error!r}") from None
    return OpenCheckpoint(about, state, [first, *files])


def open_start(run: Storage, location: str) -> tuple[dict[str, Stored], dict[str, Any] | None]:
    """What `weights.read_start` gives, with tensors that are read when they are needed.

    Only a file of torch's (`.pt`) is read whole. Raises JobError if the pinned file is gone or has changed.
    """
    start = pin_start(run, location)
    storage, name = file_of(run, location, start)
    check_pinned(run, f"{storage}/{name}", start, storage.sha256(name))
    if NAME.fullmatch(name):
        opened = open_checkpoint(storage, name)
        for one in opened.files[1:]:
            one.check()
        return opened.state["model"], {"about": opened.about, "state": opened.state}
    if name.endswith(INDEXES):
        return open_index(storage, name), None
    if name.endswith(TORCH_FILES):
        whole = read_torch(storage.read_bytes(name), f"{storage}/{name}")
        return {key: held(one) for key, one in whole.items() if isinstance(one, torch.Tensor)}, None
    return TensorFile(storage, name).tensors(), None


def write_best(run: Storage, metric: str, value: float, step: int, is_averaged: bool = False) -> None:
    """Write the weights of the best checkpoint, the one after `step` steps, as a weights file of the bare module.

    With `is_averaged` that is the average of the weights. Only one tensor at a time is in memory. Raises StorageError
    if the checkpoint is damaged.
    """
    opened = open_checkpoint(run.child(CHECKPOINTS), name_of(step))
    for one in opened.files:
        one.check()
    state = weights_of_average(opened.state["ema"]) if is_averaged else opened.state["model"]
    stored = {name: one for name, one in state.items() if isinstance(one, Stored)}
    empty = {name: one.empty() for name, one in stored.items()}
    by_id = {id(empty[name]): one for name, one in stored.items()}
    text = json.dumps({"metric": metric, "value": value, "step": step})
    write_tensors(run, BEST, empty, text, whole=lambda tensor: by_id[id(tensor)].whole())


def newest_open(
    checkpoints: Storage, fits: Callable[[dict[str, Any]], str | None], note: Callable[[str], None], world: World
) -> tuple[str, OpenCheckpoint] | None:
    """What `checkpoint.newest` finds, for workers that read a part each; every rank calls this and gets the same."""
    for step in reversed(json.loads(broadcast(json.dumps(steps_of(checkpoints) if world.rank == 0 else [])))):
        opened, misfit = _tried(checkpoints, name_of(step), fits, world)
        misfits = [one for one in gathered(misfit) if one is not None]
        if opened is not None and not misfits:
            return name_of(step), opened
        note(f"checkpoint {name_of(step)} is ignored, the one before it is tried: {misfits[0]}")
    return None


def _tried(
    checkpoints: Storage, name: str, fits: Callable[[dict[str, Any]], str | None], world: World
) -> tuple[OpenCheckpoint | None, str | None]:
    try:
        opened = open_checkpoint(checkpoints, name)
        opened.check(world)
        return opened, fits(opened.about)
    except StorageError as error:
        return None, str(error)


def _with_strides(stored: Stored, strides: Any) -> Stored:
    return replace(stored, strides=tuple(strides))
