"""A few inputs of a prediction for the page of its run, as thumbnails where they are images.

`Previews` keeps them as the prediction goes, `read_previews` reads them.
"""

import base64
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from dp_ray.engine.loads.items import split_passthrough
from dp_ray.errors import StorageError
from dp_ray.plan.split import Shard
from dp_ray.records import IGNORE, Record
from dp_ray.storage import Storage
from dp_ray.tensors.tree import flatten

PREVIEWS = "previews"
ROWS = 8  # at the start, and as many at the end
SIZE = 64  # the longer side of a thumbnail, in pixels
NUMBERS = 6  # that are shown of an input that is no image
NAMES, CHARACTERS = 12, 60  # likewise, of a sample's named inputs and of a text


@dataclass(frozen=True)
class Preview:
    """An input: its sample, its PNG in base64 if it is an image, else its numbers; of named inputs, a line each."""

    sample_index: int
    png: str = ""
    text: str = ""


PREVIEWS_JSON = Record[list[Preview]](list[Preview], missing=[], damaged=IGNORE, unreachable=IGNORE, end="")


@dataclass(frozen=True)
class Previews:
    """The inputs of a prediction's first rows and of its last, written from the shards that hold them."""

    run: Storage
    total_rows: int
    batch_dim: int = 0

    def on_inputs(self, shard: Shard, indices: Any, batch: Any) -> None:
        """Keep some inputs of a shard, if it holds such rows; what cannot be kept is left out."""
        last = self.total_rows - ROWS
        if shard.start >= ROWS and shard.stop <= last:
            return
        rows = [at for at, position in enumerate(shard.positions) if not ROWS <= position < last]
        with suppress(StorageError, OSError, RuntimeError, TypeError, ValueError, OverflowError):
            inputs, _ = split_passthrough(batch, indices)
            previews = list(_previews(indices, inputs, self.batch_dim, rows))
            self.run.child(PREVIEWS).create()
            PREVIEWS_JSON.write(self.run.child(PREVIEWS), previews, f"rows-{shard.start}.json")


def read_previews(run: Storage) -> list[Preview]:
    """Read the previews of a run; files that are damaged are passed over."""
    folder = run.child(PREVIEWS)
    return [preview for name in folder.names() for preview in PREVIEWS_JSON.read(folder, name)]


def _previews(indices: Any, inputs: Any, batch_dim: int, rows: Sequence[int]) -> Iterator[Preview]:
    """Yield the previews of some rows of a batch: of all named inputs, else of the first tensor, or of each image."""
    first = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs  # of inputs and target
    if isinstance(first, Mapping) and (named := dict(_named(first, batch_dim, len(indices), rows))):
        for number, at in enumerate(rows):
            values = {name: of_rows[number] for name, of_rows in list(named.items())[:NAMES]}
            more = [f"and {len(named) - NAMES} more"] if len(named) > NAMES else []
            text = "\n".join([*itertools.starmap(_named_text, values.items()), *more])
            yield Preview(int(indices[at]), png=next(filter(None, map(_image, values.values())), ""), text=text)
        return
    tensors = [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
    if isinstance(inputs, list | tuple) and len(tensors) == len(inputs) == len(indices) and all(map(_image, tensors)):
        kept: Any = [tensors[at].detach().cpu() for at in rows]
    elif tensors and tensors[0].ndim > batch_dim and tensors[0].shape[batch_dim] == len(indices):
        kept = tensors[0].movedim(batch_dim, 0)[list(rows)].detach().cpu()
    else:
        return
    for sample, row in zip((indices[at] for at in rows), kept, strict=True):
        drawn, shape = _image(row), f" ({_shape(row)})" if row.numel() > NUMBERS else ""
        yield Preview(int(sample), png=drawn, text="" if drawn else f"{_numbers(row)}{shape}")


def _named(
    inputs: Mapping[Any, Any], batch_dim: int, size: int, rows: Sequence[int], above: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of each input that has something for each of `size` rows, and what it has for `rows`."""
    for key, value in inputs.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _named(value, batch_dim, size, rows, f"{name}.")
        elif isinstance(value, torch.Tensor) and value.ndim > batch_dim and value.shape[batch_dim] == size:
            yield name, value.movedim(batch_dim, 0)[list(rows)].detach().cpu()
        elif isinstance(value, list | tuple) and len(value) == size:
            yield name, [value[at] for at in rows]


def _named_text(name: str, row: Any) -> str:
    """Return a named input in words: its shape, and its first numbers unless it is drawn."""
    if not isinstance(row, torch.Tensor):
        text = str(row)
        return f"{name}: {text if len(text) <= CHARACTERS else f'{text[:CHARACTERS]} ...'}"
    shape = f" ({_shape(row)})" if row.ndim else ""
    return f"{name}{shape}" if _image(row) else f"{name}{shape}: {_numbers(row)}"


def _numbers(row: torch.Tensor) -> str:
    text = ", ".join(f"{number:.4g}" for number in row.flatten()[:NUMBERS].tolist())
    return text if row.numel() <= NUMBERS else f"{text} ..."


def _shape(row: torch.Tensor) -> str:
    return "x".join(map(str, row.shape))


def _image(row: Any) -> str:
    """Return an image as a PNG in base64; an empty text if the row is none."""
    pixels = thumbnail(row) if isinstance(row, torch.Tensor) else None
    return "" if pixels is None else base64.b64encode(png(pixels)).decode()


def thumbnail(row: torch.Tensor) -> torch.Tensor | None:
    """Return a small image as uint8 [height, width, 1 or 3]; None if the row is no image.

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
    """Return uint8 [height, width, 1 or 3] as a PNG file."""
    from PIL import Image  # Bokeh, which draws the page, brings it; a prediction without images needs no import

    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(2).cpu().numpy()).save(file, "PNG")  # of one channel: [height, width]
    return file.getvalue()
