"""Turns columns of Arrow tables into the values of samples: numbers, text, bytes and tensors."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dp_ray.errors import DataError

Values = Callable[[int], Any]


def values_of(name: str, column: pa.ChunkedArray) -> Values:
    """A function that gives the value of a row of a column.

    Numbers and truth values are numpy scalars of the column's own type, so that torch's collate keeps it. Lists of
    numbers are tensors of that type, nested ones too if their inner lists have one length. Text is a str, binary data
    bytes. Structs are dicts. Times, dates and decimals are Python's own objects.

    The function raises DataError for a missing value, which no batch can hold.
    """
    array = _one(column)
    is_dictionary = isinstance(column.type, pa.DictionaryType)
    give = _values(array.type if is_dictionary else column.type)(array)
    if not array.null_count:
        return give
    missing = array.is_null().to_numpy(zero_copy_only=False)

    def checked(row: int) -> Any:
        if missing[row]:
            raise DataError(f"column {name!r} has no value; fill it, leave the row out, or leave the column out")
        return give(row)

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
    return np.asarray(inner.to_numpy(zero_copy_only=False)).reshape(len(array), int(sizes[0]))


def _one(column: pa.ChunkedArray) -> pa.Array:
    if isinstance(column.type, pa.DictionaryType):
        column = column.cast(column.type.value_type)
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _values(kind: pa.DataType) -> Callable[[pa.Array], Values]:
    if isinstance(kind, pa.FixedShapeTensorType):
        return functools.partial(_shaped, shape=kind.shape)
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if _is_number(kind):
        return _numbers
    if _is_list(kind):
        return _lists
    if pa.types.is_struct(kind):
        return _structs
    return lambda array: lambda row: array[row].as_py()


def _numbers(array: pa.Array) -> Values:
    numbers = array.to_numpy(zero_copy_only=False) if not array.null_count else _filled(array)
    return lambda row: numbers[row]


def _filled(array: pa.Array) -> Any:
    return array.fill_null(False if pa.types.is_boolean(array.type) else 0).to_numpy(zero_copy_only=False)


def _structs(array: pa.Array) -> Values:
    fields = {
        field.name: values_of(field.name, pa.chunked_array([inner]))
        for field, inner in zip(array.type, array.flatten(), strict=True)
    }
    return lambda row: {name: give(row) for name, give in fields.items()}


def _shaped(array: pa.Array, shape: list[int]) -> Values:
    return lambda row: _tensor(array[row].values).reshape(shape)


def _lists(array: pa.Array) -> Values:
    inner = array.type.value_type
    if not (_is_list(inner) or _is_number(inner)):
        return lambda row: array[row].as_py()
    return lambda row: _tensor(array[row].values)


def _tensor(values: pa.Array) -> Any:
    """The numbers of one list; nested lists of one length are the dimensions of the tensor, others stay lists."""
    if values.null_count:
        raise DataError("a list lacks a value in its middle; fill it, or leave the column out")
    if not _is_list(values.type):
        return torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))
    rows = [_tensor(one.values) for one in values]
    alike = all(isinstance(row, torch.Tensor) and row.shape == rows[0].shape for row in rows)
    return torch.stack(rows) if rows and alike else rows


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
