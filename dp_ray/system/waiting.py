"""Whether this process's task waits for other workers: said by the task, read by its heartbeat.

A worker that hangs keeps all others waiting. Only the one that does not wait is to blame.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_waits: list[str] = []  # innermost last; the task's thread alone writes


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say that the task waits for `what`, which other workers must bring about, while the block runs."""
    _waits.append(what)
    try:
        yield
    finally:
        _waits.pop()


def waits_for() -> str:
    """What the task waits for now; empty where it waits for nobody."""
    return _waits[-1] if _waits else ""
