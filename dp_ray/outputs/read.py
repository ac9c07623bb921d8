"""Read the outputs of a run from their files, as if these were one: begin at `Merged`.

`reopen` turns a finished prediction into one that lacks the shards in which samples were set aside, so that they run
again: the rows of a file that lacks some become parts again, as workers write them. The other files stay.
`Previews` keeps a few inputs of a prediction, as thumbnails where they are images, for the page of the run.
"""

import base64
import functools
import itertools
import math
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dp_ray.engine.items import split_passthrough
from dp_ray.errors import StorageError
from dp_ray.outputs.columns import SAMPLE_INDEX, Column, Layout, from_arrow, rebuild
from dp_ray.outputs.files import FileRecord, file_names, read_records
from dp_ray.outputs.parts import POSITION, lay_out, part_schema
from dp_ray.plan.split import Range, Shard, Split
from dp_ray.records import IGNORE, Record
from dp_ray.rundir import ledger
from dp_ray.rundir.files import BEFORE_RETRY, RESULT
from dp_ray.rundir.ledger import LEDGER_JSON, PARTS, Ledger
from dp_ray.storage import Storage
from dp_ray.tables import reading
from dp_ray.tensors.tree import flatten

PREVIEWS = "previews"
ROWS = 8  # at the start, and as many at the end
SIZE = 64  # the longer side of a thumbnail, in pixels
NUMBERS = 6  # that are shown of an input that is no image
NAMES, CHARACTERS = 12, 60  # likewise, of a sample's named inputs and of a text


@dataclass(frozen=True)
class Merged:
    """The outputs in some files, in order; each method reads the files again, so nothing stays in memory.

    A leaf that is of one shape in each file, but not in all, is one whose rows differ.
    """

    run: Storage
    names: tuple[str, ...]

    @classmethod
    def of(cls, run: Storage) -> "Merged":
        """Return all outputs of a finished run."""
        return cls(run, tuple(file_names(run)))

    def layout(self) -> Layout:
        """Return the nesting and the columns of the outputs."""
        return functools.reduce(Layout.join, (layout for _, layout in self._files()))

    def read(self) -> Any:
        """Read all outputs, in order, in the model's own nesting."""
        layout = self.layout()
        leaves: list[torch.Tensor | list[Any]] = []
        for column in layout.columns:
            pieces: list[Any] = list(self._leaf(column))
            if column.shape is None or column.is_list or column.is_value:
                leaves.append([row for piece in pieces for row in piece])
            elif pieces:
                leaves.append(torch.cat(pieces))
            else:
                leaves.append(torch.empty(0, *column.inner, dtype=column.torch_dtype))
        return rebuild(layout, leaves)

    def batches(self, batch_size: int, missing: Sequence[int] = ()) -> Iterator[Any]:
        """Yield the outputs of each global batch, in order, in the model's own nesting.

        `missing` are the positions that have no outputs: a batch is shorter by its own, and may have no rows.
        """
        layout = self.layout()
        sizes = _sizes(batch_size, sum(file.metadata.num_rows for file, _ in self._files()), missing)
        tables = (
            lay_out(pa.Table.from_batches([batch]), had, layout)
            for file, had in self._files()
            for batch in file.iter_batches(batch_size=batch_size)
        )
        for rows in _slices(tables, sizes):
            leaves = [from_arrow(column, rows.column(column.name).combine_chunks()) for column in layout.columns]
            for at, leaf in enumerate(leaves):
                # Rows of one shape are stacked, even if the rows of other batches have another shape.
                varies = layout.columns[at].shape is None and layout.columns[at].depth is None
                if isinstance(leaf, list) and varies and len({row.shape for row in leaf}) == 1:
                    leaves[at] = torch.stack(leaf)
            yield rebuild(layout, leaves)

    def sample_index(self) -> torch.Tensor:
        """Read the sample index of each row: int64 [rows]."""
        tables = (file.read(columns=[SAMPLE_INDEX]) for file, _ in self._files())
        return torch.cat([torch.from_numpy(table.column(0).to_numpy().copy()) for table in tables])

    def carried(self) -> dict[str, list[Any]]:
        """Read the values of the keys of `outputs.carry`: one for each row, in order."""
        columns = self.layout().carried
        values: dict[str, list[Any]] = {column.key: [] for column in columns}
        for file, _ in self._files():
            table = file.read(columns=[column.name for column in columns])
            for column in columns:
                values[column.key] += column.array(table.column(column.name).chunks).to_pylist()
        return values

    def _files(self) -> Iterator[tuple[pq.ParquetFile, Layout]]:
        """Yield each file in order, opened, with its own layout."""
        for name in self.names:
            with reading(self.run, name) as file:
                yield file, Layout.from_metadata(file.schema_arrow.metadata)

    def _leaf(self, wanted: Column) -> Iterator[torch.Tensor | list[Any]]:
        """Yield a leaf's rows, a row group at a time."""
        for file, layout in self._files():
            column = next(one for one in layout.columns if one.name == wanted.name)
            for number in range(file.num_row_groups):
                rows = file.read_row_group(number, columns=[column.name])
                yield from (from_arrow(column, chunk) for chunk in rows.column(column.name).chunks)


