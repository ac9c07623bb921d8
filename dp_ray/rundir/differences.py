"""How two descriptions of a job differ, key by key; and their values by dotted keys."""

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

NOT_SET = object()
SHOWN = 80  # characters of a value


def dotted(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings with their dotted keys.

    >>> list(dotted({"optimizer": {"args": {"lr": 0.1}}, "batch_size": 32}))
    [('optimizer.args.lr', 0.1), ('batch_size', 32)]
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def differences(there: Any, here: Any, path: str = "") -> Iterator[str]:
    """One text for each value that differs: `optimizer.args.lr: 0.003 there, 0.01 here`.

    A mapping on one side only is named by its target, or called "set"; its values are not listed.

    >>> list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}}))
    ['a.c: 2 there, not set here', 'a.d: not set there, 3 here']
    """
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys([*there, *here]):
            yield from differences(there.get(key, NOT_SET), here.get(key, NOT_SET), _inside(path, key))
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, (one, other) in enumerate(zip(there, here, strict=True)):
            yield from differences(one, other, _inside(path, number))
    elif not same(there, here):
        yield f"{path}: {_shown(there, here)} there, {_shown(here, there)} here"


def same(there: Any, here: Any) -> bool:
    """Whether two JSON values are written alike: nan is itself, and 1 is not 1.0, by which a model may count."""
    if NOT_SET in (there, here):
        return there is here
    return json.dumps(there, sort_keys=True) == json.dumps(here, sort_keys=True)


def _inside(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(value: Any, other: Any) -> str:
    """A value in a few words: a mapping by its target, if it has one; a long text from where the `other` differs."""
    if value is NOT_SET:
        return "not set"
    if isinstance(value, dict):
        return repr(value["target"]) if "target" in value else "set"
    if isinstance(value, list):
        return f"{len(value)} items" if len(repr(value)) > SHOWN else repr(value)
    if isinstance(value, str) and isinstance(other, str) and value[:SHOWN] == other[:SHOWN]:
        alike = next(at for at, (one, two) in enumerate(zip_longest(value, other)) if one != two)
        return "..." + repr(value[max(0, alike - SHOWN // 4) : alike + SHOWN // 2])
    return f"{value!r:.{SHOWN}}"
