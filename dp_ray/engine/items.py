"""Picks values of an item by their keys: the model's inputs, and the target of a loss or a metric.

What a prediction carries of each item: values of the keys of `outputs.carry`, to be written beside the outputs.

Batches that a dataset cuts from its columns: what collating its items would give, at a fraction of the time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dp_ray.errors import DataError, Error
from dp_ray.job.job import Job
from dp_ray.job.samples import Indices
from dp_ray.tensors.tree import is_plain
from dp_ray.text import did_you_mean, encodable, listed

Keys: TypeAlias = str | Sequence[str]


class ItemKeys(NamedTuple):
    """The keys that a job takes of each item. One key gives its value itself, several give a dict of them.

    With `as_tensors`, values of plain Python become what torch's default collate takes; see `tensor_of`.
    """

    inputs: Keys
    target: Keys | None
    as_tensors: bool = False

    @property
    def names(self) -> list[str]:
        """All of the keys."""
        given = [self.inputs, self.target or []]
        return [name for keys in given for name in ([keys] if isinstance(keys, str) else keys)]

    def pick(self, item: Any) -> Any:
        """The inputs, or the pair (inputs, target). Raises DataError if the item is no mapping or lacks a key."""
        if not isinstance(item, Mapping):
            what = f"got a {kind_of(item)} before the collate"
            raise DataError(f"inputs and target name keys of an item, which must be a dict; {what}")
        picked = self._of(item, self.inputs)
        return picked if self.target is None else (picked, self._of(item, self.target))

    def _of(self, item: Mapping[str, Any], keys: Keys) -> Any:
        picked = _picked(item, keys)
        return tensor_of(picked) if self.as_tensors else picked


def item_keys(job: Job) -> ItemKeys | None:
    """The keys that the job takes of each item; None if it takes the whole item. predict takes no target."""
    if isinstance(job.inputs, str):
        return None
    alone = job.inputs[0] if len(job.inputs) == 1 else job.inputs
    return ItemKeys(alone, None if job.task == "predict" else job.target, as_tensors=job.collate is None)


def _picked(item: Mapping[str, Any], keys: Keys) -> Any:
    if not isinstance(keys, str):
        return {key: value_of(item, key) for key in keys}
    return value_of(item, keys)


def value_of(item: Mapping[str, Any], key: str) -> Any:
    """An item's value; raises DataError, which lists the keys that there are, if it has no such key."""
    try:
        return item[key]
    except KeyError:
        there = [str(one) for one in item]
        raise DataError(
            f"there is no {key!r}{did_you_mean(key, there)}; the item has {listed(there)} before the collate"
        ) from None


def kind_of(item: Any) -> str:
    """The class of an item, for messages; of a tuple or list also its length."""
    return f"{type(item).__qualname__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")


def tensor_of(value: Any) -> Any:
    """A value of plain Python as torch's default collate takes it, also within a dict; others stay as they are.

    Lists of numbers, nested ones too if their inner lists have one length, are tensors. Their floats are float32, as
    a float by itself is. An image of Pillow is a uint8 tensor [3, height, width].
    """
    if isinstance(value, list):
        return _of_list(value)
    if type(value) is float:  # numpy's float64 is a subclass, and has the type that its column has
        return np.float32(value)
    if isinstance(value, dict):
        return {key: tensor_of(one) for key, one in value.items()}
    return _pixels(value) if type(value).__module__.startswith("PIL.") else value


def _of_list(given: list[Any]) -> Any:
    try:
        found = np.array(given)
    except ValueError:  # the inner lists have several lengths
        return given
    if found.dtype.kind not in "iufb":
        return given
    return torch.from_numpy(found.astype(np.float32) if found.dtype == np.float64 else found)


def _pixels(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


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


ReadColumns = Callable[[Sequence[int], Sequence[str] | None], Any]
ReadBeside = Callable[[Sequence[int], Sequence[str] | None, Sequence[str]], Any]


class Cut(NamedTuple):
    """A batch that needs no collating."""

    batch: Any


class WholeColumns(NamedTuple):
    """Cuts batches of the keys that a job takes. With keys to `carry`, these come beside it, from `read_beside`."""

    read: ReadColumns
    keys: ItemKeys | None
    carry: tuple[str, ...] = ()
    read_beside: ReadBeside | None = None

    def cut(self, indices: Sequence[int]) -> Cut | None:
        """The batch of the samples at these indices; None if they must be read as items, which also tell errors."""
        names = None if self.keys is None else self.keys.names
        try:
            if self.read_beside is not None:
                found = self.read_beside(indices, names, self.carry)
                return None if found is None else Cut(self._carrying(indices, *found))
            found = self.read(indices, names)
        except Error:
            return None
        return None if found is None else Cut(self._picked(found))

    def _picked(self, found: Any) -> Any:
        return found if self.keys is None else self.keys.pick(found)

    def _carrying(self, indices: Sequence[int], found: Any, items: Sequence[Any]) -> CarryingBatch:
        rows = [carried_of(item, self.carry) for item in items]
        return CarryingBatch(self._picked(found), Carried(self.carry, dict(zip(indices, rows, strict=True))))


def whole_columns(job: Job, dataset: Any, keys: ItemKeys | None) -> WholeColumns | None:
    """How the dataset cuts batches from its columns; None unless it does, and the job collates as torch does.

    A job that carries values reads items, if the dataset cannot give them beside the columns.
    """
    read, beside = getattr(dataset, "read_columns", None), getattr(dataset, "read_columns_beside", None)
    if read is None or job.collate is not None or job.batch_dim:
        return None
    if carry := carried_keys(job):
        return None if beside is None else WholeColumns(read, keys, carry, beside)
    return WholeColumns(read, keys)
