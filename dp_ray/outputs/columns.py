"""Convert between a model's outputs and Arrow columns: one column for each tensor, one row for each sample.

A tensor of at least two dimensions is a fixed-shape tensor column. Rows that differ in shape, or hold no numbers, are
structs of `data` and `shape`. In lists with an entry for each row (`outputs.ragged`), rows that differ in their first
length alone are Arrow lists: of numbers, or of lists of a fixed size, as boxes are. Floats that Arrow lacks
(bfloat16, float8) are stored as float32, which holds them exactly. Complex numbers are stored as pairs. The schema's
metadata keeps each column's original dtype and shape. Texts, and Python's numbers in such lists, are plain columns,
as carried values are.

`rows_of` and `to_arrow` lead there, `from_arrow` and `rebuild` back. The values of `outputs.carry` are columns
beside them: one value of the dataset's item for each row.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dp_ray.engine.host_copy import HostCopy
from dp_ray.errors import DataError, ModelError, StorageError
from dp_ray.tables import array_of, plain_values
from dp_ray.tensors.flat import as_bytes
from dp_ray.tensors.ragged import with_lists
from dp_ray.tensors.scatter import gather_leaves, may_have_lists_of_rows, rows_dim
from dp_ray.tensors.tree import (
    Keys,
    Leaf,
    Ragged,
    TreeSpec,
    first_difference,
    flatten,
    is_plain,
    leaf_keys,
    unflatten,
)

SINGLE = {"none": pa.null(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "text": pa.string()}
KINDS = {**SINGLE, **{f"list of {name}": pa.list_(kind) for name, kind in SINGLE.items()}}
# The dtypes of plain values, with their kinds. bool stands before int, of which Python's truth values are too.
VALUES = {"text": "text", "Python bool": "bool", "Python int": "int", "Python float": "float"}
PYTHON = {"text": str, "bool": bool, "int": int, "float": float}
METADATA = b"dp_ray"
SAMPLE_INDEX = "sample_index"
WIDENED = {torch.bfloat16, *(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))}
# One array for each carried key, then one leaf for each of the outputs: a tensor, rows in dimension 0, a Ragged, or
# an array of texts or of Python's numbers.
Rows = list[Any]


@dataclass(frozen=True)
class CarriedColumn:
    """A key of `outputs.carry`: its column's name, and the kind of its values, one of KINDS."""

    key: str
    name: str
    kind: str

    @property
    def arrow_type(self) -> pa.DataType:
        """The column's type."""
        return KINDS[self.kind]

    def join(self, other: "CarriedColumn") -> "CarriedColumn":
        """Return the column that holds the values of both: of None and any kind, and of whole numbers and others.

        Raises DataError, which names the key, if there is no such kind.
        """
        fields = [pa.schema([(self.key, column.arrow_type)]) for column in (self, other)]
        try:
            (joined,) = pa.unify_schemas(fields, promote_options="permissive").types
        except (pa.ArrowTypeError, pa.ArrowInvalid):
            raise DataError(
                f"outputs.carry: the values of {self.key!r} are {self.kind} in some shards and {other.kind} in "
                "others; they must be of one kind"
            ) from None
        return CarriedColumn(self.key, self.name, arrow_kind(joined))

    def array(self, pieces: Sequence[pa.Array]) -> pa.Array:
        """Join the values of all pieces, in order, in the column's type."""
        return pa.concat_arrays([self.converted(piece) for piece in pieces])

    def converted(self, values: pa.Array) -> pa.Array:
        """Convert the key's values to the column's type; raise DataError, naming it, if one does not fit."""
        try:
            return values.cast(self.arrow_type)
        except pa.ArrowInvalid as error:
            says = f"outputs.carry: the values of {self.key!r} are {self.kind} in some shards: {error}"
            raise DataError(f"{says}; carry them as text") from error


