"""Values of a dataset's items by their keys: the model's inputs, its target, and what `outputs.carry` carries.

`WholeColumns` cuts batches from a dataset's columns: what collating its items would give, in a fraction of the time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dp_ray.engine.user_code import error_text, reraise_as
from dp_ray.errors import DataError, Error
from dp_ray.job.job import Job
from dp_ray.job.samples import Indices, mixture_of
from dp_ray.tensors.tree import is_plain
from dp_ray.text import a_kind, did_you_mean, encodable, listed

PickedKeys: TypeAlias = str | Sequence[str]


class ItemKeys(NamedTuple):
    """The keys that a job takes of each item. One key gives its value itself, several give a dict of them.

    With `as_tensors`, values of plain Python become what torch's default collate takes; see `tensor_of`.
    """

    inputs: PickedKeys
    target: PickedKeys | None
    as_tensors: bool = False

    @property
    def names(self) -> list[str]:
        """Return all of the keys."""
        return [
            name for keys in (self.inputs, self.target or []) for name in ([keys] if isinstance(keys, str) else keys)
        ]

    def pick(self, item: Any) -> Any:
        """Return the inputs, or the pair (inputs, target); raise DataError if it is no mapping or lacks a key."""
        if not isinstance(item, Mapping):
            what = f"got a {class_of(item)} before the collate"
            raise DataError(f"inputs and target name keys of an item, which must be a dict; {what}")
        picked = self._of(item, self.inputs)
        return picked if self.target is None else (picked, self._of(item, self.target))

    def _of(self, item: Mapping[str, Any], keys: PickedKeys) -> Any:
        picked = value_of(item, keys) if isinstance(keys, str) else {key: value_of(item, key) for key in keys}
        return tensor_of(picked) if self.as_tensors else picked


def item_keys(job: Job) -> ItemKeys | None:
    """Return the keys that the job takes of each item, None if it takes the whole item; predict takes no target."""
    if isinstance(job.inputs, str):
        return None
    alone = job.inputs[0] if len(job.inputs) == 1 else job.inputs
    return ItemKeys(alone, None if job.task == "predict" else job.target, as_tensors=job.collate is None)


def value_of(item: Mapping[str, Any], key: str) -> Any:
    """Return an item's value; raise DataError, which lists the item's keys, if it has no such key."""
    try:
        return item[key]
    except KeyError:
        there = [str(value) for value in item]
        raise DataError(
            f"there is no {key!r}{did_you_mean(key, there)}; the item has {listed(there)} before the collate"
        ) from None


def class_of(item: Any) -> str:
    """Return the class of an item, for messages; of a tuple or list also its length."""
    return f"{type(item).__qualname__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")


def tensor_of(value: Any) -> Any:
    """Convert plain Python to what torch's default collate takes, also within a dict; leave other values.

    Lists of numbers, nested ones too if their inner lists have one length, are tensors. Their floats are float32, as
    a float by itself is. An image of Pillow is a uint8 tensor [3, height, width].
    """
    if isinstance(value, list):
        try:
            numbers = np.array(value)
        except ValueError:  # the inner lists have several lengths
            return value
        if numbers.dtype.kind not in "iufb":
            return value
        return torch.from_numpy(numbers.astype(np.float32) if numbers.dtype == np.float64 else numbers)
    if type(value) is float:  # numpy's float64 is a subclass, and has the type that its column has
        return np.float32(value)
    if isinstance(value, dict):
        return {key: tensor_of(part) for key, part in value.items()}
    if type(value).__module__.startswith("PIL."):  # by its name: Pillow is not imported for those who do without
        return torch.from_numpy(np.array(value.convert("RGB"))).permute(2, 0, 1).contiguous()
    return value


Plain: TypeAlias = bool | int | float | str | list[Any] | None


class PassthroughSample(NamedTuple):
    """A sample as the job takes it, its index, and the values that are carried, in the order of the keys."""

    item: Any
    sample: int
    values: list[Plain]


@dataclass(frozen=True)
class PassthroughColumns:
    """The carried values of some samples, by their indices. Pieces of a batch share it."""

    keys: tuple[str, ...]
    values: dict[int, list[Plain]]


class PassthroughBatch(NamedTuple):
    """A collated batch, and the carried values of its samples."""

    batch: Any
    carried: PassthroughColumns


def passthrough_keys(job: Job) -> tuple[str, ...]:
    """Return the keys that the job carries; none unless it predicts."""
    return tuple(job.outputs.carry or ()) if job.task == "predict" else ()


def passthrough_of(item: Any, keys: Sequence[str]) -> list[Plain]:
    """Return an item's carried values; raise DataError if it lacks a key, or a value cannot be carried."""
    if not isinstance(item, Mapping):
        raise DataError(f"outputs.carry names keys of an item, which must be a dict; got a {class_of(item)}")
    return [_plain(key, value_of(item, key)) for key in keys]


def _plain(key: str, value: Any) -> Plain:
    """Return a number, text, None, or a list of these; a tensor or array of at most one dimension becomes one."""
    plain = value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value
    if isinstance(plain, list | tuple):
        plain = [value.item() if isinstance(value, np.generic) else value for value in plain]
        if all(map(is_plain, plain)):
            return [encodable(value) if isinstance(value, str) else value for value in plain]
    elif isinstance(plain, str):
        return encodable(plain)
    elif is_plain(plain):
        return plain  # type: ignore[no-any-return]
    size = f" of size {list(value.shape)}" if isinstance(value, torch.Tensor | np.ndarray) else ""
    may_be = "numbers, text, truth values, None and lists of these"
    raise DataError(f"outputs.carry: {key!r} is {a_kind(value)}{size}; what can be carried are {may_be}")


