"""Checkpoints: the state of a training between two steps, written in the background and read without unpickling.

A checkpoint is one safetensors file, `checkpoints/step-N.safetensors`, for N steps done. Rank 0 alone writes it.
Of a sharded model each worker writes a piece, `checkpoints/pieces/step-N.R-of-W.safetensors`; the file written after
all pieces holds the rest and their checksums. Pieces that no file names are left over from a killed attempt.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from dp_ray.errors import ModelError, StorageError
from dp_ray.rundir.files import CHECKPOINTS as CHECKPOINTS
from dp_ray.rundir.files import NAME as NAME
from dp_ray.rundir.files import steps_of as steps_of
from dp_ray.storage import Storage
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import (
    Stored,
    TensorFile,
    check_dtype,
    is_dense,
    laid_out,
    parse_tensors,
    rows_of,
    write_tensors,
)

PIECES = "pieces"
PIECE_NAME = re.compile(r"step-(\d+)\.\d+-of-\d+\.safetensors")


@dataclass
class TrainState:
    """The running values of a training: `step` steps are done; `measured` holds the last evaluation."""

    step: int = 0
    epoch_loss: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum and weight since the epoch's start
    measured: dict[str, float] = field(default_factory=dict)
    _unread: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)
    best: float | None = None
    best_step: int | None = None
    best_by: list[str] = field(default_factory=list)  # the metric and the mode that `best` refers to
    stopping: dict[str, Any] = field(default_factory=dict)  # what early stopping counts; empty without it

    def add(self, sums: torch.Tensor) -> None:
        """Add a step's loss, whose sum and weight come first in `sums`, without waiting for the device."""
        self._unread.append(sums)
        if len(self._unread) >= 256:
            self._read()

    def end_epoch(self) -> float:
        """Return the epoch's mean loss and begin the next epoch."""
        self._read()
        (total, weight), self.epoch_loss = self.epoch_loss, [0.0, 0.0]
        return total / weight if weight else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Return the values as a checkpoint holds them."""
        self._read()
        values = {name.name: getattr(self, name.name) for name in fields(self) if name.init}
        if not self.stopping:
            del values["stopping"]  # earlier versions do not know it
        return values

    def _read(self) -> None:
        with waiting("the GPU, which may be in a collective"):
            unread = torch.stack(self._unread)[:, :2].tolist() if self._unread else ()
        for total, weight in unread:
            self.epoch_loss = [self.epoch_loss[0] + total, self.epoch_loss[1] + weight]
        self._unread = []


def name_of(step: int) -> str:
    """Return the file name of the checkpoint after `step` steps."""
    return f"step-{step}.safetensors"


def pack(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a state_dict of any nesting into plain JSON and its tensors, which the JSON names by their paths.

    `unpack` is the inverse; tensors keep their strides. Raises ModelError, which names the path, for a value that is
    neither plain nor a tensor that can be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(state, "", tensors), tensors


def sparse(indices: torch.Tensor, values: torch.Tensor, shape: list[int], is_coalesced: bool) -> torch.Tensor:
    """Return a sparse tensor of its parts, which are not checked."""
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)


def unpack(
    plain: Any,
    tensors: Mapping[str, Any],
    lay_out: Callable[[Any, Any], Any] = laid_out,
    make_sparse: Callable[[Any, Any, list[int], bool], Any] = sparse,
) -> Any:
    """Undo `pack`; `lay_out` gives a tensor the strides that it had, `make_sparse` makes a sparse one."""
    if not isinstance(plain, dict):
        return plain
    (kind, value), *more = plain.items()
    if kind == "tensor":
        return lay_out(tensors[value], more[0][1]) if more else tensors[value]
    if kind == "sparse":
        return make_sparse(*(unpack(inner, tensors, lay_out, make_sparse) for inner in value))
    if kind == "dict":
        return {key: unpack(inner, tensors, lay_out, make_sparse) for key, inner in value}
    items = [unpack(inner, tensors, lay_out, make_sparse) for inner in value]
    return tuple(items) if kind == "tuple" else items


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:  # momentum of sparse gradients
        inner = [value._indices(), value._values(), list(value.shape), value.is_coalesced()]
        return {"sparse": [_pack(one, f"{path}.{number}", tensors) for number, one in enumerate(inner)]}
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
    if hasattr(value, "item") and hasattr(value, "dtype"):
        value = value.item()  # a numpy number
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ModelError(
        f"the state's {path!r} is of type {type(value).__qualname__}: only tensors and plain values can be kept"
    )


class CheckpointWriter:
    """The writer of checkpoints, in the background; it keeps the newest `keep` and the best.

    `passed_over` are the steps of checkpoints that could not be resumed. They do not count as the newest, and are
    removed once the next checkpoint is written.
    """

    def __init__(self, checkpoints: Storage, keep: int, passed_over: Collection[int] = ()) -> None:
        self._passed_over = set(passed_over)
        self._checkpoints = checkpoints
        self._keep = keep
        self._staged: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self.seconds = 0.0  # spent in the background so far

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._writing is not None and not self._writing.done()

    def save(
        self,
        step: int,
        about: dict[str, Any],
        state: Any,
        best_step: int | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy the state, then write it in the background; `before` is called there first.

        Waits for the previous write, and re-raises its error.
        """
        self.wait()  # its tensors are in the memory that the copy takes again
        plain, tensors = pack(state)
        with waiting("the GPU, which may be in a collective"):
            self._stage(self._own(tensors))
        text = json.dumps({**about, "state": plain})
        self._writing = self._thread.submit(self._write, step, text, best_step, before)

    def agree(self, is_due: bool) -> bool:
        """Return whether all workers save now; only this one does, if it is due."""
        return is_due

    def wait(self) -> None:
        """Wait for the file that is being written; re-raises the write's error, such as a StorageError."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait for the write in progress and end the thread; the write's error is not raised here."""
        self._thread.shutdown()

    def _own(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the state that this worker writes."""
        return tensors

    def _stage(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy the tensors to memory that is reused, because fresh pages cost more than the copy.

        The copies from a GPU are queued, and waited for once.
        """
        staged = {}
        for key, tensor in tensors.items():
            kept = self._staged.get(key)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            kept.copy_(tensor.detach(), non_blocking=True)
            staged[key] = kept
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._staged = staged

    def _write(self, step: int, text: str, best_step: int | None, before: Callable[[], None]) -> None:
        began = time.monotonic()
        before()
        write_tensors(self._checkpoints, name_of(step), self._staged, text)
        self._remove_old(
            step, best_step
        )  # after the write: a crash between leaves one more than is kept, never fewer
        self.seconds += time.monotonic() - began

    def _remove_old(self, step: int, best_step: int | None) -> None:
        """Remove what is not to be kept, after the checkpoint of `step` is written."""
        passed_over, self._passed_over = self._passed_over - {step}, set()
        good = [one for one in steps_of(self._checkpoints) if one not in passed_over]
        for old in {*passed_over, *good[: -self._keep]} - {best_step}:
            self._checkpoints.delete(name_of(old))
        # Older pieces without a checkpoint are those of a killed attempt.
        kept, pieces = {step, *steps_of(self._checkpoints)}, self._checkpoints.child(PIECES)
        for name in pieces.names():
            match = PIECE_NAME.fullmatch(name)
            if match and int(match[1]) < step and int(match[1]) not in kept:
                pieces.delete(name)


def newest(
    checkpoints: Storage,
    fits: Callable[[dict[str, Any]], str | None],
    note: Callable[[str], None],
    until: int | None = None,
) -> tuple[str, dict[str, Any], Any] | None:
    """Return the newest undamaged checkpoint that fits the job: its name, description and state; None if none does.

    `fits` returns None, or why a checkpoint does not fit. `note` reports each checkpoint that is ignored. `until` is
    the last step of interest.
    """
    for step in reversed(steps_of(checkpoints)):
        if until is not None and step > until:
            continue
        name = name_of(step)
        try:
            about, state = load_checkpoint(checkpoints, name)
            misfit = fits(about)
        except StorageError as error:
            misfit = str(error)
        if misfit is None:
            return name, about, state
        note(f"checkpoint {name} is ignored, the one before it is tried: {misfit}")
    return None


def load_checkpoint(storage: Storage, name: str) -> tuple[dict[str, Any], Any]:
    """Read a checkpoint: its description and its state; raises StorageError if it is damaged or no checkpoint."""
    return parse(storage.read_bytes(name), f"{storage}/{name}", storage)


def parse(data: bytes, where: str, storage: Storage) -> tuple[dict[str, Any], Any]:
    """Parse a checkpoint's bytes as `load_checkpoint` does; `where` names the file, `storage` is its folder."""
    tensors, text = parse_tensors(data, where)
    try:
        about = dict(json.loads(text))
        description = about.pop(PIECES, None)
        if description is not None:
            files = open_pieces(storage, description)
            for file in files:
                file.check()
            tensors |= {key: one.whole() for key, one in stored_in(files, description).items()}
        return about, unpack(about.pop("state"), tensors)
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{where}: is no checkpoint of dp_ray: {error!r}") from None


def piece_name(step: int, rank: int, world_size: int) -> str:
    """Return the file name of a rank's piece of the checkpoint after `step` steps."""
    return f"step-{step}.{rank}-of-{world_size}.safetensors"


def piece_names(description: dict[str, Any] | None) -> list[str]:
    """Return the file names of a checkpoint's pieces, by rank; none if it has none."""
    if description is None:
        return []
    size = len(description["sha256"])
    return [piece_name(description["step"], rank, size) for rank in range(size)]


def open_pieces(checkpoints: Storage, description: dict[str, Any]) -> list[TensorFile]:
    """Open a checkpoint's pieces, by rank; raises StorageError if one is missing, or not that which was written."""
    files = [TensorFile(checkpoints.child(PIECES), name) for name in piece_names(description)]
    for one, checksum in zip(files, description["sha256"], strict=True):
        if one.digest != checksum:
            raise StorageError(f"{one.where}: is not the piece that was written for this checkpoint")
    return files


def stored_in(files: list[TensorFile], description: dict[str, Any]) -> dict[str, Stored]:
    """Return the whole tensors, each to be read from the pieces that hold its rows."""
    pieces = [one.tensors() for one in files]
    return {
        key: Stored(tuple(shape), functools.partial(_rows_of_pieces, [one[key] for one in pieces], shape[0]))
        for key, shape in description["shapes"].items()
    }


def _rows_of_pieces(pieces: list[Stored], rows: int, start: int, stop: int) -> torch.Tensor:
    """Read the rows `start .. stop - 1` of a tensor of so many rows from the pieces that hold them."""
    slices = []
    for rank, piece in enumerate(pieces):
        first, end = rows_of(rows, len(pieces), rank)
        if max(start, first) < min(stop, end):
            slices.append(piece.rows(max(start, first) - first, min(stop, end) - first))
    if len(slices) == 1:
        return slices[0]
    return torch.cat(slices) if slices else pieces[0].rows(0, 0)