def arrow_kind(arrow_type: pa.DataType) -> str:
    """Return the name of an Arrow type in KINDS; raise DataError if it has none."""
    for name, kind in KINDS.items():
        if kind == arrow_type:
            return name
    raise DataError(
        f"outputs.carry: values of Arrow's type {arrow_type} cannot be carried; they may be {', '.join(KINDS)}"
    )


@dataclass(frozen=True)
class Column:
    """One leaf of the outputs: its column's name, its dtype, and the shape of a row (None where rows differ).

    If rows differ in their first length alone, as in a list with an entry for each row, that length is None. `depth`
    keys of the leaf's path lead to that list; it is None for a leaf in no such list. For texts and Python's numbers,
    the dtype is one of VALUES, and the shape ().
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    is_array: bool = False
    depth: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values that `from_json` reads."""
        values = asdict(self)
        if self.depth is None:  # as earlier versions wrote it
            del values["depth"]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Column":
        """Read what `to_json` returned."""
        shape = None if values["shape"] is None else tuple(values["shape"])
        return cls(values["name"], values["dtype"], shape, values["is_array"], values.get("depth"))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The leaf's dtype; raises StorageError if torch does not know it."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise StorageError(f"column {self.name!r} is of the unknown dtype {self.dtype!r}")
        return dtype

    @property
    def is_value(self) -> bool:
        """Whether each row is a text, or a number or truth value of Python."""
        return self.dtype in VALUES

    @property
    def is_stored_raw(self) -> bool:
        """Whether Arrow holds the very bytes of a row: not widened, no bits in place of bools, no struct."""
        is_plain = self.depth is None and not self.is_value and not self.is_struct
        return is_plain and self.torch_dtype not in {torch.bool, *WIDENED}

    @property
    def is_struct(self) -> bool:
        """Whether each row is stored with its shape.

        Arrow's tensor columns cannot hold rows that differ in shape or hold no numbers.
        """
        return self.shape is None or 0 in self.shape

    @property
    def is_list(self) -> bool:
        """Whether each row is an Arrow list."""
        return bool(self.shape) and self.shape[0] is None  # type: ignore[index]

    @property
    def inner(self) -> list[int]:
        """The lengths of the dimensions that are the same for all rows."""
        return [size for size in self.shape or () if size is not None]

    @property
    def stored(self) -> list[int]:
        """The same as they are stored: complex numbers as pairs."""
        return [*self.inner, 2] if self.torch_dtype.is_complex else self.inner

    @property
    def arrow_type(self) -> pa.DataType:
        """The column's type: plain for one number a row, else a tensor, a list, or a struct (see `is_struct`)."""
        if self.is_value:
            return KINDS[VALUES[self.dtype]]
        value = pa.from_numpy_dtype(_to_numpy(torch.empty(0, dtype=self.torch_dtype)).dtype)
        if self.shape is None or self.is_struct:
            return pa.struct([("data", pa.large_list(value)), ("shape", pa.list_(pa.int64()))])
        if self.is_list:
            return pa.large_list(functools.reduce(pa.list_, reversed(self.stored), value))
        return pa.fixed_shape_tensor(value, self.stored) if self.stored else value


