"""Checkpoints: the state of a training between two steps, written in the background and read without unpickling.

A checkpoint is a safetensors file, `checkpoints/step-N.safetensors`, for N steps done, and any number of pieces.
A whole model's has none, and rank 0 alone writes it. Of a sharded model each worker writes a piece,
`checkpoints/pieces/step-N.R-of-W.safetensors`; the file written after all pieces holds the rest and their checksums.
Pieces that no file names are left over from a killed attempt.

`CheckpointWriter` writes one, and `open_checkpoint` opens it: a worker that holds the whole model reads it at once,
and `sharers` read the rows that each of them holds.
"""

import json
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dp_ray.engine.host_copy import ON_GPU
from dp_ray.engine.world import World, broadcast, broadcast_bytes, gathered, has_peers, is_rank_0, new_group
from dp_ray.errors import ModelError, StorageError
from dp_ray.rundir.files import steps_of
from dp_ray.storage import Storage
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import (
    Stored,
    TensorFile,
    check_dtype,
    is_dense,
    is_sharded,
    laid_out,
    local,
    made_dense,
    rows_of_rank,
    write_tensors,
)
from dp_ray.tensors.pinned import PinnedMemory

PIECES = "pieces"
NO_PIECES: dict[str, Any] = {"step": 0, "sha256": [], "shapes": {}}
PIECE_NAME = re.compile(r"step-(\d+)\.\d+-of-\d+\.safetensors")


def checkpoint_name(step: int) -> str:
    """Return the file name of the checkpoint after `step` steps."""
    return f"step-{step}.safetensors"


