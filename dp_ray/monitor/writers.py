"""What writes the rows of a training's history as they arrive."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Writer(Protocol):
    """Takes rows of the history; a repeated step replaces all rows from that step on."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take some rows."""

    def close(self) -> None:
        """Write what is left, when no more rows come."""


class Writers:
    """Several writers as one."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = list(writers)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Give the rows to each writer."""
        for writer in self._writers:
            writer.add(rows)

    def close(self) -> None:
        """Close each writer."""
        for writer in self._writers:
            writer.close()