@dataclass(frozen=True)
class Layout:
    """The nesting of the outputs and their columns, as an outputs file describes them in its metadata."""

    spec: TreeSpec
    columns: tuple[Column, ...]
    batch_dim: int = 0
    carried: tuple[CarriedColumn, ...] = ()

    @property
    def all_columns(self) -> tuple[CarriedColumn | Column, ...]:
        """The columns of a file after the sample index: what is carried, then the outputs."""
        return *self.carried, *self.columns

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema: the sample index, then the columns, with this layout as metadata."""
        fields = [(SAMPLE_INDEX, pa.int64()), *((column.name, column.arrow_type) for column in self.all_columns)]
        return pa.schema(fields, metadata=self.metadata)

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """This layout as the schema's metadata; `from_metadata` is the inverse."""
        values: dict[str, Any] = {
            "spec": self.spec.to_json(),
            "columns": [column.to_json() for column in self.columns],
        }
        values["batch_dim"] = self.batch_dim
        if self.carried:
            values["carried"] = [asdict(column) for column in self.carried]
        return {METADATA: json.dumps(values).encode()}

    @classmethod
    def from_metadata(cls, metadata: dict[bytes, bytes] | None) -> "Layout":
        """Read the layout from a schema's metadata; raises StorageError if it has none."""
        if not metadata or METADATA not in metadata:
            raise StorageError("this Parquet file does not hold outputs of dp_ray")
        values = json.loads(metadata[METADATA])
        columns = map(Column.from_json, values["columns"])
        carried = tuple(CarriedColumn(**column) for column in values.get("carried", []))
        return cls(TreeSpec.from_json(values["spec"]), tuple(columns), values["batch_dim"], carried)

    def join(self, other: "Layout") -> "Layout":
        """Return the layout that holds the rows of both: a column whose row shapes differ becomes variable.

        Raises ModelError, which names the column, if the nesting or the dtypes differ.
        """
        if (problem := first_difference(self.spec, other.spec)) is not None:
            raise ModelError(
                f"the model's outputs are not nested alike on all shards: {problem}; what differs from row to row "
                "must be a tensor, or a list of texts, with a row for each sample"
            )
        if leaf_keys(self.spec) != leaf_keys(other.spec):
            raise ModelError(
                f"the model's outputs have their keys in another order on some shards: {self.spec.paths} "
                f"and {other.spec.paths}"
            )
        columns: list[Column] = []
        for column, another in zip(self.columns, other.columns, strict=False):
            if replace(column, shape=None) != replace(another, shape=None):
                dtypes = f"{column.dtype} on one, {another.dtype} on another"
                raise ModelError(f"output {column.name!r} is not alike on all shards: {dtypes}")
            columns.append(column if column.shape == another.shape else replace(column, shape=None))
        carried = tuple(carried.join(another) for carried, another in zip(self.carried, other.carried, strict=True))
        return Layout(self.spec, tuple(columns), self.batch_dim, carried)


def rows_of(
    outputs: Any,
    rows: int,
    batch_dim: int,
    carried: Mapping[str, pa.Array] | None = None,
    copies: list[HostCopy] | None = None,
) -> tuple[Layout, Rows]:
    """Split a shard's outputs into their layout and their leaves, on the CPU with rows in dimension 0.

    `carried` holds an array for each carried key. With `copies`, leaves of a GPU may still be on their way: wait for
    the copies added to it before the numbers are used.

    Raises ModelError, which names the leaf's path, if a leaf does not have one entry for each of the `rows` rows, and
    Error for a class that cannot be made again.
    """
    try:
        leaves, spec = flatten(outputs)
        leaves = gather_leaves([(leaves, spec)], [rows], batch_dim)
        if not leaves:
            raise ModelError(f"the model returned no tensor to merge, but {outputs!r:.60}")
    except ModelError as error:
        if may_have_lists_of_rows(outputs, rows):
            raise ModelError(f"{error}; if a list has an entry for each row, set outputs.ragged: true") from None
        raise
    unflatten(spec, leaves)  # raises now for a class that cannot be made again, not when the outputs are read
    carried = carried or {}
    names = iter(_column_names([*carried, *spec.paths]))
    beside = [CarriedColumn(key, next(names), arrow_kind(array.type)) for key, array in carried.items()]
    kept = [_kept(name, leaf, batch_dim, copies) for name, leaf in zip(names, leaves, strict=True)]
    layout = Layout(spec, tuple(column for column, _ in kept), batch_dim, tuple(beside))
    return layout, [*carried.values(), *(leaf for _, leaf in kept)]


LayoutKey = tuple[Any, ...]


