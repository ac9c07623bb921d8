"""The last line of a notebook's output, rewritten in place; what others write goes above it."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

REFRESH_SECONDS = 0.5


def honours_carriage_returns(stream: Any) -> bool:
    """Whether a stream goes to the output of a notebook's cell; IPython is not imported for it."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


class StatusLine:
    """A stream with a last line that `show` rewrites, and above which everything written goes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._status = ""
        self._is_at_start = True  # of a line
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._pid != os.getpid():  # a forked process, in which the lock may be held for ever
            return int(self._stream.write(text))
        with self._lock:
            self._erase()
            self._is_at_start = text.endswith("\n") if text else self._is_at_start
            return int(self._stream.write(text))

    def show(self, status: str) -> None:
        """Put `status` in the last one's place, unless a line that someone else writes is not at its end."""
        with self._lock:
            if self._is_at_start and status != self._status:
                self._erase()
                self._stream.write(status)
                self._status = status
        self._stream.flush()

    def end(self) -> None:
        """Leave the last status as a line."""
        with self._lock:
            if self._status:
                self._stream.write("\n")
                self._status = ""
        self._stream.flush()

    def _erase(self) -> None:
        """Overwrite the status with spaces: notebooks know no other way."""
        if self._status:
            self._stream.write(f"\r{' ' * len(self._status)}\r")
            self._status = ""


@contextmanager
def rewritten(status: Callable[[], str]) -> Iterator[None]:
    """While the block runs, stderr ends with the status, twice a second that of now; its last one stays."""
    line, ended = StatusLine(sys.stderr), threading.Event()

    def refresh() -> None:
        while not ended.wait(REFRESH_SECONDS):
            line.show(status())

    thread = threading.Thread(target=refresh, name="status line", daemon=True)
    with redirect_stderr(line):
        line.show(status())
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            line.show(status())
            line.end()
