"""A tracker in a process of its own, as the run's driver sees it: requests that are answered, fail or time out.

The process runs `child.py`.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dp_ray.errors import Error, JobError
from dp_ray.text import hide

PACKAGES = {"mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"}
OPEN_SECONDS = 120.0
LOG_SECONDS = 60.0
LEAVE_SECONDS = 5.0
CHILD = Path(__file__).with_name("child.py")
# A request fails soon and is sent again by the driver, instead of waiting within the package.
SETTINGS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


class TrackerError(Error):
    """A tracker does not answer, or answers with an error."""


class TrackerRefused(TrackerError):
    """A tracker's package raised an error: its process lives, and can open the run again."""


def check_installed(trackers: Sequence[str]) -> None:
    """Raise JobError, which says what to install, if the package of a tracker is missing."""
    for name in trackers:
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            raise JobError(f"trackers: {name} is not installed; pip install 'dp-ray[{name}]'")


class TrackerProcess:
    """A tracker whose package runs in a process of its own; `about` is what it gets of the run when it opens.

    Each method but `close` may raise TrackerError.
    """

    def __init__(self, name: str, about: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self._about = about
        self._says = tempfile.TemporaryFile(prefix="dp_ray-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._says,
            env={**SETTINGS, **os.environ, **env},
            start_new_session=True,  # Ctrl-C is for the run's driver alone
        )
        self._unread = b""

    def open(self, run_id: str | None, next_step: int) -> tuple[str, int]:
        """Open the tracker's run, or a new one; return its id, and the first step that it lacks."""
        reply = self._ask({"do": "open", "run_id": run_id, "next_step": next_step, **self._about}, OPEN_SECONDS)
        return str(reply["run_id"]), int(reply["next_step"])

    def log(self, rows: Sequence[dict[str, Any]], at: float) -> None:
        """Send rows of the history, and wait until they are taken; `at` is the time that they get."""
        self._ask({"do": "log", "rows": list(rows), "at": at}, LOG_SECONDS)

    def finish(self, status: str, metrics: Mapping[str, float], seconds: float) -> None:
        """End the tracker's run within some seconds."""
        self._ask({"do": "finish", "status": status, "metrics": dict(metrics)}, seconds)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)

    def close(self) -> None:
        """End the process at once, if it has not ended by itself; another thread may call it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._says):
            with suppress(OSError):  # what is buffered for a process that has ended
                stream.close()  # type: ignore[union-attr]

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            reply: dict[str, Any] = json.loads(self._reply(seconds))
        except (OSError, ValueError) as error:
            raise TrackerError(self._last_words() or str(error)) from None
        if "error" in reply:
            raise TrackerRefused(" ".join(str(reply["error"]).split()))
        return reply

    def _reply(self, seconds: float) -> bytes:
        """Return the next line of the process; it reads while a big request is written, so that cannot block."""
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TrackerError(f"no answer within {seconds:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise TrackerError(self._last_words() or "its process has ended")
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """Return the last line that the process wrote to stderr; empty if there is none."""
        if self._says.closed:
            return "its process was ended"
        self._says.seek(0)
        lines = self._says.read().decode(errors="replace").split("\n")
        return hide(next((line for line in reversed(lines) if line.strip()), ""))
