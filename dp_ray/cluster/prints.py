"""What user code prints on a worker, sent to the driver line by line."""

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from dp_ray.cluster.channel import send
from dp_ray.engine.world import World
from dp_ray.messages import Printed


@contextmanager
def forwarded_prints(channel: Any, number: int, keep_prints: bool, world: World) -> Iterator["Lines"]:
    """Send the lines that user code prints to the driver while the block runs, as those of this rank."""
    before = sys.stdout, sys.stderr
    lines: Any = Lines(channel, number, keep_prints, world, before[0])
    sys.stdout = sys.stderr = lines
    try:
        yield lines
    finally:
        lines.close()
        sys.stdout, sys.stderr = before


class Lines(io.TextIOBase):
    """A text stream whose lines go to the driver and, with `keep_prints`, to the worker's own log too.

    The lines pass through a pipe, so that the forked processes of a data loader reach the driver too.
    """

    _END, _MOVE = "\0", "\0\0"

    def __init__(self, channel: Any, number: int, keep_prints: bool, world: World, log: TextIO) -> None:
        self._channel = channel
        self._number = number
        self._keep_prints = keep_prints
        self._worlds = [world]  # the first one is that of the lines which are sent now
        self._log = log
        self._pid = os.getpid()
        self._rest = ""
        self.buffer = Bytes(self)
        reading, self._pipe = os.pipe()
        self._thread = threading.Thread(target=self._forward, args=(reading,), name="prints", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Send the complete lines of the text; hold the rest until its line ends.

        After the job, which a handler of a library's log may outlive, the text goes to the next job or to the log.
        """
        if self.closed:
            return (sys.stderr if sys.stderr is not self else self._log).write(text)
        if self._keep_prints:
            self._log.write(text)
        if self._pid != os.getpid():
            self._pid, self._rest = os.getpid(), ""
        *lines, rest = (self._rest + text).replace("\r\n", "\n").split("\n")
        self._rest = rest[rest.rfind("\r", 0, -1) + 1 :]  # keep only the last update of a progress bar
        for line in lines:
            os.write(self._pipe, f"{line[line.rfind(chr(13)) + 1 :]}\n".encode(errors="replace"))
        return len(text)

    def move(self, world: World) -> None:
        """Have the lines that follow be of another rank."""
        self._worlds.append(world)
        os.write(self._pipe, f"{self._MOVE}\n".encode())

    def flush(self) -> None:
        self._log.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._log.fileno()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Send the rest and end the thread; an end mark is sent because a forked process may hold the pipe open."""
        if self.closed:
            return
        self.write(f"\n{self._END}\n" if self._rest else f"{self._END}\n")
        self._thread.join()
        os.close(self._pipe)
        super().close()

    def _forward(self, reading: int) -> None:
        """Send the lines to the driver, all that have arrived since the last message in one."""
        rest = b""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while True:
                *lines, rest = (rest + pipe.read(1 << 16)).split(b"\n")
                said: list[str] = []
                for line in (line.decode(errors="replace") for line in lines):
                    if line not in (self._END, self._MOVE):
                        said.append(line)
                        continue
                    self._send(said, wait=line == self._END)
                    said = []
                    if line == self._END:
                        return
                    del self._worlds[0]
                self._send(said)

    def _send(self, said: list[str], wait: bool = False) -> None:
        if said:
            send(self._channel, Printed(self._worlds[0], tuple(said)), self._number, wait=wait)


class Bytes(io.RawIOBase):
    """The `buffer` of Lines, for code that writes bytes."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._lines.write(bytes(data).decode(errors="replace"))
        return len(data)