def layout_key(
    outputs: Any, tensors: Sequence[torch.Tensor], rows: int, carried: Mapping[str, pa.Array]
) -> LayoutKey:
    """Return what decides the layout of outputs of bare `tensors`, of so many rows."""
    keys = tuple((type(key), key) for key in outputs) if type(outputs) is dict else ()  # 1 and True are equal
    form: list[Any] = [rows, type(outputs), keys]
    for tensor in tensors:
        form += tensor.dtype, tensor.shape
    for key, array in carried.items():
        form += key, array.type
    return tuple(form)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _column_names(paths: Sequence[str]) -> list[str]:
    """Name the columns by their keys and paths; a bare tensor is `output`, and a name that is taken gets a `_`."""
    names: list[str] = []
    for path in paths:
        name = path or "output"
        while name in (SAMPLE_INDEX, "position", *names):
            name += "_"
        names.append(name)
    return names


LARGEST_BESIDE = 1 << 28  # bytes of a leaf that a GPU holds twice, while the next shard runs


def _kept(name: str, leaf: Any, batch_dim: int, copies: list[HostCopy] | None) -> tuple[Column, Any]:
    """Return a leaf's column, and a copy of the leaf, as `Rows` holds it."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "UT" and leaf.ndim == 1:
        dtype, array = _values(name, leaf.tolist())
        return Column(name, dtype, (), is_array=True), array
    if isinstance(leaf, Ragged) and leaf.has_values:
        dtype, array = _values(name, leaf.rows())
        return Column(name, dtype, (), depth=leaf.depth), array
    if not isinstance(leaf, Ragged):
        tensor = rows_first(_tensor(name, leaf), batch_dim, copies)
        return Column(name, _name(tensor), tuple(tensor.shape[1:]), isinstance(leaf, np.ndarray)), tensor
    numbers = rows_first(_tensor(name, leaf.data), 0, copies)
    shape: tuple[int | None, ...] | None = None
    inner = {sizes[1:] for sizes in leaf.shapes}
    if not any(leaf.shapes):
        shape = ()
    elif all(leaf.shapes) and len(inner) == 1 and 0 not in next(iter(inner)):
        shape = (None, *inner.pop())
    column = Column(name, _name(numbers), shape, isinstance(leaf.data, np.ndarray), leaf.depth)
    return column, replace(leaf, data=numbers)


def _values(name: str, values: list[Any]) -> tuple[str, pa.Array]:
    """Return the dtype of texts or of Python's numbers, and an array of them."""
    dtype, kind = next((dtype, kind) for dtype, kind in VALUES.items() if isinstance(values[0], PYTHON[kind]))
    try:
        return dtype, pa.array(values, KINDS[kind])
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ModelError(f"output {name!r} holds what no column of {KINDS[kind]} can: {error}") from None


def _tensor(name: str, leaf: Leaf) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    try:
        return torch.from_numpy(np.array(leaf, order="C"))
    except (TypeError, ValueError) as error:
        raise ModelError(f"output {name!r} is an array of {leaf.dtype}, which cannot be kept: {error}") from None


def rows_first(tensor: torch.Tensor, batch_dim: int, copies: list[HostCopy] | None) -> torch.Tensor:
    """Copy a tensor with its rows in dimension 0.

    It is a copy because the model may overwrite what it returned, and a view would keep its whole base alive.
    """
    rows_first = tensor.detach().movedim(rows_dim(tensor, batch_dim), 0)
    if copies is not None and rows_first.is_cuda and rows_first.nbytes <= LARGEST_BESIDE:
        copies.append(HostCopy(rows_first.clone(memory_format=torch.contiguous_format), beside=True))
        return copies[-1].here
    return rows_first.to("cpu", copy=True, memory_format=torch.contiguous_format)


def without_objects(outputs: Any) -> tuple[Any, dict[str, str]]:
    """Replace each object by None; return the outputs, and the class of each replaced object by its path.

    A numpy number becomes a plain one.
    """
    leaves, spec = flatten(outputs)
    left_out: dict[str, str] = {}
    kept = _without_objects(spec, (), left_out)
    return (outputs if kept is spec else unflatten(kept, leaves)), left_out


