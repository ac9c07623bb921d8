"""A tracker within the test's process, which can be down or forget, and what it was given."""

import time
from collections.abc import Callable
from typing import Any


class FakeTracker:
    """Keeps what it gets over several connections; `knows_its_steps` says that it tells them when it is opened."""

    def __init__(self, knows_its_steps: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.opened: list[str | None] = []
        self.ended: list[tuple[str, dict[str, float]]] = []
        self.is_down = False
        self.is_closed = False
        self.loses_answers = 0
        self.seconds = 0.0  # of each request
        self.run_id = ""
        self.next_step = 0
        self._knows_its_steps = knows_its_steps

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    def connect(self, asked: dict[str, Any]) -> Any:
        self._answer()
        self.opened.append(asked["run_id"])
        self.run_id = asked["run_id"] or f"run-{len(self.opened)}"
        self.next_step = self.steps[-1] + 1 if self._knows_its_steps and self.rows else asked["next_step"]
        return self

    def log(self, rows: list[dict[str, Any]], at: float) -> None:
        self._answer()
        time.sleep(self.seconds)
        self.rows += rows
        self.times += [at] * len(rows)
        if self.loses_answers:
            self.loses_answers -= 1
            raise OSError("the answer was lost")

    def finish(self, status: str, metrics: dict[str, float]) -> None:
        self._answer()
        self.ended.append((status, metrics))

    def close(self) -> None:
        self.is_closed = True

    def _answer(self) -> None:
        if self.is_down:
            raise ConnectionRefusedError("connection refused")


def wait_until(is_so: Callable[[], bool], seconds: float = 100.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)