def pack(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a state_dict of any nesting into plain JSON and its tensors, which the JSON names by their paths.

    `unpack` is the inverse; tensors keep their strides. Raises ModelError, which names the path, for a value that is
    neither plain nor a tensor that can be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(state, "", tensors), tensors


def unpack(plain: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo `pack`: tensors get the strides that they had, and sparse ones are sparse again.

    Of tensors that are `Stored` all are so, to be read with the strides that they had; sparse ones are read as dense.
    """
    if not isinstance(plain, dict):
        return plain
    (kind, value), *more = plain.items()
    if kind == "tensor":
        tensor = tensors[value]
        if not more:
            return tensor
        strides = tuple(more[0][1])
        return replace(tensor, strides=strides) if isinstance(tensor, Stored) else laid_out(tensor, strides)
    if kind == "dict":
        return {key: unpack(inner, tensors) for key, inner in value}
    items = [unpack(inner, tensors) for inner in value]
    if kind == "sparse":
        indices, values, shape, is_coalesced = items
        if isinstance(indices, Stored):
            return made_dense(indices, values, shape)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
    return tuple(items) if kind == "tuple" else items


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:  # momentum of sparse gradients
        inner = [value._indices(), value._values(), list(value.shape), value.is_coalesced()]
        return {"sparse": [_pack(part, f"{path}.{number}", tensors) for number, part in enumerate(inner)]}
    if isinstance(value, torch.Tensor):
        while path in tensors:  # a key with dots may collide with a nested path
            path += "'"
        check_dtype(path, value)
        tensors[path] = value
        strides = {} if value.is_contiguous() or not is_dense(value) else {"strides": list(value.stride())}
        return {"tensor": path, **strides}
    if isinstance(value, dict):
        return {
            "dict": [
                [_check_plain(key, path), _pack(inner, f"{path}.{key}".lstrip("."), tensors)]
                for key, inner in value.items()
            ]
        }
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(inner, f"{path}.{number}", tensors) for number, inner in enumerate(value)]}
    return _check_plain(value, path)


def _check_plain(value: Any, path: str) -> Any:
    if hasattr(value, "item") and hasattr(value, "dtype") and not getattr(value, "ndim", 0):
        value = value.item()  # a numpy number
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ModelError(
        f"the state's {path!r} is of type {type(value).__qualname__}: only tensors and plain values can be kept"
        + ("; make it a tensor (torch.from_numpy)" if type(value).__name__ == "ndarray" else "")
    )


class CheckpointWriter:
    """The writer of checkpoints, in the background; it keeps the newest `keep` and the best.

    Rank 0 makes one. Of a sharded model each of its `sharers` does, and all save after the same steps, on which they
    `agree`: each writes its piece, and rank 0 the rest after all pieces.

    `passed_over` are the steps of checkpoints that could not be resumed. They do not count as the newest, and are
    removed once the next checkpoint is written.
    """

    def __init__(
        self, checkpoints: Storage, keep: int, passed_over: Collection[int] = (), sharers: World | None = None
    ) -> None:
        self._passed_over = set(passed_over)
        self._checkpoints = checkpoints
        self._keep = keep
        self._world = sharers or World()
        # Two groups of sharers: the thread's collectives must not mix with the loop's.
        self._votes: Any = None if sharers is None else new_group("gloo")
        self._commits: Any = None if sharers is None else new_group("gloo")
        if sharers is not None and sharers.rank == 0:
            for folder in (checkpoints, checkpoints.child(PIECES)):
                folder.create()
        self._staged: dict[str, torch.Tensor] = {}
        self._pinned = PinnedMemory()
        self._without_pauses = threading.Event()  # the loop waits for the memory, or does without it
        self._is_closed = False
        self._shapes: dict[str, list[int]] = {}  # of the tensors of which each sharer writes its rows
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self.seconds = 0.0  # spent in the background so far

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._writing is not None and not self._writing.done()

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pin, in the background, memory for the first `save`, of a GPU's tensors of these sizes.

        The loop's kernels wait while a piece is pinned. So a pause as long follows each one, until `save` waits too.
        """
        on_gpus = _on_gpus(self._own(tensors))
        if on_gpus and self._writing is None:
            self._writing = self._thread.submit(self._pin, on_gpus)

    def _pin(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.cuda.device(next(iter(tensors.values())).device):  # a thread begins with the first GPU
            began = time.monotonic()
            for _ in self._pinned.pinned(tensors):
                self._without_pauses.wait(time.monotonic() - began)
                if self._is_closed:
                    return
                began = time.monotonic()

    def save(
        self,
        step: int,
        about: dict[str, Any],
        state: Any,
        best_step: int | None = None,
        before: Callable[[], None] = lambda: None,
        floor: int | None = None,
    ) -> None:
        """Copy the state, then write it in the background; `before` is called there first.

        The newest checkpoint of `floor` steps or fewer is kept too, whatever its age.
        Waits for the previous write, and re-raises its error.
        """
        self.wait()  # its tensors are in the memory that the copy takes again
        plain, tensors = pack(state)
        with waiting(ON_GPU):
            self._stage(tensors)
        text = json.dumps({**about, "state": plain})
        self._writing = self._thread.submit(self._write, step, text, best_step, before, floor)

    def agree(self, is_due: bool) -> bool:
        """Return whether the sharers save now: rank 0's checkpoint is due. Each calls this after each step."""
        vote = torch.tensor(int(is_due))
        with waiting("rank 0"):
            dist.broadcast(vote, src=0, group=self._votes)
        return bool(vote)

    def wait(self) -> None:
        """Wait for the file that is being written; re-raises the write's error, such as a StorageError."""
        self._without_pauses.set()
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait for the write in progress and end the thread; the write's error is not raised here."""
        self._is_closed = True
        self._without_pauses.set()
        self._thread.shutdown()
        self._staged = {}
        self._pinned.free()

    def _own(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what this worker writes: its rows of sharded tensors, and on rank 0 all others."""
        if self._commits is not None:
            self._shapes = {key: list(tensor.shape) for key, tensor in tensors.items() if is_sharded(tensor)}
        return {key: local(tensor) for key, tensor in tensors.items() if key in self._shapes or self._world.rank == 0}

    def _stage(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy what this worker writes to memory that is reused, because fresh pages cost more than the copy.

        The copies from a GPU are queued, and waited for once.
        """
        own = self._own(tensors)
        on_gpus = _on_gpus(own)
        places = {**self._staged, **(self._pinned.places(on_gpus) if on_gpus else {})}
        staged = {}
        for key, tensor in own.items():
            kept = places.get(key)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype)
            kept.copy_(tensor.detach(), non_blocking=True)
            staged[key] = kept
        for device in {tensor.device for tensor in own.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._staged = staged

    def _write(
        self, step: int, text: str, best_step: int | None, before: Callable[[], None], floor: int | None
    ) -> None:
        began = time.monotonic()
        before()
        rank, size = self._world.rank, self._world.world_size
        if self._commits is not None:
            mine = {key: self._staged[key] for key in self._shapes}
            checksum = write_tensors(self._checkpoints.child(PIECES), piece_name(step, rank, size), mine)
            # It waits for all pieces, so the file that names them comes last: a kill before leaves pieces alone.
            checksums: list[Any] = [None] * size  # by rank
            dist.all_gather_object(checksums, checksum, group=self._commits)
            pieces = {"step": step, "sha256": checksums, "shapes": self._shapes}
            text = json.dumps({**json.loads(text), PIECES: pieces})
        if rank == 0:
            rest = {key: tensor for key, tensor in self._staged.items() if key not in self._shapes}
            write_tensors(self._checkpoints, checkpoint_name(step), rest, text)
            # After the write: a crash between leaves one more than is kept, never fewer.
            self._remove_old(step, best_step, floor)
        self.seconds += time.monotonic() - began

    def _remove_old(self, step: int, best_step: int | None, floor: int | None) -> None:
        """Remove what is not to be kept, after the checkpoint of `step` is written."""
        passed_over, self._passed_over = self._passed_over - {step}, set()
        good = [step for step in steps_of(self._checkpoints) if step not in passed_over]
        self._checkpoints.before_commit()  # after the look: those of a newer attempt are not among them
        # And the oldest one above it, which becomes that of a later floor.
        below = 0 if floor is None else bisect_right(good, floor)
        around = set() if floor is None else {*good[max(0, below - 1) : below + 1]}
        for old in {*passed_over, *good[: -self._keep]} - {best_step} - around:
            self._checkpoints.delete(checkpoint_name(old))
        # Older pieces without a checkpoint are those of a killed attempt.
        kept, pieces = {step, *steps_of(self._checkpoints)}, self._checkpoints.child(PIECES)
        for name in pieces.names():
            match = PIECE_NAME.fullmatch(name)
            if match and int(match[1]) < step and int(match[1]) not in kept:
                pieces.delete(name)


def _on_gpus(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if tensor.is_cuda}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its name, its description, and its state.

    The tensors of the state are in memory, or `Stored`. `unchecked` are the files from which those will be read.
    """

    name: str
    about: dict[str, Any]
    state: Any
    unchecked: list[TensorFile]

    def check(self, sharers: World | None) -> None:
        """Raise StorageError if a file of this worker's share is damaged: the sharers share the reading."""
        for file in () if sharers is None else self.unchecked[sharers.rank :: sharers.world_size]:
            file.check()


def load_checkpoint(storage: Storage, name: str) -> Checkpoint:
    """Read a whole checkpoint; raises StorageError if it is damaged or no checkpoint."""
    return open_checkpoint(storage, name, storage.read_bytes(name))


def open_checkpoint(storage: Storage, name: str, data: bytes | None = None) -> Checkpoint:
    """Open a checkpoint, of one file or with pieces: its state has a `Stored` for each tensor.

    If the bytes of the file `name` have been read already, as `data`, the pieces are read too, and its tensors are in
    memory. Raises StorageError if a file is missing, is no checkpoint, or of what is read, is damaged.
    """
    first = TensorFile(storage, name, data)
    try:
        about = dict(json.loads(first.text))
        pieces = about.pop(PIECES, NO_PIECES)
        files = [TensorFile(storage.child(PIECES), name) for name in piece_names(pieces)]
        for file, checksum in zip(files, pieces["sha256"], strict=True):
            if file.digest != checksum:
                raise StorageError(f"{file.where}: is not the piece that was written for this checkpoint")
        tensors: dict[str, Any] = first.tensors()
        by_rank = [file.tensors() for file in files]
        for key, shape in pieces["shapes"].items():
            rows = partial(_rows_of_pieces, [pieces[key] for pieces in by_rank], shape[0])
            tensors[key] = Stored(tuple(shape), rows)
        if data is not None:
            for file in files:
                file.check()
            tensors = {key: tensor.whole() for key, tensor in tensors.items()}
        state = unpack(about.pop("state"), tensors)
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{first.where}: is no checkpoint of dp_ray: {error!r}") from None
    return Checkpoint(name, about, state, [first, *files] if data is None else [])


def newest(
    checkpoints: Storage,
    fits: Callable[[dict[str, Any]], str | None],
    say: Callable[[str], None],
    sharers: World | None = None,
    until: int | None = None,
) -> Checkpoint | None:
    """Return the newest undamaged checkpoint that fits the job, the same on every rank; None if none does.

    `fits` returns None, or why a checkpoint does not fit. `say` gets a line for each that is ignored. `until` is the
    last step of interest. Of a sharded model, its `sharers` open it. Every rank calls this.
    """
    if sharers is None and not is_rank_0():  # rank 0 chooses: another rank may find another one by now
        name = broadcast("")
        return open_checkpoint(checkpoints, name, read_by_all(checkpoints, name)) if name else None
    steps = [step for step in steps_of(checkpoints) if until is None or step <= until]
    if sharers is not None:
        steps = json.loads(broadcast(json.dumps(steps)))
    chosen: Checkpoint | None = None
    while steps and chosen is None:
        name = checkpoint_name(steps.pop())
        try:
            data = checkpoints.read_bytes(name) if sharers is None else None
            opened = open_checkpoint(checkpoints, name, data)
            opened.check(sharers)
            misfit = fits(opened.about)
        except StorageError as error:
            misfit = str(error)
        misfits = [found for found in ([misfit] if sharers is None else gathered(misfit)) if found is not None]
        if misfits:
            say(f"checkpoint {name} is ignored, the one before it is tried: {misfits[0]}")
        else:
            chosen = opened
    if sharers is None:
        broadcast("" if chosen is None else chosen.name)
        if chosen is not None and data is not None:
            read_by_all(checkpoints, chosen.name, data)
    return chosen


def read_by_all(storage: Storage, name: str, data: bytes | None = None) -> bytes:
    """Return a file's bytes on every rank, all of which call this; rank 0 may have read it as `data`.

    From an object store rank 0 alone reads it and sends it to the others. In a file system each rank reads it: the
    first one of a node brings it into the node's memory.
    """
    if not storage.is_local and has_peers():
        return broadcast_bytes((data or storage.read_bytes(name)) if is_rank_0() else b"")
    return storage.read_bytes(name) if data is None else data


def piece_name(step: int, rank: int, world_size: int) -> str:
    """Return the file name of a rank's piece of the checkpoint after `step` steps."""
    return f"step-{step}.{rank}-of-{world_size}.safetensors"


def piece_names(pieces: dict[str, Any]) -> list[str]:
    """Return the file names of a checkpoint's pieces, by rank."""
    size = len(pieces["sha256"])
    return [piece_name(pieces["step"], rank, size) for rank in range(size)]


def _rows_of_pieces(pieces: list[Stored], rows: int, start: int, stop: int) -> torch.Tensor:
    """Read the rows `start .. stop - 1` of a tensor of so many rows from the pieces that hold them."""
    slices = []
    for rank, piece in enumerate(pieces):
        first, end = rows_of_rank(rows, len(pieces), rank)
        if max(start, first) < min(stop, end):
            slices.append(piece.rows(max(start, first) - first, min(stop, end) - first))
    if len(slices) == 1:
        return slices[0]
    return torch.cat(slices) if slices else pieces[0].rows(0, 0)
