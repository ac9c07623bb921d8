"""Picks values of an item by their keys: the model's inputs, and the target of a loss or a metric."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dp_ray.errors import DataError
from dp_ray.job import Job
from dp_ray.text import did_you_mean, listed

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
            raise DataError(f"inputs and target name keys of an item, which must be a dict; got a {kind_of(item)}")
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
        raise DataError(f"there is no {key!r}{did_you_mean(key, there)}; the item has {listed(there)}") from None


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
