"""Keep named tensors and a text in one safetensors file: reading it runs no code.

The format (https://huggingface.co/docs/safetensors) is eight bytes with the header's length, the header as JSON, and
the tensors' bytes. The file is streamed, so gigabytes are written without a copy, in parallel with a training.
`write_tensors` and `read_tensors` are inverse; `TensorFile` reads only the rows that are asked for.

Below them: a tensor's bytes, its device, its layout in memory, and the rows that a worker holds of a DTensor, which
`fully_shard` cuts along dimension 0. DTensor is not imported: that takes seconds, which other jobs need not spend.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from dp_ray.errors import ModelError, StorageError
from dp_ray.storage import Storage
from dp_ray.system.threads import waiting
from dp_ray.tensors.flat import as_bytes
from dp_ray.tensors.tree import bare_tensors, flatten, map_batch, with_tensors

TEXT, DIGEST = "state", "sha256"  # keys of the metadata
PIECE = 1 << 24  # bytes hashed or written at once
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ReadRows = Callable[[int, int], torch.Tensor]  # rows `start .. stop - 1` of a tensor


def write_tensors(
    storage: Storage,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    text: str = "",
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write CPU tensors, and a text that `read_tensors` returns, to the file `name`, whole or not at all.

    Returns the checksum that the file holds. `whole` gives a tensor's numbers if they are elsewhere; it is called
    for each tensor in order, twice. `metadata` is for other programs. Raises StorageError if the file cannot be
    written, and ModelError for a dtype or layout that the format does not have.
    """
    table: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        check_dtype(key, tensor)
        table[key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    digest = hashlib.sha256(frame(table, text))
    for tensor in tensors.values():
        for piece in _pieces(whole(tensor)):
            digest.update(piece)
    about = {**(metadata or {}), TEXT: text, DIGEST: digest.hexdigest()}
    # The header holds the checksum and comes first: so the bytes are made twice, rather than kept.
    header = json.dumps({"__metadata__": about, **table}).encode()
    header += b" " * (-len(header) % 8)
    with storage.writing(name) as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            for piece in _pieces(whole(tensor)):
                stream.write(piece)
    return digest.hexdigest()


def check_dtype(key: str, tensor: torch.Tensor) -> None:
    """Raise ModelError if a safetensors file cannot hold the tensor; `key` names it in the message."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ModelError(f"{key} is a tensor of layout {tensor.layout}, {tensor.dtype}: only dense ones can be kept")
    if tensor.dtype not in _NAMES:
        raise ModelError(f"{key} is of {tensor.dtype}, which a safetensors file cannot hold")


def frame(table: Mapping[str, Any], text: str) -> bytes:
    """Return what a file's checksum covers besides the tensors' bytes."""
    return json.dumps([text, table]).encode()


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the tensor's bytes in pieces of megabytes: hashing and writing one releases Python's lock (GIL)."""
    if not tensor.nbytes:
        return
    raw = as_bytes(tensor).numpy().data
    for start in range(0, len(raw), PIECE):
        yield raw[start : start + PIECE]


def read_tensors(storage: Storage, name: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a safetensors file, and its text ("" if another program wrote it).

    Raises StorageError if it is not safetensors, is truncated, or its checksum is wrong.
    """
    file = TensorFile(storage, name, storage.read_bytes(name))
    return {key: stored.whole() for key, stored in file.tensors().items()}, file.text


@dataclass(frozen=True)
class Stored:
    """A tensor that is somewhere else: its size, and a function that reads rows of it.

    `strides` are those of its layout in memory, where that is known.
    """

    shape: tuple[int, ...]
    rows: ReadRows
    strides: tuple[int, ...] | None = None

    def whole(self) -> torch.Tensor:
        """Read the whole tensor."""
        return self.rows(0, self.shape[0] if self.shape else 1)

    def empty(self) -> torch.Tensor:
        """Return a tensor of its size and dtype without memory."""
        return torch.empty(self.shape, dtype=self.rows(0, 0).dtype, device="meta")

    def like(self, tensor: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
        """Read the part that a worker holds of `tensor`: its rows if that is sharded, else the whole."""
        if not is_sharded(tensor):
            return self.whole()
        return self.rows(*rows_of_rank(self.shape[0], world_size, rank))


def sha256_of(tensors: Mapping[str, Stored]) -> str:
    """Return the hash of the tensors' raw bytes, in the order of their names; one at a time is in memory."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        for piece in _pieces(tensors[key].whole()):
            digest.update(piece)
    return digest.hexdigest()


def in_memory(tensor: torch.Tensor) -> Stored:
    """Wrap a tensor that is in memory as if it were stored elsewhere."""

    def rows(start: int, stop: int) -> torch.Tensor:  # a sparse tensor has no slices
        return tensor[start:stop] if tensor.ndim and stop - start < len(tensor) else tensor

    return Stored(tuple(tensor.shape), rows)


def made_dense(indices: Stored, values: Stored, shape: list[int]) -> Stored:
    """A sparse tensor as a dense one; only the rows that are asked for are in memory."""

    def read(start: int, stop: int) -> torch.Tensor:
        where, what = indices.whole(), values.whole()
        mine = (where[0] >= start) & (where[0] < stop)
        where = where[:, mine]
        where[0] -= start
        size = [stop - start, *shape[1:]]
        return torch.sparse_coo_tensor(where, what[mine], size, check_invariants=False).to_dense()

    return Stored(tuple(shape), read)


class TensorFile:
    """A safetensors file. It reads the header first, and later only the rows that are asked for.

    If its bytes have been read already, as `data`, they are checked at once, and rows come from them: on an object
    store each other read is a request. Raises StorageError if the file is not safetensors, or is truncated.
    """

    def __init__(self, storage: Storage, name: str, data: bytes | None = None) -> None:
        self.where = f"{storage}/{name}"
        self._open = partial(storage.open, name) if data is None else partial(pa.BufferReader, data)
        try:
            with self._open() as stream:
                size, end = int.from_bytes(stream.read(8), "little"), stream.size()
                self._table = json.loads(stream.read(min(size, end)))
            self._begin, room = 8 + size, end - 8 - size
            metadata = self._table.pop("__metadata__", {})
            self.text, self.digest = str(metadata.get(TEXT, "")), metadata.get(DIGEST)
            self._is_ours = TEXT in metadata or DIGEST in metadata  # `write_tensors` writes both
            for location in self._table.values():
                (start, stop), shape = location["data_offsets"], location["shape"]
                num_bytes = torch.empty(shape, dtype=DTYPES[location["dtype"]], device="meta").nbytes
                if stop - start != num_bytes or not 0 <= start <= stop <= room:
                    raise ValueError(f"bytes {start} to {stop} of {room} are not a tensor of size {shape}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise StorageError(f"{self.where}: is damaged, or no safetensors file: {error}") from None
        if data is not None:
            self.check()

    def tensors(self) -> dict[str, Stored]:
        """Return all its tensors, none of which is read yet."""
        return {  # not kept: they hold this file, and with it its bytes
            key: Stored(
                tuple(entry["shape"]),
                partial(self._rows, DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"][0]),
            )
            for key, entry in self._table.items()
        }

    def check(self) -> None:
        """Raise StorageError if its bytes have changed since they were written. It is read in pieces."""
        if not self._is_ours:
            return
        digest = hashlib.sha256(frame(self._table, self.text))
        with self._open() as stream:
            stream.seek(self._begin)
            while piece := stream.read_buffer(PIECE):
                digest.update(piece)
        if digest.hexdigest() != self.digest:
            raise StorageError(f"{self.where}: is damaged: its bytes are not those that were written")

    def _rows(self, dtype: torch.dtype, shape: list[int], offset: int, start: int, stop: int) -> torch.Tensor:
        """Read rows of the tensor whose bytes begin at `offset`; of a scalar, the whole."""
        made = torch.empty([stop - start, *shape[1:]] if shape else [], dtype=dtype)
        if not made.nbytes:
            return made
        row_bytes = torch.Size(shape[1:]).numel() * made.itemsize
        with self._open() as stream:
            stream.seek(self._begin + offset + start * row_bytes)
            if stream.readinto(made.view(-1).view(torch.uint8).numpy()) != made.nbytes:
                raise StorageError(f"{self.where}: is damaged: it ends before its tensors do")
        return made


def is_sharded(tensor: Any) -> bool:
    """Return whether this worker holds only rows of the tensor, as of torch's DTensors."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's rows of a sharded tensor, in the same memory; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def rows_of_rank(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the first row of a rank, and its end: the last ranks may hold fewer rows, or none.

    >>> [rows_of(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    share = -(-rows // world_size)
    return min(rows, share * rank), min(rows, share * (rank + 1))


@torch.no_grad()
def on_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the whole tensor on rank 0's CPU; every rank calls this for a sharded one, and others get no rows."""
    if not is_sharded(tensor):
        return tensor.detach().cpu()
    group = tensor.device_mesh.get_group()  # type: ignore[attr-defined]
    is_first = group.rank() == 0
    mine, rows = local(tensor.detach()), tensor.shape[0]
    share = -(-rows // group.size())
    # A gather needs equal sizes: the last ranks pad their rows, and rank 0 drops the padding.
    padded = mine.new_zeros(share, *tensor.shape[1:])
    padded[: mine.shape[0]] = mine
    received = [torch.empty_like(padded) for _ in range(group.size())] if is_first else None
    with waiting("the other workers' rows"):
        dist.gather(padded, received, dst=0, group=group)
    return torch.cat(received)[:rows].cpu() if received is not None else mine[:0]


def attend_writing(tensors: Mapping[str, torch.Tensor]) -> None:
    """Send this worker's rows of each tensor to rank 0, which reads each twice in `write_tensors`."""
    for _ in range(2):
        for tensor in filter(is_sharded, tensors.values()):
            on_rank_0(tensor)


def moved(leaf: Any, device: torch.device | None) -> Any:
    """Return a tensor on the device; anything else, or with device None, unchanged.

    Only a copy to the CPU is waited for: its numbers are read without regard to the GPU's streams.
    """
    if device is None or not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to(device, non_blocking=device.type != "cpu")


def moved_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch on the device: each tensor, and each object that has a method `to`, by that."""
    bare = bare_tensors(batch)
    if bare is None:
        return map_batch(lambda leaf: moved(leaf, device), lambda tensor: tensor.to(device), batch)
    beside = device.type != "cpu"
    return with_tensors(batch, [tensor.to(device, non_blocking=beside) for tensor in bare])


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's elements fill their memory without gaps, in any order of the dimensions."""
    outer_first = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(outer_first).is_contiguous()


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, as in an expanded one."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def laid_out(values: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Copy the values into new memory with these strides, which must leave no gaps."""
    made = torch.empty_strided(values.shape, tuple(strides), dtype=values.dtype, device=values.device)
    return made.copy_(values)


def outputs_digest(outputs: Any, target: Any) -> tuple[torch.Tensor, int]:
    """Return 40 bits of a hash of the outputs' bytes, as a metric's (sum, weight): equal sums, equal outputs.

    So few bits that the sum over thousands of shards is exact in float64.
    """
    digest = hashlib.blake2b(digest_size=5)
    for leaf in flatten(outputs)[0]:
        raw = as_bytes(torch.as_tensor(leaf).cpu())
        digest.update(raw.numpy().data)
    return torch.tensor(int.from_bytes(digest.digest())), 1
