"""The dataset of a job with `pack`: its samples are windows, into which rows of the user's dataset are packed.

Begin at `packed_dataset`. Which rows a window has is arithmetic (`plan/packing.py`); here they are read and joined. A
dataset tells the tokens of each row by a method `lengths(field)`; of another one, all rows are read once. A dataset
that can read a stretch of a row has a method `read_parts`.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dp_ray.engine.loads.items import SampleReader, class_of, tensor_of, value_of
from dp_ray.engine.user_code import reraise_as
from dp_ray.errors import DataError, Error, JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Pack
from dp_ray.plan.costs import PackedRows
from dp_ray.plan.order import Ints, Order
from dp_ray.plan.packing import (
    IGNORED,
    ROWS_AT_ONCE,
    Cut,
    Lengths,
    Packing,
    RowPart,
    TooLongRow,
    Whole,
    above_int64,
    padding,
)

NO_DOCUMENT = -1  # where a window is not filled
READ_AT_ONCE = 1024  # rows, where all are read for their lengths
COMPARED = 1 << 20  # rows of which the plan tells the padding
# What a dataset of blocks does for whoever reads it; a `PackedDataset` hands it on as it is.
HANDED_ON = frozenset(
    (
        *("pins", "loader_context", "set_epoch", "reads_ahead", "blocks_held", "read_ahead", "stop_reading_ahead"),
        "take_seconds_ahead",
    )
)


def packed_dataset(job: Job, dataset: Any, name: str) -> Any:
    """Return the dataset whose samples are the windows of the job's `pack`; without one, the dataset itself.

    Each source of a mixture is packed by itself, so that its weights are those of tokens: a mixture has a method
    `with_sources`, which gives the same one of other sources.
    """
    if job.pack is None:
        return dataset
    if hasattr(dataset, "with_sources"):
        return dataset.with_sources(lambda source, own: packed_dataset(job, own, f"{name}.{source}"))
    return PackedDataset(dataset, job.pack, name)


def packings(dataset: Any) -> list["PackedDataset"]:
    """Return the datasets of windows in a job's dataset: itself, or the sources of a mixture; none without `pack`."""
    sources = getattr(dataset, "sources", None)
    every = sources.values() if isinstance(sources, Mapping) else [dataset]
    return [own for own in every if isinstance(own, PackedDataset)]


