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
            raise DataError(f"inputs and target name keys of an item, which must be a dict; got a {_kind(item)}")
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
        return {key: _value(item, key) for key in keys}
    return _value(item, keys)


def _value(item: Mapping[str, Any], key: str) -> Any:
    try:
        return item[key]
    except KeyError:
        there = [str(one) for one in item]
        raise DataError(f"there is no {key!r}{did_you_mean(key, there)}; the item has {listed(there)}") from None


def _kind(item: Any) -> str:
    return f"{type(item).__qualname__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")
