"""The job's `env`, in a process for as long as it is wanted there.

On a worker this runs before torch is imported, so it imports next to nothing.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

SETTING = re.compile(r"(--set=)?env(\.[^=]*)?=")


def set_environment(values: dict[str, str]) -> None:
    """Set variables in a process that ends with the job."""
    os.environ.update(values)


def is_env(setting: str) -> bool:
    """Whether a `--set KEY=VALUE` is of `env`."""
    return bool(SETTING.match(setting))


def without_values(arguments: Sequence[str]) -> list[str]:
    """A command line that may be shown: without the values of `--set env.X=VALUE`."""
    return [f"{match[0]}(not shown)" if (match := SETTING.match(one)) else one for one in arguments]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables in os.environ for as long as the block lasts; then they are what they were before."""
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
