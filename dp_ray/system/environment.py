"""Set the job's `env` in a process, for good or while a block runs.

On a worker this runs before torch is imported, so the module imports as little as possible.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

SETTING = re.compile(r"(--set=)?env(\.[^=]*)?=")


def set_environment(values: dict[str, str]) -> None:
    """Set environment variables and keep them: for a process that ends with the job."""
    os.environ.update(values)


def is_env(setting: str) -> bool:
    """Whether a `--set KEY=VALUE` sets `env` or a variable in it."""
    return bool(SETTING.match(setting))


def without_values(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line without the values of `--set env.X=VALUE`, which may be secrets."""
    return [f"{match[0]}(not shown)" if (match := SETTING.match(one)) else one for one in arguments]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs, then restore their former values."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
