"""Turns columns of Arrow tables into the values of samples: numbers, text, bytes and tensors."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dp_ray.errors import DataError

Rows = np.ndarray[Any, np.dtype[np.int64]]
Values = Callable[[Rows], list[Any]]

LACKS = "a list lacks a value in its middle; fill it, or leave the column out"


class MissingValue(DataError):
    """A value that no batch can hold: missing, or text that is damaged.

    `row` is that of the table. A dataset says where it lies.
    """

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text)
        self.row = row


def values_of(name: str, column: pa.ChunkedArray) -> Values:
    """A function that gives the values of rows of a column: a list with one for each.

    Numbers and truth values are numpy scalars of the column's own type, so that torch's collate keeps it. Lists of
    numbers are tensors of that type, nested ones too if their inner lists have one length; other lists stay lists.
    Text is a str, binary data bytes. Structs are dicts. Times, dates and decimals are Python's own objects.

    The function raises MissingValue for a missing value, also for one in the middle of a list. Raises DataError for
    tensors whose permutation pyarrow itself reads in another way than it writes it.
    """
    array = _one(column)
    if isinstance(column.type, pa.FixedShapeTensorType):
        _check_permutation(name, column.type)
    is_dictionary = isinstance(column.type, pa.DictionaryType)
    give = _values(array.type if is_dictionary else column.type)(array)
    if not array.null_count and _is_number(array.type):
        return give
    missing = array.is_null().to_numpy(zero_copy_only=False)

    def checked(rows: Rows) -> list[Any]:
        lacking = np.flatnonzero(missing[rows])
        if lacking.size:
            row = int(rows[lacking[0]])
            raise MissingValue(f"column {name!r} has no value; fill it, leave the row or the column out", row)
        try:
            return give(rows)
        except MissingValue as error:
            raise MissingValue(f"column {name!r}: {error}", error.row) from None

    return checked


def stacked(column: pa.ChunkedArray) -> np.ndarray[Any, Any] | None:
    """The values of numbers, or of lists of numbers of one length, as an array of a row each; None for others."""
    array = _one(column)
    if array.null_count:
        return None
    if _is_number(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if not _is_list(array.type) or not _is_number(array.type.value_type) or not len(array):
        return None
    sizes, inner = array.value_lengths().to_numpy(zero_copy_only=False), array.flatten()
    if inner.null_count or (sizes != sizes[0]).any():
        return None
    numbers = np.asarray(inner.to_numpy(zero_copy_only=False))
    if not isinstance(column.type, pa.FixedShapeTensorType):
        return numbers.reshape(len(array), int(sizes[0]))
    return numbers.reshape(len(array), *column.type.shape).transpose(0, *(1 + one for one in _order(column.type)))


def _order(kind: pa.FixedShapeTensorType) -> list[int]:
    """Which of the stored dimensions each dimension of a tensor is."""
    return kind.permutation or [*range(len(kind.shape))]


def _check_permutation(name: str, kind: pa.FixedShapeTensorType) -> None:
    """Raise DataError for a permutation that is not its own inverse.

    pyarrow writes the inverse of the one that Arrow's specification demands, so it is not known which one is meant.
    """
    order = _order(kind)
    if [order[one] for one in order] != [*range(len(order))]:
        raise DataError(
            f"column {name!r} holds tensors with the permutation {order}, which writers of Arrow understand in two "
            "ways; write the tensors in the order of their dimensions"
        )


def _one(column: pa.ChunkedArray) -> pa.Array:
    if isinstance(column.type, pa.DictionaryType):
        column = column.cast(column.type.value_type)
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _values(kind: pa.DataType) -> Callable[[pa.Array], Values]:
    if isinstance(kind, pa.FixedShapeTensorType):
        return functools.partial(_shaped, shape=kind.shape, order=_order(kind))
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if _is_number(kind):
        return _numbers
    if _is_list(kind):
        return _lists
    if pa.types.is_struct(kind):
        return _structs
    return _plain


def _plain(array: pa.Array) -> Values:
    """Values that are Python's own, converted one by one."""
    return lambda rows: [_as_python(array[row], row) for row in rows.tolist()]