def _without_objects(spec: TreeSpec, above: Keys, left_out: dict[str, str]) -> TreeSpec:
    """Remove the objects from a spec; returns the spec itself if nothing changes."""
    if spec.kind == "constant":
        if is_plain(spec.value):
            return spec
        if isinstance(spec.value, np.generic) and is_plain(spec.value.item()):
            return replace(spec, value=spec.value.item())
        left_out[".".join(map(str, above))] = type(spec.value).__qualname__
        return replace(spec, value=None)
    below = zip(spec.keys, spec.children, strict=True)
    children = tuple(_without_objects(child, (*above, key), left_out) for key, child in below)
    changed = any(child is not other for child, other in zip(children, spec.children, strict=True))
    return replace(spec, children=children) if changed else spec


def carried_arrays(
    carried: Mapping[str, Sequence[Any]], indices: "np.ndarray[Any, np.dtype[np.int64]]"
) -> dict[str, pa.Array]:
    """Convert the carried values of some samples to Arrow arrays, by key.

    Raises DataError, which names samples, if the values of a key are of several kinds.
    """
    arrays = {}
    for key, values in carried.items():
        try:
            arrays[key] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            first: dict[str, int] = {}
            for index, value in zip(indices.tolist(), values, strict=True):
                first.setdefault(type(value).__qualname__, index)
            first.pop("NoneType", None)
            kinds = ", ".join(f"{kind} in sample {index}" for kind, index in first.items())
            why = f"they are of several kinds ({kinds})" if len(first) > 1 else f"{kinds}: {error}"
            raise DataError(f"outputs.carry: the values of {key!r} cannot be one column: {why}") from error
    return arrays


