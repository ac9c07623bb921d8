"""The last line of a notebook's output, rewritten in place; all other output goes above it."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from dp_ray.system.repeating import repeated

REFRESH_SECONDS = 0.5


def honours_carriage_returns(stream: Any) -> bool:
    """Whether a stream writes to the output of a notebook's cell; it does not import IPython."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


class StatusLine:
    """A stream whose last line is a status that `show` rewrites; `write` writes above it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._status = ""
        self._is_at_start = True  # of a line
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text above the status."""
        if self._pid != os.getpid():  # in a forked process the lock may be held for ever
            return int(self._stream.write(text))
        with self._lock:
            self._erase()
            self._is_at_start = text.endswith("\n") if text else self._is_at_start
            return int(self._stream.write(text))

    def show(self, status: str) -> None:
        """Replace the status, unless other output has left a line unfinished."""
        with self._lock:
            if self._is_at_start and status != self._status:
                self._erase()
                self._stream.write(status)
                self._status = status
        self._stream.flush()

    def end(self) -> None:
        """Keep the last status as an ordinary line."""
        with self._lock:
            if self._status:
                self._stream.write("\n")
                self._status = ""
        self._stream.flush()

    def _erase(self) -> None:
        """Overwrite the status with spaces: notebooks offer no other way."""
        if self._status:
            self._stream.write(f"\r{' ' * len(self._status)}\r")
            self._status = ""


@contextmanager
def rewritten(status: Callable[[], str]) -> Iterator[None]:
    """Show the status as stderr's last line while the block runs, updated twice a second; the last one stays."""
    line = StatusLine(sys.stderr)

    def refresh() -> None:
        line.show(status())

    with redirect_stderr(line):
        refresh()
        try:
            with repeated("status line", REFRESH_SECONDS, refresh):
                yield
        finally:
            refresh()
            line.end()
