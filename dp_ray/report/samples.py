"""A sample of a prediction's outputs, as rows for a table: its first rows and its last, with thumbnails if kept."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import torch

from dp_ray.results.columns import SAMPLE_INDEX, Column, Layout, from_arrow
from dp_ray.results.manifest import names_so_far
from dp_ray.results.output_parts import reading
from dp_ray.results.preview import read_previews
from dp_ray.storage import Storage

ROWS = 8  # from the start, and as many from the end
NUMBERS = 4  # of a row's numbers that are shown
PROBABLE_CLASSES = range(2, 10_001)


def output_samples(run: Storage) -> list[dict[str, Any]]:
    """The first rows of the outputs so far and the last: sample index, what was carried, outputs, preview."""
    names = names_so_far(run)
    previews = {one.sample_index: one for one in read_previews(run)}
    rows = [*_first_rows(run, names[0]), *_last_rows(run, names[-1])] if names else []
    found = {row["sample_index"]: {**row, "preview": previews.get(row["sample_index"])} for row in rows}
    return list(found.values())


def _first_rows(run: Storage, name: str) -> Iterator[dict[str, Any]]:
    with reading(run, name) as file:
        layout = Layout.from_metadata(file.schema_arrow.metadata)
        for batch in itertools.islice(file.iter_batches(batch_size=ROWS), 1):
            yield from _as_rows(pa.Table.from_batches([batch]), layout)


def _last_rows(run: Storage, name: str) -> Iterator[dict[str, Any]]:
    with reading(run, name) as file:
        layout = Layout.from_metadata(file.schema_arrow.metadata)
        if file.num_row_groups:
            table = file.read_row_group(file.num_row_groups - 1)
            yield from _as_rows(table.slice(max(0, len(table) - ROWS)), layout)


def _as_rows(table: pa.Table, layout: Layout) -> Iterator[dict[str, Any]]:
    carried = {one.key: table.column(one.name).to_pylist() for one in layout.carried}
    leaves = {one.name: _leaf(table, one) for one in layout.columns}
    for at, sample in enumerate(table.column(SAMPLE_INDEX).to_pylist()):
        yield {
            "sample_index": sample,
            "carried": {key: str(values[at]) for key, values in carried.items()},
            "outputs": {name: value_text(rows[at]) for name, rows in leaves.items()},
        }


def _leaf(table: pa.Table, column: Column) -> Any:
    return from_arrow(column, table.column(column.name).combine_chunks())


def value_text(value: torch.Tensor) -> str:
    """A row of an output in a few words: its numbers if they are few; of a vector, where its largest is."""
    numbers = value.flatten()
    if not len(numbers):
        return "empty"
    if value.is_complex() or len(numbers) <= NUMBERS:
        shown = ", ".join(map(_number, numbers[:NUMBERS].tolist()))
        return shown if value.ndim == 0 or len(numbers) == 1 else f"[{shown}]"
    numbers = numbers.float()
    if value.ndim == 1 and len(numbers) in PROBABLE_CLASSES:
        at = int(numbers.argmax())
        return f"largest at {at}: {_number(float(numbers[at]))} (of {len(numbers)})"
    least, mean, most = (_number(float(one)) for one in (numbers.min(), numbers.mean(), numbers.max()))
    return f"{'x'.join(map(str, value.shape))}: {least} to {most}, mean {mean}"


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) and math.isfinite(value) else str(value)