def to_arrow(column: CarriedColumn | Column, pieces: Sequence[Any]) -> pa.Array:
    """Join the rows of all `pieces`, tensors or carried values, in order, in one Arrow array of the column's type."""
    if isinstance(column, CarriedColumn):
        return column.array(pieces)
    if column.is_value:
        return pa.concat_arrays(pieces)
    if column.is_struct:
        return _variable(column, pieces)
    tensors = [piece.data if isinstance(piece, Ragged) else piece for piece in pieces]
    values = _to_numpy(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
    flat = array_of(values.reshape(-1))
    kind = column.arrow_type
    if column.is_list:
        for size in reversed(column.stored):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        lengths = [shape[0] for piece in pieces for shape in piece.shapes]
        return pa.LargeListArray.from_arrays(array_of(np.cumsum([0, *lengths], dtype=np.int64)), flat)
    if not isinstance(kind, pa.FixedShapeTensorType):
        return flat
    storage = pa.FixedSizeListArray.from_arrays(flat, kind.storage_type.list_size)
    return pa.ExtensionArray.from_storage(kind, storage)


def _variable(column: Column, pieces: Sequence[torch.Tensor | Ragged]) -> pa.Array:
    """Return rows of any shape as structs of their numbers and their shape."""
    rows = [row for piece in pieces for row in (piece.rows() if isinstance(piece, Ragged) else piece.unbind())]
    data = [_to_numpy(row).reshape(-1) for row in rows]
    offsets = np.cumsum([0, *(len(values) for values in data)], dtype=np.int64)
    kind = column.arrow_type.field("data").type.value_type
    flat = array_of(np.concatenate(data)) if data else pa.nulls(0, kind)
    shapes = pa.array([list(row.shape) for row in rows], pa.list_(pa.int64()))
    numbers = pa.LargeListArray.from_arrays(array_of(offsets), flat)
    return pa.StructArray.from_arrays([numbers, shapes], names=["data", "shape"])


def _to_numpy(tensor: torch.Tensor) -> Any:
    """Convert exactly to the nearest numpy type that Arrow has too."""
    tensor = tensor.detach().contiguous().resolve_conj().resolve_neg()
    if tensor.dtype in WIDENED:
        return tensor.float().numpy()
    if tensor.is_complex():
        return torch.view_as_real(tensor).numpy()
    try:
        return tensor.numpy()
    except TypeError as error:
        raise ModelError(f"an output of dtype {tensor.dtype} cannot be kept: {error}") from None


def from_arrow(column: Column, array: pa.Array) -> torch.Tensor | list[Any]:
    """Return the rows in dimension 0, or a list of them if their shapes differ or they are values of Python.

    It is the inverse of `to_arrow`.
    """
    if column.is_value:
        return array.to_pylist()  # type: ignore[no-any-return]
    if column.shape is None:
        values = ((row["data"].values.to_numpy(zero_copy_only=False), row["shape"].as_py()) for row in array)
        return [_to_torch(column, data).reshape(shape) for data, shape in values]
    if column.is_struct:
        return torch.empty(len(array), *column.inner, dtype=column.torch_dtype)
    if column.is_list:
        lengths, flat = np.diff(array.offsets.to_numpy()).tolist(), array.flatten()
        for _ in column.stored:
            flat = flat.flatten()
        numbers = _to_torch(column, plain_values(flat)).reshape(-1, *column.inner)
        return [row.clone() for row in torch.split(numbers, lengths)]  # none keeps the memory of all
    flat = array.storage.flatten() if isinstance(array, pa.ExtensionArray) else array
    return _to_torch(column, plain_values(flat)).reshape(len(array), *column.inner)


def _to_torch(column: Column, values: Any) -> torch.Tensor:
    values = values if values.flags.writeable else values.copy()
    tensor = torch.from_numpy(values)
    if column.torch_dtype.is_complex:
        return torch.view_as_complex(tensor.reshape(-1, 2)).to(column.torch_dtype)
    if column.torch_dtype == torch.bfloat16:
        return (tensor.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)  # `to` loses a NaN's bits
    return tensor.to(column.torch_dtype)


def converted(before: CarriedColumn | Column, after: CarriedColumn | Column, array: pa.Array) -> pa.Array:
    """Convert a column's array to a column which holds more: rows of any shape, or values of another kind."""
    if isinstance(after, CarriedColumn):
        return after.converted(array)
    assert isinstance(before, Column)
    if before.shape == after.shape:
        return array
    return to_arrow(after, [row.unsqueeze(0) for row in from_arrow(before, array)])


def rebuild(layout: Layout, leaves: Sequence[torch.Tensor | list[Any]]) -> Any:
    """Nest the leaves as the model nested its outputs; each leaf has its rows in dimension 0."""
    rebuilt: list[Any] = []
    for column, leaf in zip(layout.columns, leaves, strict=True):
        if column.is_value:
            rebuilt.append(np.array(leaf, str) if column.is_array else leaf)
            continue
        if isinstance(leaf, list) or column.depth is not None:
            rebuilt.append([row.numpy() for row in leaf] if column.is_array else leaf)
            continue
        moved = leaf.movedim(0, layout.batch_dim) if leaf.ndim > max(1, layout.batch_dim) else leaf
        rebuilt.append(moved.numpy() if column.is_array else moved)
    return with_lists(layout.spec, rebuilt, [column.depth for column in layout.columns])


def bytes_of_value(value: str | bool | int | float) -> bytes:
    """Return the bytes of a number of Python; of a text, the number of its bytes, then these."""
    if isinstance(value, str):
        text = value.encode()
        return np.int64(len(text)).tobytes() + text
    return np.array(value, {bool: np.bool_, int: np.int64, float: np.float64}[type(value)]).tobytes()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in C order, whatever its dtype."""
    if not tensor.numel():
        return memoryview(b"")  # torch cannot view the strides of an empty numpy array
    return memoryview(as_bytes(tensor.cpu()).numpy())  # type: ignore[arg-type]
