"""Carried values as Arrow columns: one value of the dataset's item beside each row of the outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dp_ray.errors import DataError

SINGLE = {"none": pa.null(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "text": pa.string()}
KINDS = {**SINGLE, **{f"list of {name}": pa.list_(kind) for name, kind in SINGLE.items()}}


@dataclass(frozen=True)
class CarriedColumn:
    """The values of a key: its column's name, and their kind, one of KINDS."""

    key: str
    name: str
    kind: str

    @property
    def arrow_type(self) -> pa.DataType:
        """The column's type."""
        return KINDS[self.kind]

    def join(self, other: "CarriedColumn") -> "CarriedColumn":
        """The column that holds the values of both: of None and any kind, and of whole numbers and others.

        Raises DataError, which names the key, if there is no such kind.
        """
        fields = [pa.schema([(self.key, one.arrow_type)]) for one in (self, other)]
        try:
            (found,) = pa.unify_schemas(fields, promote_options="permissive").types
        except (pa.ArrowTypeError, pa.ArrowInvalid):
            raise DataError(
                f"outputs.carry: the values of {self.key!r} are {self.kind} in some shards and {other.kind} in "
                "others; they must be of one kind"
            ) from None
        return CarriedColumn(self.key, self.name, kind_of(found))

    def array(self, pieces: Sequence[pa.Array]) -> pa.Array:
        """The values of all pieces, in order, in the column's type."""
        return pa.concat_arrays([self.converted(piece) for piece in pieces])

    def converted(self, values: pa.Array) -> pa.Array:
        """Values of the key in the column's type; raises DataError, which names the key, if it cannot hold one."""
        try:
            return values.cast(self.arrow_type)
        except pa.ArrowInvalid as error:
            says = f"outputs.carry: the values of {self.key!r} are {self.kind} in some shards: {error}"
            raise DataError(f"{says}; carry them as text") from error


def kind_of(found: pa.DataType) -> str:
    """The name of an Arrow type in KINDS; raises DataError if it has none."""
    for name, kind in KINDS.items():
        if kind == found:
            return name
    raise DataError(
        f"outputs.carry: values of Arrow's type {found} cannot be carried; they may be {', '.join(KINDS)}"
    )


def carried_arrays(
    carried: Mapping[str, Sequence[Any]], indices: "np.ndarray[Any, np.dtype[np.int64]]"
) -> dict[str, pa.Array]:
    """The carried values of some samples as Arrow arrays, by key.

    Raises DataError, which names samples, if the values of a key are of several kinds.
    """
    return {key: _array(key, values, indices) for key, values in carried.items()}


def _array(key: str, values: Sequence[Any], indices: "np.ndarray[Any, np.dtype[np.int64]]") -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        first: dict[str, int] = {}
        for index, value in zip(indices.tolist(), values, strict=True):
            first.setdefault(type(value).__qualname__, index)
        first.pop("NoneType", None)
        told = ", ".join(f"{kind} in sample {index}" for kind, index in first.items())
        why = f"they are of several kinds ({told})" if len(first) > 1 else f"{told}: {error}"
        raise DataError(f"outputs.carry: the values of {key!r} cannot be one column: {why}") from error
