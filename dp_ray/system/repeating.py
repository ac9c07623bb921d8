"""A call that a thread repeats in the background."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(name: str, seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Repeat the call every so many seconds, in a thread of that name, while the block runs.

    The first call comes after the first interval. The end of the block waits for a call that is under way.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