def _sizes(batch_size: int, rows: int, missing: Sequence[int]) -> Iterator[int]:
    """Yield how many of the outputs belong to each global batch: `rows` in all."""
    positions, absent = rows + len(missing), Counter(position // batch_size for position in missing)
    for number, first in enumerate(range(0, positions, batch_size)):
        yield min(batch_size, positions - first) - absent[number]


def _slices(tables: Iterator[pa.Table], sizes: Iterator[int]) -> Iterator[pa.Table]:
    """Yield the same rows in tables of these sizes."""
    left: pa.Table | None = None
    for size in sizes:
        while left is None or len(left) < size:
            table = next(tables)
            left = table if left is None else pa.concat_tables([left, table])
        yield left.slice(0, size)
        left = left.slice(size)


class PartPlan(NamedTuple):
    """A part to write: its steps and shards, and their positions `start .. stop - 1`."""

    done: Range
    start: int
    stop: int


def reopen(run: Storage, split: Split, missing: Iterable[int]) -> None:
    """Have the shards with the `missing` positions run again, when the job is resumed."""
    absent = sorted(missing)
    names = ledger.committed(run)
    run.child(PARTS).create()
    for record in read_records(run, names):
        here = [position for position in absent if record.first <= position < record.end]
        if here:
            number = int(record.name.partition("-")[0])
            names.remove(ledger.records_in(names)[number])
            names += _write_parts(run, split, record, here)
    run.write_text(BEFORE_RETRY, run.read_text(RESULT))
    # Killed before the ledger is written, the new parts do not count: the run is as it was.
    LEDGER_JSON.write(run, Ledger("", names))
    run.delete(RESULT)


def _write_parts(run: Storage, split: Split, record: FileRecord, missing: list[int]) -> Iterator[str]:
    """Write the rows of a file as parts, without the shards that have missing positions; yield the parts' names."""
    steps = range(record.first // split.batch_size, -(-record.end // split.batch_size))
    parts = list(part_plans(split, steps, missing))
    if not record.rows:
        return
    with reading(run, record.path) as file:
        layout = Layout.from_metadata(file.schema_arrow.metadata)
        rows = _positioned(file, layout, np.setdiff1d(np.arange(record.first, record.end), missing))
        held: pa.Table | None = next(rows)
        for part in parts:
            name = ledger.part_name(part.done, "")
            with run.child(PARTS).writing(name) as stream, pa.ipc.new_file(stream, part_schema(layout)) as writer:
                while held is not None:
                    positions = held.column(POSITION).to_numpy()
                    first, end = np.searchsorted(positions, [part.start, part.stop])
                    if first < end:
                        writer.write_table(held.slice(first, end - first))
                    if end < len(positions):
                        break
                    held = next(rows, None)
            yield name


def _positioned(file: pq.ParquetFile, layout: Layout, positions: np.ndarray) -> Iterator[pa.Table]:
    """Yield the rows of a file with their positions, as parts have them."""
    at = 0
    for number in range(file.num_row_groups):  # a group at a time: `iter_batches` would join them to one of any size
        for batch in file.read_row_group(number).to_batches():
            here = pa.array(positions[at : at + len(batch)])
            yield pa.table([here, *batch.columns], schema=part_schema(layout))
            at += len(batch)


def part_plans(split: Split, steps: range, missing: list[int]) -> Iterator[PartPlan]:
    """Yield the steps without missing positions, in ranges, and of the others the shards without them, in runs."""
    bad = {position // split.batch_size for position in missing}
    begun = steps.start
    for step in [*sorted(bad), steps.stop]:
        if begun < step:
            start, stop = split.batch(begun)[0], split.batch(step - 1)[1]
            yield PartPlan(Range(begun, step, 0, split.shards), start, stop)
        if step in bad:
            yield from _runs(split, step, missing)
        begun = step + 1


def _runs(split: Split, step: int, missing: list[int]) -> Iterator[PartPlan]:
    """Yield the shards of a step without missing positions, those beside each other together."""
    run: list[Shard] = []
    for shard in [*split.worker(1, 0, step), None]:
        if shard is not None and not any(shard.start <= position < shard.stop for position in missing):
            run.append(shard)
        elif run:
            yield PartPlan(Range(step, step + 1, run[0].shard, run[-1].shard + 1), run[0].start, run[-1].stop)
            run = []


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
    return [one for name in folder.names() for one in PREVIEWS_JSON.read(folder, name)]


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
    tensors = [one for one in flatten(inputs)[0] if isinstance(one, torch.Tensor)]
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
    text = ", ".join(f"{one:.4g}" for one in row.flatten()[:NUMBERS].tolist())
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
    """Encode uint8 [height, width, 1 or 3] as a PNG file."""
    height, width, channels = pixels.shape
    lines = b"".join(b"\0" + bytes(line.flatten().tolist()) for line in pixels)  # each line without a filter
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 6)), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return file
