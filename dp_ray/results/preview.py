"""Keeps a few inputs of a prediction, as thumbnails where they are images, for the page of the run."""

import base64
import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dp_ray.errors import StorageError
from dp_ray.plan.split import Shard
from dp_ray.storage import Storage
from dp_ray.text import json_text

PREVIEWS = "previews"
ROWS = 8  # at the start, and as many at the end
SIZE = 64  # the longer side of a thumbnail, in pixels
NUMBERS = 6  # that are shown of an input that is no image


@dataclass(frozen=True)
class Preview:
    """An input: its sample, and a PNG in base64 or, if it is no image, some words."""

    sample_index: int
    png: str = ""
    text: str = ""


class Previews:
    """Writes the inputs of a prediction's first rows and of its last, from the shards that hold them."""

    def __init__(self, run: Storage, total_rows: int, batch_dim: int = 0) -> None:
        self._run = run
        self._batch_dim = batch_dim
        self._first, self._last = ROWS, total_rows - ROWS

    def on_inputs(self, shard: Shard, indices: Any, inputs: Any) -> None:
        """Keep some inputs of a shard, if it holds such rows; what cannot be kept is left out."""
        if shard.start >= self._first and shard.stop <= self._last:
            return
        missing = set(shard.missing)
        positions = [position for position in range(shard.start, shard.stop) if position not in missing]
        rows = [at for at, position in enumerate(positions) if not self._first <= position < self._last]
        with suppress(StorageError, OSError, RuntimeError, TypeError, ValueError, OverflowError):
            found = list(_previews(indices, inputs, self._batch_dim, rows))
            self._run.child(PREVIEWS).create()
            text = json_text([asdict(one) for one in found])
            self._run.child(PREVIEWS).write_text(f"rows-{shard.start}.json", text)


def read_previews(run: Storage) -> list[Preview]:
    """The previews of a run; files that are damaged are passed over."""
    folder = run.child(PREVIEWS)
    found: list[Preview] = []
    for name in folder.names():
        with suppress(StorageError, ValueError, TypeError):
            found += [Preview(**one) for one in json.loads(folder.read_text(name))]
    return found


def _previews(indices: Any, inputs: Any, batch_dim: int, rows: Sequence[int]) -> Iterator[Preview]:
    """The previews of some rows of a batch, by its first tensor."""
    leaf = next(_tensors(inputs), None)
    if leaf is None or leaf.ndim <= batch_dim or leaf.shape[batch_dim] != len(indices):
        return
    kept = leaf.movedim(batch_dim, 0)[list(rows)].detach().cpu()
    for sample, row in zip((indices[at] for at in rows), kept, strict=True):
        if (pixels := thumbnail(row)) is not None:
            yield Preview(int(sample), png=base64.b64encode(png(pixels)).decode())
        else:
            yield Preview(int(sample), text=_text(row))


def _tensors(inputs: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested inputs."""
    if isinstance(inputs, torch.Tensor):
        yield inputs
    elif isinstance(inputs, dict | list | tuple):
        for one in inputs.values() if isinstance(inputs, dict) else inputs:
            yield from _tensors(one)


def thumbnail(row: torch.Tensor) -> torch.Tensor | None:
    """A small image as uint8 [height, width, 1 or 3]; None if the row is no image.

    An image has three dimensions, of which the first or the last has 1 or 3 channels. Floats are spread over their
    own range, since a dataset may have normalized them.
    """
    if row.ndim != 3 or row.is_complex():
        return None
    if row.shape[0] in (1, 3):
        row = row.permute(1, 2, 0)
    if row.shape[2] not in (1, 3) or min(row.shape[:2]) < 4:
        return None
    stride = max(1, math.ceil(max(row.shape[:2]) / SIZE))
    row = row[::stride, ::stride]
    if row.dtype == torch.uint8:
        return row.contiguous()
    row = row.float().nan_to_num()
    low, high = row.min(), row.max()
    return ((row - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8).contiguous()


def png(pixels: torch.Tensor) -> bytes:
    """A PNG file of uint8 [height, width, 1 or 3]."""
    height, width, channels = pixels.shape
    lines = b"".join(b"\0" + bytes(line.flatten().tolist()) for line in pixels)  # each line without a filter
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines, 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*one) for one in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _text(row: torch.Tensor) -> str:
    """An input in words: its first numbers, and its size."""
    numbers = ", ".join(f"{one:.4g}" for one in row.flatten()[:NUMBERS].tolist())
    size = f" ({'x'.join(map(str, row.shape))})" if row.numel() > NUMBERS else ""
    return f"{numbers}{' ...' * (row.numel() > NUMBERS)}{size}"