def collate_passthrough(
    collate: Callable[[list[Any]], Any], keys: tuple[str, ...], items: list[PassthroughSample]
) -> Any:
    """Collate the items alone, and put their carried values beside the batch."""
    batch = collate([item.item for item in items])
    return PassthroughBatch(batch, PassthroughColumns(keys, {item.sample: item.values for item in items}))


def split_passthrough(batch: Any, indices: Indices) -> tuple[Any, dict[str, list[Plain]]]:
    """Return the batch alone, and for each carried key the values of the samples at these indices."""
    if not isinstance(batch, PassthroughBatch):
        return batch, {}
    keys, values = batch.carried.keys, batch.carried.values
    rows = [values[index] for index in indices.tolist()]
    return batch.batch, {key: [row[number] for row in rows] for number, key in enumerate(keys)}


@dataclass(frozen=True)
class SampleReader:
    """The samples of a dataset, whose errors name the sample and the dataset.

    Of each sample, `keys` picks what the job takes. With keys to `carry`, it becomes a PassthroughSample.
    """

    dataset: Any
    name: str = "the dataset"
    keys: ItemKeys | None = None
    carry: tuple[str, ...] = ()

    def __call__(self, indices: list[int]) -> list[Any]:
        """Read some samples; raises DataError."""
        items = self.whole(indices)
        if self.keys is None and not self.carry:
            return items
        made = []
        for index, item in zip(indices, items, strict=True):
            try:
                picked = item if self.keys is None else self.keys.pick(item)
                made.append(
                    PassthroughSample(picked, index, passthrough_of(item, self.carry)) if self.carry else picked
                )
            except DataError as error:
                raise DataError(f"{self._where(index)} of {self.name}: {error}") from None
        return made

    def _where(self, index: int) -> str:
        """Name a sample; of a mixture, the row of its source."""
        if (mixture := mixture_of(self.dataset)) is None:
            return f"sample {index}"
        source, _, row = mixture.row(index)
        return f"row {row} of source {source!r}"

    def named(self, indices: Iterable[int]) -> str:
        """Name some samples by their indices; of a mixture, the row of each one's source too."""
        if mixture_of(self.dataset) is None:
            return f"samples {listed(indices)}"
        return f"samples {listed(f'{index} ({self._where(index)})' for index in indices)}"

    def whole(self, indices: list[int]) -> list[Any]:
        """Read some samples as the dataset gives them; raises DataError."""
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            get, index = self.dataset.__getitem__, -1
            try:
                return [get(index := wanted) for wanted in indices]
            except Error:
                raise
            except (Exception, SystemExit) as error:
                raise DataError(error_text(f"sample {index} of {self.name}", error)) from error
        samples = f"samples {listed(indices)}"
        with reraise_as(f"{samples} of {self.name}", kind=DataError):
            items = many(list(indices))
        if isinstance(items, list | tuple) and len(items) == len(indices):
            return items  # type: ignore[return-value]
        got = f"{len(items)} items" if isinstance(items, list | tuple) else a_kind(items)
        must = "it must give a list of one item for each"
        raise DataError(f"{self.name}'s __getitems__ gave {got} for {samples}: {must}")

    def carried_alone(self, index: int) -> dict[str, Plain]:
        """Return the carried values of an unreadable sample, as far as the dataset reads columns alone."""
        read = getattr(self.dataset, "read_values", None)
        item = {} if read is None else read(index, self.carry)
        values: dict[str, Plain] = {}
        for key in item:
            with suppress(DataError):  # a value that cannot be carried
                (values[key],) = passthrough_of(item, [key])
        return values


class ColumnSlice(NamedTuple):
    """A batch that needs no collating."""

    batch: Any


class WholeColumns(NamedTuple):
    """A cutter of batches from a dataset's columns: of the keys that a job takes, and those to `carry`."""

    dataset: Any
    keys: ItemKeys | None
    carry: tuple[str, ...] = ()

    def cut(self, indices: Sequence[int]) -> ColumnSlice | None:
        """Return the batch of these samples; None if they must be read as items, whose errors name the sample."""
        names, carried = None if self.keys is None else self.keys.names, None
        try:
            if not self.carry:
                columns = self.dataset.read_columns(indices, names)
            elif (both := self.dataset.read_columns_beside(indices, names, self.carry)) is not None:
                columns, items = both
                rows = [passthrough_of(item, self.carry) for item in items]
                carried = PassthroughColumns(self.carry, dict(zip(indices, rows, strict=True)))
            else:
                return None
            if columns is None:
                return None
            batch = columns if self.keys is None else self.keys.pick(columns)
        except Error:
            return None
        return ColumnSlice(batch if carried is None else PassthroughBatch(batch, carried))


def whole_columns(job: Job, dataset: Any, keys: ItemKeys | None) -> WholeColumns | None:
    """Return how the dataset cuts batches from its columns; None unless it does, with torch's collate.

    A job that carries values reads items, if the dataset cannot give them beside the columns.
    """
    carry = passthrough_keys(job)
    if job.collate is not None or job.batch_dim:
        return None
    has = hasattr(dataset, "read_columns_beside" if carry else "read_columns")
    return WholeColumns(dataset, keys, carry) if has else None
