"""Keys of earlier versions: the table of their new names, and jobs brought up to date by it. Begin at `current`.

A key that gets a new name is taken under its old one for a minor version at least, with a warning. After that it is
an error which names the new one; the jobs of old runs are read for ever.
"""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from dp_ray import __version__
from dp_ray.errors import JobError


class OldKey(NamedTuple):
    """A dotted key that has a new name since a version; from the version `gone` on the old one is an error."""

    name: str
    new: str
    since: str
    gone: str

    @property
    def is_taken(self) -> bool:
        """Whether this version takes a job with the old name."""
        return _numbers(__version__) < _numbers(self.gone)


OLD_KEYS: tuple[OldKey, ...] = (
    OldKey("split", "device_map", since="0.1.0", gone="0.1.0"),
    OldKey("timeouts.room", "timeouts.capacity", since="0.1.0", gone="0.1.0"),
)


class OldKeyWarning(FutureWarning):
    """A job has a key by its old name, which a later version will not take."""


def current(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job with the old names that this version takes replaced, each with a warning.

    Raises JobError if a key is there by both names.
    """
    values = dict(job)
    for key in OLD_KEYS:
        if key.is_taken and has(values, key.name):
            if has(values, key.new):
                raise JobError(f"{key.name}: is the old name of {key.new}, which is set too; leave {key.name} out")
            values = key_moved(values, key.name, current_name(key.name))
    return values


def current_name(name: str) -> str:
    """Return the name that this version has for a dotted key, or one below it; with a warning if it is another."""
    for key in OLD_KEYS:
        if key.is_taken and f"{name}.".startswith(f"{key.name}."):
            warnings.warn(
                f"{key.name}: write {key.new}, its name since version {key.since}; from {key.gone} on the old one is "
                "an error",
                OldKeyWarning,
                stacklevel=2,
            )
            return key.new + name.removeprefix(key.name)
    return name


def of_a_run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job in a run's run.json, which any earlier version may have written, with the names of this one."""
    values = dict(job)
    for key in OLD_KEYS:
        if has(values, key.name):
            values = key_moved(values, key.name, key.new)
    return values


def has(values: Mapping[str, Any], name: str) -> bool:
    """Return whether nested mappings have a dotted key."""
    first, _, rest = name.partition(".")
    inner = values.get(first)
    return first in values and (not rest or (isinstance(inner, Mapping) and has(inner, rest)))


def key_moved(values: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a copy of nested mappings with the value of a dotted key under another one.

    It keeps its place if both are in one mapping; else it comes last.

    >>> moved({"a": {"b": 1, "c": 2}, "d": 3}, "a.b", "a.e")
    {'a': {'e': 1, 'c': 2}, 'd': 3}
    >>> moved({"a": {"b": 1, "c": 2}, "d": 3}, "a.b", "f.b")
    {'a': {'c': 2}, 'd': 3, 'f': {'b': 1}}
    """
    (first, _, rest), (target, _, below) = old.partition("."), new.partition(".")
    if not rest and not below:
        return {target if key == first else key: value for key, value in values.items()}
    if rest and below and first == target:
        return {**values, first: key_moved(values[first], rest, below)}
    *parents, last = old.split(".")
    copied: dict[str, Any] = dict(values)
    inner = copied
    for parent in parents:
        inner[parent] = inner = dict(inner[parent])
    value = inner.pop(last)
    *parents, last = new.split(".")
    inner = copied
    for parent in parents:
        inner[parent] = inner = dict(inner.get(parent) or {})
    inner[last] = value
    return copied


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])