def _as_python(value: pa.Scalar, row: int) -> Any:
    try:
        found = value.as_py()
    except UnicodeDecodeError as error:
        raise MissingValue(f"text that is not UTF-8: {error}", row) from None
    if _lacks(found):
        raise MissingValue(LACKS, row)
    return found


def _lacks(value: Any) -> bool:
    """Whether a value is missing in a list, a dict or a list of these."""
    if isinstance(value, dict):
        return any(map(_lacks, value.values()))
    return any(map(_lacks, value)) if isinstance(value, list | tuple) else value is None


def _numbers(array: pa.Array) -> Values:
    numbers = array.to_numpy(zero_copy_only=False) if not array.null_count else _filled(array)
    return lambda rows: list(numbers[rows])


def _filled(array: pa.Array) -> Any:
    return array.fill_null(False if pa.types.is_boolean(array.type) else 0).to_numpy(zero_copy_only=False)


def _structs(array: pa.Array) -> Values:
    fields = {
        field.name: values_of(field.name, pa.chunked_array([inner]))
        for field, inner in zip(array.type, array.flatten(), strict=True)
    }
    return lambda rows: dicts({name: give(rows) for name, give in fields.items()}, len(rows))


def dicts(columns: dict[str, list[Any]], rows: int) -> list[dict[str, Any]]:
    """A dict for each of so many rows."""
    if not columns:
        return [{} for _ in range(rows)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _shaped(array: pa.Array, shape: list[int], order: list[int]) -> Values:
    give = _lists(array)
    return lambda rows: [value.reshape(shape).permute(order) for value in give(rows)]


def _lists(array: pa.Array) -> Values:
    inner = array.type.value_type
    if not _is_number(_innermost(inner)):
        return _plain(array)
    if not _is_number(inner) or array.values.null_count:
        return _nested(array)
    numbers, starts = array.values.to_numpy(zero_copy_only=False), _starts(array)
    sizes = np.diff(starts)
    if len(sizes) and sizes[0] and (sizes == sizes[0]).all():
        table = numbers[starts[0] : starts[-1]].reshape(len(sizes), sizes[0])
        return lambda rows: list(torch.from_numpy(table[rows]).unbind())
    return lambda rows: [torch.from_numpy(numbers[starts[row] : starts[row + 1]].copy()) for row in rows.tolist()]


def _nested(array: pa.Array) -> Values:
    """Nested lists, or those in which a value may be missing, one by one."""

    def give(rows: Rows) -> list[Any]:
        found = []
        for row in rows.tolist():
            try:
                found.append(_tensor(array[row].values))
            except DataError as error:
                raise MissingValue(str(error), row) from None
        return found

    return give


def _starts(array: pa.Array) -> Rows:
    """Where each list begins among the values of all, and the end of the last: int64 [lists + 1]."""
    if not pa.types.is_fixed_size_list(array.type):
        return np.asarray(array.offsets, np.int64)
    starts: Rows = np.arange(array.offset, array.offset + len(array) + 1) * array.type.list_size
    return starts


def _tensor(values: pa.Array) -> Any:
    """The numbers of one list; nested lists of one length are the dimensions of the tensor, others stay lists."""
    if values.null_count:
        raise DataError(LACKS)
    if not _is_list(values.type):
        return torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))
    rows = [_tensor(one.values) for one in values]
    alike = all(isinstance(row, torch.Tensor) and row.shape == rows[0].shape for row in rows)
    return torch.stack(rows) if rows and alike else rows


def _innermost(kind: pa.DataType) -> pa.DataType:
    """The type of what lists of lists hold in the end."""
    return _innermost(kind.value_type) if _is_list(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
