"""A tracker within the test's process, which can be down, hang or forget, and what it was given."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dp_ray.trackers.process import TrackerError, TrackerProcess, TrackerRefused


class FakeTracker(TrackerProcess):
    """Keeps what it gets over several connections; `knows_its_steps` says that it tells them when it is opened."""

    def __init__(self, knows_its_steps: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.opened: list[str | None] = []
        self.ended: list[tuple[str, dict[str, float]]] = []
        self.is_down = False
        self.hangs = threading.Event()
        self.closed = threading.Event()
        self.loses_answers = 0
        self._knows_its_steps = knows_its_steps

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    def connect(self) -> "FakeTracker":
        return self

    def open(self, run_id: str | None, next_step: int) -> tuple[str, int]:
        self._answer()
        self.opened.append(run_id)
        knows = self._knows_its_steps and self.rows
        return run_id or f"run-{len(self.opened)}", self.steps[-1] + 1 if knows else next_step

    def log(self, rows: Sequence[dict[str, Any]], at: float) -> None:
        self._answer()
        self.rows += rows
        self.times += [at] * len(rows)
        if self.loses_answers:
            self.loses_answers -= 1
            raise TrackerError("the answer was lost")

    def finish(self, status: str, metrics: Mapping[str, float], seconds: float) -> None:
        self._answer()
        self.ended.append((status, dict(metrics)))

    def close(self) -> None:
        self.closed.set()

    def _answer(self) -> None:
        if self.hangs.is_set():
            self.closed.wait(60)
            raise TrackerError("no answer")
        if self.is_down:
            raise TrackerRefused("connection refused")


def wait_until(is_so: Callable[[], bool], seconds: float = 100.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)
