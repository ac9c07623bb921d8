"""Reads the outputs of a run from their files, as if these were one."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dp_ray.results.columns import SAMPLE_INDEX, Column, Layout, from_arrow, rebuild
from dp_ray.results.manifest import file_names
from dp_ray.results.output_parts import lay_out, reading
from dp_ray.storage import Storage


@dataclass(frozen=True)
class Merged:
    """The outputs in some files, in order; each method reads the files again, so nothing stays in memory.

    A leaf that is of one shape in each file, but not in all, is one whose rows differ.
    """

    run: Storage
    names: tuple[str, ...]

    @classmethod
    def of(cls, run: Storage) -> "Merged":
        """All outputs of a finished run."""
        return cls(run, tuple(file_names(run)))

    def layout(self) -> Layout:
        """The nesting and the columns of the outputs."""
        return functools.reduce(Layout.join, (layout for _, layout in self._files()))

    def read(self) -> Any:
        """All outputs, in order, in the model's own nesting."""
        layout = self.layout()
        return rebuild(layout, [_whole(column, list(self._leaf(column))) for column in layout.columns])

    def batches(self, batch_size: int, missing: Sequence[int] = ()) -> Iterator[Any]:
        """The outputs of each global batch, in order, in the model's own nesting.

        `missing` are the positions that have no outputs: a batch is shorter by its own, and may have no rows.
        """
        layout = self.layout()
        sizes = _sizes(batch_size, sum(file.metadata.num_rows for file, _ in self._files()), missing)
        for rows in _slices(self._tables(layout, batch_size), sizes):
            leaves = [from_arrow(column, rows.column(column.name).combine_chunks()) for column in layout.columns]
            yield rebuild(layout, [_stacked(leaf) for leaf in leaves])

    def sample_index(self) -> torch.Tensor:
        """The sample index of each row: int64 [rows]."""
        tables = (file.read(columns=[SAMPLE_INDEX]) for file, _ in self._files())
        return torch.cat([torch.from_numpy(table.column(0).to_numpy().copy()) for table in tables])

    def carried(self) -> dict[str, list[Any]]:
        """The values that were carried, by key: one for each row, in order."""
        columns = self.layout().carried
        found: dict[str, list[Any]] = {column.key: [] for column in columns}
        for file, _ in self._files():
            table = file.read(columns=[column.name for column in columns])
            for column in columns:
                found[column.key] += column.array(table.column(column.name).chunks).to_pylist()
        return found

    def _files(self) -> Iterator[tuple[pq.ParquetFile, Layout]]:
        """Each file in order, opened, with its own layout."""
        for name in self.names:
            with reading(self.run, name) as file:
                yield file, Layout.from_metadata(file.schema_arrow.metadata)

    def _tables(self, layout: Layout, rows: int) -> Iterator[pa.Table]:
        for file, had in self._files():
            for batch in file.iter_batches(batch_size=rows):
                yield lay_out(pa.Table.from_batches([batch]), had, layout)

    def _leaf(self, wanted: Column) -> Iterator[torch.Tensor | list[torch.Tensor]]:
        """A leaf's rows, a row group at a time."""
        for file, layout in self._files():
            column = next(one for one in layout.columns if one.name == wanted.name)
            for number in range(file.num_row_groups):
                rows = file.read_row_group(number, columns=[column.name])
                yield from (from_arrow(column, chunk) for chunk in rows.column(column.name).chunks)


def _whole(column: Column, pieces: list[Any]) -> torch.Tensor | list[torch.Tensor]:
    if column.shape is None:
        return [row for piece in pieces for row in piece]
    return torch.cat(pieces) if pieces else torch.empty(0, *column.shape, dtype=column.torch_dtype)


def _stacked(leaf: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Stack rows of one shape into a tensor, even if the rows of other batches have another shape."""
    if isinstance(leaf, list) and len({row.shape for row in leaf}) == 1:
        return torch.stack(leaf)
    return leaf


def _sizes(batch_size: int, rows: int, missing: Sequence[int]) -> Iterator[int]:
    """How many of the outputs belong to each global batch: `rows` in all."""
    positions, absent = rows + len(missing), Counter(position // batch_size for position in missing)
    for number, first in enumerate(range(0, positions, batch_size)):
        yield min(batch_size, positions - first) - absent[number]


def _slices(tables: Iterator[pa.Table], sizes: Iterator[int]) -> Iterator[pa.Table]:
    """The same rows in tables of these sizes."""
    held: pa.Table | None = None
    for size in sizes:
        while held is None or len(held) < size:
            table = next(tables)
            held = table if held is None else pa.concat_tables([held, table])
        yield held.slice(0, size)
        held = held.slice(size)
