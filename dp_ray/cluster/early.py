"""Holds a connection to Ray in a thread, so that it is made while the main thread imports torch."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar


class EarlyConnection(threading.Thread):
    """A connection that a thread makes, holds and ends.

    The thread lives as long as the connection: the kernel ends an embedded Ray with the thread that started it.
    """

    begun: ClassVar["EarlyConnection | None"] = None  # until somebody takes it over

    def __init__(self, connect: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(name="connection to Ray")
        self._connect = connect
        self._is_there = threading.Event()
        self._ends = threading.Event()
        self._failure: BaseException | None = None

    @classmethod
    def take(cls) -> "EarlyConnection | None":
        """The connection that has begun and that nobody has taken over yet; it is the caller's from now on."""
        taken, cls.begun = cls.begun, None
        return taken

    def run(self) -> None:
        """Connect, and hold the connection until it is to end."""
        try:
            with self._connect():
                self._is_there.set()
                self._ends.wait()
        except BaseException as error:
            self._failure = error
        finally:
            self._is_there.set()

    def wait(self) -> None:
        """Wait until the connection is made or has failed."""
        self._is_there.wait()

    def end(self) -> None:
        """End the connection."""
        self._ends.set()
        self.join()

    def __enter__(self) -> None:
        """Wait for the connection; raises what it has failed with."""
        self.wait()
        if self._failure is not None:
            raise self._failure

    def __exit__(self, *_: object) -> None:
        """End the connection."""
        self.end()
