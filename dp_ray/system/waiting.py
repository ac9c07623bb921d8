"""Whether this process's task waits for other workers: the task sets it, the heartbeat reports it.

If one worker hangs, all others wait for it. The one that does not wait is the cause.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_waits: list[str] = []  # innermost last; the task's thread alone writes


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Mark the task as waiting for `what`, which depends on other workers, while the block runs."""
    _waits.append(what)
    try:
        yield
    finally:
        _waits.pop()


def waits_for() -> str:
    """What the task waits for now; "" if it does not wait for other workers."""
    innermost = _waits[-1:]  # in one read: the task's thread may leave its block meanwhile
    return innermost[0] if innermost else ""
