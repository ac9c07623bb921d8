"""Read the outputs of a run from their files, as if these were one: begin at `Merged`."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dp_ray.outputs.columns import SAMPLE_INDEX, Column, Layout, from_arrow, rebuild
from dp_ray.outputs.files import file_names
from dp_ray.outputs.parts import lay_out
from dp_ray.storage import Storage
from dp_ray.tables import reading


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
            column = next(column for column in layout.columns if column.name == wanted.name)
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
