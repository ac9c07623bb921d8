"""Tensors in safetensors files, read row by row: no more of a file is in memory than what is asked for."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dp_ray.errors import StorageError
from dp_ray.storage import Storage
from dp_ray.tensors.file import DIGEST, DTYPES, PIECE, TEXT, frame
from dp_ray.tensors.shards import is_sharded, local, rows_of

Rows = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A tensor that is somewhere else: its size, and what reads rows of it. `strides` are those of its layout."""

    shape: tuple[int, ...]
    rows: Rows
    strides: tuple[int, ...] | None = None

    def whole(self) -> torch.Tensor:
        """The whole tensor."""
        return self.rows(0, self.shape[0] if self.shape else 1)

    def empty(self) -> torch.Tensor:
        """A tensor of its size and dtype without memory."""
        return torch.empty(self.shape, dtype=self.rows(0, 0).dtype, device="meta")

    def like(self, tensor: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
        """The part of it that a worker holds of `tensor`: its rows if that is sharded, else the whole."""
        if not is_sharded(tensor):
            return self.whole()
        return self.rows(*rows_of(self.shape[0], world_size, rank))

    @torch.no_grad()
    def copy_to(self, tensor: torch.Tensor, world_size: int, rank: int) -> None:
        """Copy into `tensor` what this worker holds of it."""
        local(tensor).copy_(self.like(tensor, world_size, rank))


def held(tensor: torch.Tensor) -> Stored:
    """A tensor that is in memory, as if it were stored."""
    return Stored(tuple(tensor.shape), lambda start, stop: tensor[start:stop] if tensor.ndim else tensor)


class TensorFile:
    """A safetensors file, of which only the header is read; raises StorageError if it is damaged."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.where = f"{storage}/{name}"
        self._storage = storage
        self._name = name
        try:
            with storage.open(name) as stream:
                size = int.from_bytes(stream.read(8), "little")
                self._table = json.loads(stream.read(min(size, stream.size())))
            self._begin = 8 + size
            metadata = self._table.pop("__metadata__", {})
            self.text, self.digest = str(metadata.get(TEXT, "")), metadata.get(DIGEST)
        except (OSError, ValueError, AttributeError) as error:
            raise StorageError(f"{self.where}: is damaged, or no safetensors file: {error}") from None

    def tensors(self) -> dict[str, Stored]:
        """All its tensors."""
        return {key: Stored(tuple(one["shape"]), self._reader(one)) for key, one in self._table.items()}

    def check(self) -> None:
        """Raise StorageError if its bytes are not those that were written; it is read in pieces."""
        if self.digest is None:
            return
        digest = hashlib.sha256(frame(self._table, self.text))
        with self._storage.open(self._name) as stream:
            stream.seek(self._begin)
            while piece := stream.read(PIECE):
                digest.update(piece)
        if digest.hexdigest() != self.digest:
            raise StorageError(f"{self.where}: is damaged: its bytes are not those that were written")

    def _reader(self, entry: dict[str, Any]) -> Rows:
        shape, dtype = entry["shape"], DTYPES[entry["dtype"]]
        row = [1, *shape[1:]]
        row_bytes = int(torch.Size(row).numel()) * dtype.itemsize

        def read(start: int, stop: int) -> torch.Tensor:
            made = torch.empty([stop - start, *shape[1:]] if shape else [], dtype=dtype)
            if not made.nbytes:
                return made
            with self._storage.open(self._name) as stream:
                stream.seek(self._begin + entry["data_offsets"][0] + start * row_bytes)
                data = stream.read(made.nbytes)
            if len(data) != made.nbytes:
                raise StorageError(f"{self.where}: is damaged: it ends before its tensors do")
            made.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return made

        return read
