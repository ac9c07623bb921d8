"""The pieces of a checkpoint: each worker's part of the sharded tensors, in a file of its own.

`checkpoints/pieces/step-N.R-of-W.safetensors` is the piece of rank R of W. `checkpoints/step-N.safetensors`, written
after them, makes them a checkpoint: it holds the rest of the state, and each piece's checksum. A piece of which no
such file tells is left over from a killed attempt, and removed later.
"""

import re
from collections.abc import Collection
from typing import Any

import torch

from dp_ray.errors import StorageError
from dp_ray.storage import Storage
from dp_ray.tensors.shards import rows_of
from dp_ray.tensors.stored import Rows, Stored, TensorFile

PIECES = "pieces"
NAME = re.compile(r"step-(\d+)\.\d+-of-\d+\.safetensors")


def piece_name(step: int, rank: int, world_size: int) -> str:
    """The file name of a rank's piece of the checkpoint after `step` steps."""
    return f"step-{step}.{rank}-of-{world_size}.safetensors"


def described(step: int, checksums: list[str], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """What a checkpoint says of its pieces: their checksums by rank, and the shapes of the whole tensors."""
    return {"step": step, "sha256": checksums, "shapes": shapes}


def names_of(said: dict[str, Any] | None) -> list[str]:
    """The file names of a checkpoint's pieces, by rank; none if it has none."""
    if said is None:
        return []
    size = len(said["sha256"])
    return [piece_name(said["step"], rank, size) for rank in range(size)]


def open_pieces(checkpoints: Storage, said: dict[str, Any]) -> list[TensorFile]:
    """A checkpoint's pieces, by rank; raises StorageError if one is missing, or not that which was written."""
    files = [TensorFile(checkpoints.child(PIECES), name) for name in names_of(said)]
    for one, checksum in zip(files, said["sha256"], strict=True):
        if one.digest != checksum:
            raise StorageError(f"{one.where}: is not the piece that was written for this checkpoint")
    return files


def stored_in(files: list[TensorFile], said: dict[str, Any]) -> dict[str, Stored]:
    """The whole tensors, each to be read from the pieces that hold its rows."""
    parts = [one.tensors() for one in files]
    return {
        key: Stored(tuple(shape), _over_pieces([one[key] for one in parts], shape[0]))
        for key, shape in said["shapes"].items()
    }


def whole_of_pieces(checkpoints: Storage, said: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint's pieces, whose checksums are verified first."""
    if said is None:
        return {}
    files = open_pieces(checkpoints, said)
    for one in files:
        one.check()
    return {key: one.whole() for key, one in stored_in(files, said).items()}


def remove_pieces(checkpoints: Storage, kept: Collection[int], before: int) -> None:
    """Remove the pieces of steps `before` that are not `kept`."""
    pieces = checkpoints.child(PIECES)
    for name in pieces.names():
        match = NAME.fullmatch(name)
        if match and int(match[1]) < before and int(match[1]) not in kept:
            pieces.delete(name)


def _over_pieces(parts: list[Stored], rows: int) -> Rows:
    def read(start: int, stop: int) -> torch.Tensor:
        found = []
        for rank, part in enumerate(parts):
            first, end = rows_of(rows, len(parts), rank)
            if max(start, first) < min(stop, end):
                found.append(part.rows(max(start, first) - first, min(stop, end) - first))
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else parts[0].rows(0, 0)

    return read
