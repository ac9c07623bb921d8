"""Named tensors and a text in one safetensors file: reading it runs no code.

The format (https://huggingface.co/docs/safetensors) is eight bytes with the header's length, the header as JSON, and
the tensors' bytes. The file is streamed, so gigabytes are written without a copy, in parallel with a training.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dp_ray.errors import ModelError, StorageError
from dp_ray.storage import Storage
from dp_ray.tensors.raw import as_bytes

TEXT, DIGEST = "state", "sha256"
PIECE = 1 << 24
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
    told = {**(metadata or {}), TEXT: text, DIGEST: digest.hexdigest()}
    header = json.dumps({"__metadata__": told, **table}).encode()
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


def read_tensors(storage: Storage, name: str) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a safetensors file, and its text ("" if another program wrote it).

    Raises StorageError if it is not safetensors, is truncated, or its checksum is wrong.
    """
    return parse_tensors(storage.read_bytes(name), f"{storage}/{name}")


def parse_tensors(data: bytes, where: str) -> tuple[dict[str, torch.Tensor], str]:
    """`read_tensors` for a file's bytes; `where` names the file in errors."""
    try:
        size = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + size])
        metadata = table.pop("__metadata__", {})
        text, body = metadata.get(TEXT, ""), memoryview(data)[8 + size :]
        tensors = {key: _tensor(body, **entry) for key, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise StorageError(f"{where}: is damaged, or no safetensors file: {error}") from None
    if TEXT in metadata or DIGEST in metadata:  # `write_tensors` writes both
        digest = hashlib.sha256(frame(table, text))
        digest.update(body)
        if digest.hexdigest() != metadata.get(DIGEST):
            raise StorageError(f"{where}: is damaged: its bytes are not those that were written")
    return tensors, text


def read_text(storage: Storage, name: str) -> str:
    """The text of a safetensors file, "" if another program wrote it; reads no tensor.

    Raises StorageError if the file is not safetensors.
    """
    with storage.open(name) as stream:
        try:
            header = json.loads(stream.read(min(stream.size(), int.from_bytes(stream.read(8), "little"))))
            return str(header.get("__metadata__", {}).get(TEXT, ""))
        except (ValueError, AttributeError) as error:
            raise StorageError(f"{storage}/{name}: is damaged, or no safetensors file: {error}") from None


def sha256_of(storage: Storage, name: str) -> str:
    """The hash of the tensors' raw bytes, in the order of their names; raises what `read_tensors` raises."""
    tensors, _ = read_tensors(storage, name)
    digest = hashlib.sha256()
    for key in sorted(tensors):
        for piece in _pieces(tensors[key]):
            digest.update(piece)
    return digest.hexdigest()


def _tensor(body: memoryview, dtype: str, shape: list[int], data_offsets: list[int]) -> torch.Tensor:
    start, end = data_offsets
    made = torch.empty(shape, dtype=DTYPES[dtype])
    if end - start != made.nbytes or end > len(body):
        raise ValueError(f"bytes {start} to {end} of {len(body)} are not a tensor of size {shape}")
    if made.nbytes:
        made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(body[start:end]), dtype=torch.uint8))
    return made


def frame(table: Mapping[str, Any], text: str) -> bytes:
    """What a file's checksum covers besides the tensors' bytes."""
    return json.dumps([text, table]).encode()


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in pieces of megabytes: hashing and writing a piece release Python's lock (GIL)."""
    if not tensor.nbytes:
        return
    raw = as_bytes(tensor).numpy().data
    for start in range(0, len(raw), PIECE):
        yield raw[start : start + PIECE]
