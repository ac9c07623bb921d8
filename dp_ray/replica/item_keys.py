"""Picks values of an item by their keys: the model's inputs, and the target of a loss or a metric."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from dp_ray.errors import DataError
from dp_ray.job import Job
from dp_ray.text import did_you_mean, listed

Keys: TypeAlias = str | Sequence[str]


class ItemKeys(NamedTuple):
    """The keys that a job takes of each item. One key gives its value itself, several give a dict of them."""

    inputs: Keys
    target: Keys | None

    def pick(self, item: Any) -> Any:
        """The inputs, or the pair (inputs, target). Raises DataError if the item is no mapping or lacks a key."""
        if not isinstance(item, Mapping):
            raise DataError(f"inputs and target name keys of an item, which must be a dict; got a {kind_of(item)}")
        picked = _picked(item, self.inputs)
        return picked if self.target is None else (picked, _picked(item, self.target))


def item_keys(job: Job) -> ItemKeys | None:
    """The keys that the job takes of each item; None if it takes the whole item. predict takes no target."""
    if isinstance(job.inputs, str):
        return None
    alone = job.inputs[0] if len(job.inputs) == 1 else job.inputs
    return ItemKeys(alone, None if job.task == "predict" else job.target)


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
