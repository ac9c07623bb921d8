"""What a prediction carries of each item: values of the keys of `outputs.carry`, to be written beside the outputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dp_ray.errors import DataError
from dp_ray.job import Job
from dp_ray.replica.item_keys import kind_of, value_of
from dp_ray.replica.read_requests import Indices
from dp_ray.tensors.nested import is_plain
from dp_ray.text import encodable

Plain: TypeAlias = bool | int | float | str | list[Any] | None


class Carrying(NamedTuple):
    """What the job takes of a sample, its index, and the values that are carried, in the order of the keys."""

    item: Any
    sample: int
    values: list[Plain]


@dataclass(frozen=True)
class Carried:
    """The carried values of some samples, by their indices. Pieces of a batch share it."""

    keys: tuple[str, ...]
    values: dict[int, list[Plain]]

    def columns(self, indices: Iterable[int]) -> dict[str, list[Plain]]:
        """For each key the values of these samples."""
        rows = [self.values[index] for index in indices]
        return {key: [row[number] for row in rows] for number, key in enumerate(self.keys)}


class CarryingBatch(NamedTuple):
    """A collated batch, and what is carried of its samples."""

    batch: Any
    carried: Carried


def carried_keys(job: Job) -> tuple[str, ...]:
    """The keys that the job carries; none unless it predicts."""
    return tuple(job.outputs.carry or ()) if job.task == "predict" else ()


def carried_of(item: Any, keys: Sequence[str]) -> list[Plain]:
    """The values of an item that are carried; raises DataError if the item lacks a key or a value cannot be."""
    if not isinstance(item, Mapping):
        raise DataError(f"outputs.carry names keys of an item, which must be a dict; got a {kind_of(item)}")
    return [_plain(key, value_of(item, key)) for key in keys]


def collate_carrying(collate: Callable[[list[Any]], Any], keys: tuple[str, ...], items: list[Carrying]) -> Any:
    """Collate the items alone, and put beside the batch what is carried of them."""
    batch = collate([one.item for one in items])
    return CarryingBatch(batch, Carried(keys, {one.sample: one.values for one in items}))


def unloaded(batch: Any, indices: Indices) -> tuple[Any, dict[str, list[Plain]]]:
    """The batch alone, and for each carried key the values of the samples at these indices."""
    if not isinstance(batch, CarryingBatch):
        return batch, {}
    return batch.batch, batch.carried.columns(indices.tolist())


def _plain(key: str, value: Any) -> Plain:
    """A number, text, None, or a list of these; a tensor or an array of at most one dimension becomes one."""
    found = value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value
    if isinstance(found, list | tuple):
        found = [one.item() if isinstance(one, np.generic) else one for one in found]
        if all(map(is_plain, found)):
            return [encodable(one) if isinstance(one, str) else one for one in found]
    elif isinstance(found, str):
        return encodable(found)
    elif is_plain(found):
        return found  # type: ignore[no-any-return]
    size = f" of size {list(value.shape)}" if isinstance(value, torch.Tensor | np.ndarray) else ""
    may_be = "numbers, text, truth values, None and lists of these"
    raise DataError(f"outputs.carry: {key!r} is a {type(value).__qualname__}{size}; what can be carried are {may_be}")