def rows_of_window(dataset: Any, sample: int) -> list[RowPart]:
    """Return the rows of a window, each with its stretch there; none of a sample that is no window."""
    if isinstance(dataset, PackedDataset):
        return dataset.parts(sample)
    if packings(dataset):  # of a mixture, whose samples say of which source they are
        source, _, own = dataset.locate(sample)
        return rows_of_window(dataset.sources[source], own)
    return []


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """A dataset of windows of rows of a dataset; errors name the row.

    A window has these tensors of `length` elements each:

    - the `fields` of its rows, one row after another;
    - `labels`: what follows each token in its row, or if `labels` is one of the fields, that field's next value.
      It is -100 for the last token of a row, and where the window is not filled;
    - `position_ids`: 0, 1, 2 ... in each row, from the row's first token in this window on;
    - `document_ids`: the row's index in the dataset; -1 where the window is not filled.

    Raises DataError for rows that cannot be packed, and JobError for a dataset of which that is true as a whole.
    """

    def __init__(self, dataset: Any, pack: Pack, name: str = "dataset") -> None:
        if getattr(dataset, "reads_forward", False):
            raise JobError(f"pack: a {class_of(dataset)} can only be read forward; write its rows to files first")
        self.dataset = dataset
        self.pack = pack
        self.name = name
        self._reader = SampleReader(dataset, f"the rows of {name}")
        lengths = self._lengths()
        if not len(lengths) or not lengths.any():
            raise DataError(f"{name}: has no tokens: {pack.fields[0]!r} is empty in all of its {len(lengths)} rows")
        self.packing = self._packing(lengths)

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, window: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([window])[0]

    def __getattr__(self, name: str) -> Any:
        if name in HANDED_ON and "dataset" in self.__dict__:
            return getattr(self.dataset, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitems__(self, windows: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return some windows. Raises IndexError, and DataError if a row cannot be read, or is not as its length."""
        if windows and not 0 <= min(windows) <= max(windows) < len(self):
            raise IndexError(f"window {list(windows)} of {len(self)}")
        of_windows = [self.packing.parts(window) for window in windows]
        values = self._values([part for parts in of_windows for part in parts])
        return [self._joined(parts, values) for parts in of_windows]

    def parts(self, window: int) -> list[RowPart]:
        """Return the rows of a window, each with the stretch of it that the window has."""
        return self.packing.parts(window)

    @property
    def block_rows(self) -> Ints:
        """The number of windows in each block of rows that is packed by itself: int64 [blocks]."""
        return self.packing.block_windows

    def hold_blocks(self, number: int) -> None:
        """Have the dataset keep the blocks in memory that hold the rows of so many blocks of windows."""
        if hasattr(self.dataset, "hold_blocks"):
            per_block = self.dataset.num_blocks * ROWS_AT_ONCE / len(self.packing.lengths)
            self.dataset.hold_blocks(number * (int(per_block) + 2))

    def blocks_at(self, first: int, stop: int) -> Any:
        """Return the numbers of the dataset's blocks that hold the windows first .. stop - 1."""
        return self.dataset.blocks_at(*self.packing.rows_between(first, stop))

    @property
    def description(self) -> str:
        """What decides the rows of each window, as text."""
        lengths = self.packing.lengths
        return f"windows of {self.pack.length}, {self.pack.how}, of {len(lengths)} rows, hash {digest_of(lengths)}"

    def described(self, job: Job) -> PackedRows:
        """Return what the plan tells: how full the windows are, and how full batches of rows would be."""
        lengths = self.packing.lengths
        order = Order(len(lengths), job.seed, 0, job.is_shuffled).indices(0, min(len(lengths), COMPARED))
        before = padding(np.asarray(lengths[order], np.int64), job.batch_size)
        sizes = len(lengths), self.packing.tokens, len(self), self.pack.length
        return PackedRows(self.name, *sizes, 1 - self.packing.filled, before)

    def _packing(self, lengths: Lengths) -> Packing:
        if self.pack.how == "cut":
            return Cut(lengths, self.pack.length)
        try:
            if not hasattr(self.dataset, "kept"):
                return Whole(lengths, self.pack.length)
            counts = self.dataset.kept(
                f"windows-{self.pack.length}",
                f"{digest_of(lengths)}, {ROWS_AT_ONCE}",
                lambda: Whole(lengths, self.pack.length).block_windows,
            )
            return Whole(lengths, self.pack.length, counts)
        except TooLongRow as error:
            raise DataError(
                f"{self._where(error.row)} has {error.size} tokens, and pack.length is {self.pack.length}; with how: "
                "whole no row is cut: raise length, shorten the row, or take how: cut"
            ) from None

    def _where(self, row: int) -> str:
        """Name a row, and if it is known its place in a file."""
        where = getattr(self.dataset, "where", None)
        return f"row {row} of {self.name}" + (f" ({where(row)})" if where is not None else "")

    def _lengths(self) -> Lengths:
        """Return the tokens of each row."""
        field, rows = self.pack.fields[0], len(self.dataset)
        if callable(getattr(self.dataset, "lengths", None)):
            with reraise_as(f"{self.name}: lengths({field!r})", kind=DataError):
                told = np.asarray(self.dataset.lengths(field))
            is_right = told.ndim == 1 and told.dtype.kind in "iu" and len(told) == rows
            if not is_right or (told.dtype.kind == "i" and len(told) and int(told.min()) < 0):
                must = f"one whole number from 0 up for each of the {rows} rows"
                raise DataError(f"{self.name}: lengths({field!r}) must give {must}; got {told!r:.80}")
            return told
        sizes = [self._lengths_of(range(at, min(at + READ_AT_ONCE, rows))) for at in range(0, rows, READ_AT_ONCE)]
        return np.concatenate(sizes) if sizes else np.empty(0, np.int64)

    def _lengths_of(self, rows: range) -> Lengths:
        """Return the tokens of some rows, which are read for it; of a dataset of `datasets`, their column is."""
        field = self.pack.fields[0]
        if type(self.dataset).__module__.startswith("datasets.") and field in self.dataset.column_names:
            from pyarrow import compute as pc  # its import takes time, and few need it

            column = self.dataset.with_format("arrow")[rows.start : rows.stop].column(field)
            if not column.null_count and hasattr(column.type, "value_type"):
                return np.asarray(pc.list_value_length(column).to_numpy())
        items = self._reader.whole(list(rows))
        return np.array([len(self._value(item, field, row)) for row, item in zip(rows, items, strict=True)], np.int64)

    def _value(self, item: Any, field: str, row: int) -> Lengths:
        """Return a field of an item as a vector of numbers."""
        try:
            value = np.asarray(tensor_of(value_of(item, field) if hasattr(item, "keys") else item[field]))
        except DataError as error:
            raise DataError(f"{self._where(row)}: {error}") from None
        except (TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:  # numpy has no bfloat16
            what = f"pack.fields names keys of an item, with a list of numbers each; got a {class_of(item)}"
            raise DataError(f"{self._where(row)}: {field!r}: {what}: {error}") from None
        if value.ndim != 1 or (value.size and value.dtype.kind not in "iufb"):
            must = f"{field!r} must be a list with a number for each token"
            raise DataError(f"{self._where(row)}: {must}; got {value!r:.80}")
        if (at := above_int64(value)) is not None:
            raise DataError(f"{self._where(row)}: number {at} of {field!r} is {value[at]}, which int64 cannot hold")
        return value.astype(np.int64) if value.dtype.kind == "u" else value  # with uint64, numpy makes floats

    def _values(self, parts: Sequence[RowPart]) -> dict[tuple[int, int], list[Lengths]]:
        """Return the values of each field, of each part by its row and start, with one more token if there is one."""
        sizes = {part.row: int(self.packing.lengths[part.row]) for part in parts}
        wanted = [RowPart(row, start, min(stop + 1, sizes[row])) for row, start, stop in dict.fromkeys(parts)]
        if hasattr(self.dataset, "read_parts"):
            read = self.dataset.read_parts(wanted, self.pack.fields)
            return {(part.row, part.start): values for part, values in zip(wanted, read, strict=True)}
        try:
            rows = self._reader.whole(list(sizes))
        except Error as error:  # what a quarantine keeps of it must name the row
            raise type(error)(f"{error} (a row of a window)") from error.__cause__
        items = zip(sizes, rows, strict=True)
        of_rows = {row: self._of_row(item, row, sizes[row]) for row, item in items}
        return {(row, start): [value[start:stop] for value in of_rows[row]] for row, start, stop in wanted}

    def _of_row(self, item: Any, row: int, size: int) -> list[Lengths]:
        values = [self._value(item, field, row) for field in self.pack.fields]
        for field, value in zip(self.pack.fields, values, strict=True):
            if len(value) == size:
                continue
            if field == self.pack.fields[0]:
                says = f"has {len(value)} tokens now, and had {size} when the rows were packed"
                raise DataError(f"{self._where(row)}: {says}; a row must keep its length")
            raise DataError(f"{self._where(row)}: {field!r} has {len(value)} values for {size} tokens")
        return values

    def _joined(
        self, parts: Sequence[RowPart], values: dict[tuple[int, int], list[Lengths]]
    ) -> dict[str, torch.Tensor]:
        """Return a window of these parts."""
        length, item = self.pack.length, {}
        sizes = np.array([part.stop - part.start for part in parts])
        rest = length - int(sizes.sum())
        mine = [values[part.row, part.start] for part in parts]
        for number, field in enumerate(self.pack.fields):
            if field != Pack.LABELS:
                pieces = [of_part[number][:size] for of_part, size in zip(mine, sizes, strict=True)]
                item[field] = _filled(pieces, rest, 0)
        of_labels = self.pack.fields.index(Pack.LABELS) if Pack.LABELS in self.pack.fields else 0
        item[Pack.LABELS] = _filled(
            list(_next_values(parts, [of_part[of_labels] for of_part in mine])), rest, IGNORED
        )
        item["position_ids"] = _filled([np.arange(size) for size in [*sizes, rest]], 0, 0)
        rows = np.repeat(np.array([part.row for part in parts], np.int64), sizes)
        item["document_ids"] = _filled([rows], rest, NO_DOCUMENT)
        return item


def digest_of(lengths: Lengths) -> str:
    """Return a hash of the lengths of rows, whatever type of whole numbers they have."""
    found = hashlib.sha256()
    for at in range(0, len(lengths), COMPARED):
        found.update(np.asarray(lengths[at : at + COMPARED], "<i8").tobytes())
    return found.hexdigest()[:16]


def _next_values(parts: Sequence[RowPart], values: Sequence[Lengths]) -> Iterator[Lengths]:
    """Yield for each part the value that follows each token in its row; none follows the row's last token."""
    for part, value in zip(parts, values, strict=True):
        after = value[1:] if value.dtype.kind == "f" else value[1:].astype(np.int64)  # -100 is no truth value
        lacks = part.stop - part.start - len(after)
        yield np.append(after, np.full(lacks, IGNORED, after.dtype)) if lacks else after


def _filled(pieces: Sequence[Lengths], rest: int, value: int) -> torch.Tensor:
    """Join some values, and fill up the rest; whole numbers become int64, as torch's losses and embeddings take."""
    kind = np.result_type(*pieces)
    kind = np.dtype(np.int64) if kind.kind in "iu" else kind
    return torch.from_numpy(np.concatenate([*pieces, np.full(rest, value, kind)], dtype=kind, casting="unsafe"))
