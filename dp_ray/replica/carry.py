"""What a prediction carries of each item: values of the keys of `outputs.carry`, to be written beside the outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dp_ray.errors import DataError
from dp_ray.job import Job
from dp_ray.replica.item_keys import kind_of, value_of
from dp_ray.tensors.nested import is_plain

Plain: TypeAlias = bool | int | float | str | list[Any] | None


class Carrying(NamedTuple):
    """What the model gets of an item, and the values that are carried, in the order of the keys."""

    item: Any
    values: list[Plain]


@dataclass(frozen=True)
class Carried:
    """The carried values of some samples: for each key one value a sample."""

    columns: dict[str, list[Plain]]

    def of(self, rows: slice) -> "Carried":
        """The values of some of the samples."""
        return Carried({key: values[rows] for key, values in self.columns.items()})


def carried_keys(job: Job) -> tuple[str, ...]:
    """The keys that the job carries; none unless it predicts."""
    return tuple(job.outputs.carry or ()) if job.task == "predict" else ()


def carried_of(item: Any, keys: Sequence[str]) -> list[Plain]:
    """The values of an item that are carried; raises DataError if the item lacks a key or a value cannot be."""
    if not isinstance(item, Mapping):
        raise DataError(f"outputs.carry names keys of an item, which must be a dict; got a {kind_of(item)}")
    return [_plain(key, value_of(item, key)) for key in keys]


def apart(items: Sequence[Carrying], keys: Sequence[str]) -> tuple[list[Any], Carried]:
    """The items as the model gets them, and the carried values of all of them."""
    columns = {key: [one.values[number] for one in items] for number, key in enumerate(keys)}
    return [one.item for one in items], Carried(columns)


def _plain(key: str, value: Any) -> Plain:
    """A number, text, None, or a list of these; a tensor or an array of at most one dimension becomes one."""
    found = value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value
    if isinstance(found, list | tuple):
        found = [one.item() if isinstance(one, np.generic) else one for one in found]
        if all(map(is_plain, found)):
            return found
    elif is_plain(found):
        return found  # type: ignore[no-any-return]
    size = f" of size {list(value.shape)}" if isinstance(value, torch.Tensor | np.ndarray) else ""
    may_be = "numbers, text, truth values, None and lists of these"
    raise DataError(f"outputs.carry: {key!r} is a {type(value).__qualname__}{size}; what can be carried are {may_be}")
