"""The values of samples: columns of Arrow tables as numbers, text, bytes and tensors, and the decoders of values.

A decoder is a function that turns a stored value, like the bytes of a JPEG, into one that a model takes.
"""

import functools
import io
import json
import pkgutil
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from dp_ray.errors import DataError, JobError
from dp_ray.system.process import importing_from_here
from dp_ray.text import did_you_mean, listed

RowNumbers = np.ndarray[Any, np.dtype[np.int64]]
RowGetter = Callable[[RowNumbers], list[Any]]
Decoder: TypeAlias = Callable[[Any], Any]
Decode: TypeAlias = Mapping[str, Decoder | str]

LACKS = "a list lacks a value in its middle; fill it, or leave the column out"


class MissingValue(DataError):
    """A value that no batch can hold: missing, or text that is damaged.

    `row` is that of the table. A dataset says where it lies.
    """

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text)
        self.row = row


def row_getter(name: str, column: pa.ChunkedArray) -> RowGetter:
    """Return a function that gives the values of rows of a column: a list with one for each.

    Numbers and truth values are numpy scalars of the column's own type, so that torch's collate keeps it. Lists of
    numbers are tensors of that type, nested ones too if their inner lists have one length; other lists stay lists.
    Text is a str, binary data bytes. Structs are dicts. Times, dates and decimals are Python's own objects.

    The function raises MissingValue for a missing value, also for one in the middle of a list. Raises DataError for
    tensors whose permutation pyarrow itself reads in another way than it writes it.
    """
    array = _one(column)
    if isinstance(column.type, pa.FixedShapeTensorType):
        order = _order(column.type)
        if [order[letter] for letter in order] != [*range(len(order))]:
            # pyarrow writes the inverse of what Arrow's specification demands, so it is not known which is meant.
            raise DataError(
                f"column {name!r} holds tensors with the permutation {order}, which writers of Arrow understand in "
                "two ways; write the tensors in the order of their dimensions"
            )
    is_dictionary = isinstance(column.type, pa.DictionaryType)
    give = _values(array.type if is_dictionary else column.type, array)
    if not array.null_count and is_number(array.type):
        return give
    missing = array.is_null().to_numpy(zero_copy_only=False)

    def checked(rows: RowNumbers) -> list[Any]:
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
    """Return numbers, or lists of numbers of one length, as an array of a row each; None for other values."""
    array = _one(column)
    if array.null_count:
        return None
    if is_number(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if not _is_list(array.type) or not is_number(array.type.value_type) or not len(array):
        return None
    sizes, inner = array.value_lengths().to_numpy(zero_copy_only=False), array.flatten()
    if inner.null_count or (sizes != sizes[0]).any():
        return None
    numbers = np.asarray(inner.to_numpy(zero_copy_only=False))
    if not isinstance(column.type, pa.FixedShapeTensorType):
        return numbers.reshape(len(array), int(sizes[0]))
    return numbers.reshape(len(array), *column.type.shape).transpose(0, *(1 + digit for digit in _order(column.type)))


def _order(kind: pa.FixedShapeTensorType) -> list[int]:
    """Return which of the stored dimensions each dimension of a tensor is."""
    return kind.permutation or [*range(len(kind.shape))]


def _one(column: pa.ChunkedArray) -> pa.Array:
    if isinstance(column.type, pa.DictionaryType):
        column = column.cast(column.type.value_type)
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _values(kind: pa.DataType, array: pa.Array) -> RowGetter:
    if isinstance(kind, pa.FixedShapeTensorType):
        give, shape, order = _lists(array), kind.shape, _order(kind)
        return lambda rows: [value.reshape(shape).permute(order) for value in give(rows)]
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if is_number(kind):
        return _numbers(array)
    if _is_list(kind):
        return _lists(array)
    if pa.types.is_struct(kind):
        inner = zip(array.type, array.flatten(), strict=True)
        fields = {field.name: row_getter(field.name, pa.chunked_array([values])) for field, values in inner}
        return lambda rows: dicts({name: give(rows) for name, give in fields.items()}, len(rows))
    return functools.partial(_one_by_one, array, _plain)


def _one_by_one(array: pa.Array, convert: Callable[[pa.Scalar], Any], rows: RowNumbers) -> list[Any]:
    """Return values that are not cut from an array, as `convert` gives each."""
    values = []
    for row in rows.tolist():
        try:
            values.append(convert(array[row]))
        except DataError as error:
            raise MissingValue(str(error), row) from None
    return values


def _plain(scalar: pa.Scalar) -> Any:
    """Return a value as Python's own."""
    try:
        value = scalar.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"text that is not UTF-8: {error}") from None
    if _lacks(value):
        raise DataError(LACKS)
    return value


