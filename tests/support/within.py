"""Wait for what another process or thread does."""

import time
from collections.abc import Callable


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold within so many seconds."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