def _lacks(value: Any) -> bool:
    """Return whether a value is missing in a list, a dict or a list of these."""
    if isinstance(value, dict):
        return any(map(_lacks, value.values()))
    return any(map(_lacks, value)) if isinstance(value, list | tuple) else value is None


def _numbers(array: pa.Array) -> RowGetter:
    if array.null_count:  # else numpy would make floats of them
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    numbers = array.to_numpy(zero_copy_only=False)
    return lambda rows: list(numbers[rows])


def dicts(columns: dict[str, list[Any]], rows: int) -> list[dict[str, Any]]:
    """Return a dict for each of so many rows."""
    if not columns:
        return [{} for _ in range(rows)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _lists(array: pa.Array) -> RowGetter:
    inner = innermost = array.type.value_type
    while _is_list(innermost):
        innermost = innermost.value_type
    if not is_number(innermost):
        return functools.partial(_one_by_one, array, _plain)
    if not is_number(inner) or array.values.null_count:  # nested lists, and lists with missing values
        return functools.partial(_one_by_one, array, lambda scalar: _tensor(scalar.values))
    numbers, starts = array.values.to_numpy(zero_copy_only=False), _starts(array)
    sizes = np.diff(starts)
    if len(sizes) and sizes[0] and (sizes == sizes[0]).all():
        table = numbers[starts[0] : starts[-1]].reshape(len(sizes), sizes[0])
        return lambda rows: list(torch.from_numpy(table[rows]).unbind())
    return lambda rows: [torch.from_numpy(numbers[starts[row] : starts[row + 1]].copy()) for row in rows.tolist()]


def _starts(array: pa.Array) -> RowNumbers:
    """Return where each list begins among the values of all, and the end of the last: int64 [lists + 1]."""
    if not pa.types.is_fixed_size_list(array.type):
        return np.asarray(array.offsets, np.int64)
    starts: RowNumbers = np.arange(array.offset, array.offset + len(array) + 1) * array.type.list_size
    return starts


def _tensor(values: pa.Array) -> Any:
    """Return the numbers of one list; nested lists of one length are a tensor's dimensions, others stay lists."""
    if values.null_count:
        raise DataError(LACKS)
    if not _is_list(values.type):
        return torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))
    rows = [_tensor(scalar.values) for scalar in values]
    alike = all(isinstance(row, torch.Tensor) and row.shape == rows[0].shape for row in rows)
    return torch.stack(rows) if rows and alike else rows


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def image(value: Any, size: tuple[int, int] | None = None) -> torch.Tensor:
    """Return the image in the bytes of a JPEG, a PNG or another format of Pillow: uint8 [3, height, width], in RGB.

    It is turned upright, if EXIF tells that it lies on a side, as cameras and phones write it.
    It is resized to `size` (height, width), with Pillow's bilinear filter, if that is given. A dict with the key
    `bytes`, as Hugging Face stores images, is taken too. Of 16-bit images the upper 8 bits are kept.

    Raises DataError if Pillow is missing, and for pixels of 32 bits, whose range is not known.

    >>> import dp_ray, io
    >>> from PIL import Image
    >>> Image.new("RGB", (6, 4)).save(png := io.BytesIO(), "png")
    >>> dp_ray.data.image(png.getvalue(), size=(2, 2)).shape
    torch.Size([3, 2, 2])
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise DataError(f"images need Pillow: pip install 'dp-ray[images]': {error}") from None
    encoded = value["bytes"] if isinstance(value, Mapping) else value
    try:
        given = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError:  # which would show where the bytes lie in memory
        raise UnidentifiedImageError("cannot identify the format of the image") from None
    with given as opened:
        opened.load()  # a TIFF is turned upright in it, and a PNG may tell its orientation behind its pixels
        with suppress(SyntaxError, ValueError, LookupError, struct.error):  # what tells it is damaged
            ImageOps.exif_transpose(opened, in_place=True)
        narrow: Any = opened
        if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format in ("PNG", "PPM")):
            # Pillow would cut larger values off at 255, which is white.
            narrow = Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
        elif opened.mode in ("I", "F"):
            bits = "32-bit numbers" if opened.mode == "F" else "32-bit whole numbers"
            raise DataError(f"the pixels of the image are {bits}; decode them with a function that knows their range")
        rgb = narrow if narrow.mode == "RGB" else narrow.convert("RGB")  # which copies it
        if size is not None:
            rgb = rgb.resize(size[::-1], Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def float_image(value: Any) -> torch.Tensor:
    """Return what `image` does as float32 from 0 to 1: [3, height, width], as models of images take it.

    >>> import dp_ray, io
    >>> from PIL import Image
    >>> Image.new("RGB", (6, 4), "white").save(png := io.BytesIO(), "png")
    >>> dp_ray.data.float_image(png.getvalue()).max()
    tensor(1.)
    """
    return image(value).float() / 255


def array(value: bytes) -> torch.Tensor:
    """Return the array in a NumPy file (.npy), without objects. Raises DataError for more bytes than it has."""
    tensor = torch.from_numpy(np.load(stream := io.BytesIO(value), allow_pickle=False))
    if more := len(value) - stream.tell():
        raise DataError(f"its head tells of the shape {list(tensor.shape)}, behind which are {more} more bytes")
    return tensor


def tensors(value: bytes) -> Any:
    """Return the tensors and plain values in the bytes of a file of torch.save; other objects are refused.

    Raises DataError for a wrong checksum, which torch does not check.
    """
    if zipfile.is_zipfile(io.BytesIO(value)):  # else the older form, which has none
        with zipfile.ZipFile(io.BytesIO(value)) as records:
            has_checksums = any(file.CRC for file in records.infolist())  # torch can be set to write zeros for them
            if has_checksums and (wrong := records.testzip()) is not None:
                raise DataError(f"is damaged: {wrong!r} in it has a wrong checksum")
    return torch.load(io.BytesIO(value), weights_only=True)


def decode_of(decode: Decode | None, columns: Sequence[str] | None) -> dict[str, Decoder]:
    """Return the decoders by column; a text names one, as `package.module:function`.

    Raises JobError if one cannot be imported, or if its column is not among those that are read.
    """
    for name in decode or ():
        if columns is not None and name not in columns:
            raise JobError(
                f"decode: {name!r} is not among the columns{did_you_mean(name, columns)}: {listed(columns)}"
            )
    return {
        name: named("decode", given, f" for {name!r}") if isinstance(given, str) else given
        for name, given in (decode or {}).items()
    }


def named(argument: str, given: str, what: str = "") -> Callable[..., Any]:
    """Import the function that an argument names, as `package.module:function`; `what` says what it is for.

    Raises JobError if it cannot be imported or called.
    """
    try:
        with importing_from_here():
            function: Callable[..., Any] = pkgutil.resolve_name(given)
    except (ImportError, AttributeError, ValueError) as error:
        raise JobError(f"{argument}: cannot import {given!r}{what}: {error}") from error
    if not callable(function):
        raise JobError(f"{argument}: {given}{what} is {function!r:.60}, which cannot be called")
    return function


def decoded(item: dict[str, Any], decode: Mapping[str, Decoder]) -> dict[str, Any]:
    """Return the item with its values decoded. Raises DataError, which names the key, if a decoder raises."""
    for name, decoder in decode.items():
        if name not in item:
            raise DataError(f"there is no {name!r} to decode; the item has {listed(item)}")
        try:
            item[name] = decoder(item[name])
        except DataError as error:
            raise DataError(f"{name!r} cannot be decoded: {error}") from error
        except Exception as error:
            raise DataError(f"{name!r} cannot be decoded: {type(error).__name__}: {error}") from error
    return item


BY_EXTENSION: dict[str, Decoder] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"), image),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "index", "id"), int),
    "json": json.loads,
    "npy": array,
    **dict.fromkeys(("pt", "pth"), tensors),
}
