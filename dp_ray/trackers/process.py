"""The trackers of a run, as its driver sees them: a writer of TensorBoard's files, and a process for each other one.

The processes run `feed.py`, and nobody waits for them. Begin at `RunTrackers`; `send_late` sends what the trackers of
an ended run lack.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path

from dp_ray.errors import JobError, StorageError
from dp_ray.rundir.files import RESULT_JSON, kept_job
from dp_ray.rundir.lease import last_alive
from dp_ray.storage import Storage
from dp_ray.system.imports import check_installed
from dp_ray.text import command_for, counted
from dp_ray.trackers.clients import CLIENTS
from dp_ray.trackers.feed import END_RETRY_SECONDS, ENDED, RETRY_SECONDS, TRACKED_JSON, TRACKERS
from dp_ray.trackers.tensorboard import TensorBoardWriter

# dp_ray is found where this process has found it.
PROGRAM = (
    f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from dp_ray.trackers import feed; feed.main()"
)
# A request fails soon and is sent again, instead of waiting within the package.
SETTINGS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
END_SECONDS = 30.0
STOP_SECONDS = 5.0  # after Ctrl-C
LATE_SECONDS = 600.0


class TrackerProcess:
    """The process of a tracker, which a thread starts anew if it ends before the run; `say` prints a line.

    No method but `leave` waits for it.
    """

    def __init__(self, name: str, run: Storage, env: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.name = name
        self.is_done = False
        self._run, self._say = run, say
        self._env = {**SETTINGS, **os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()  # the run has
        self._is_left = self._has_said = False
        self._thread = threading.Thread(target=self._follow, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Have the tracker get what it lacks, and the run's end: the run's result is in its directory."""
        self._ended.set()
        with suppress(OSError, ValueError):  # it has just ended
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write(ENDED)

    def leave(self, until: float) -> None:
        """Wait for the process until a time of time.monotonic(); then kill it, and say what the tracker has."""
        self._thread.join(max(0.0, until - time.monotonic()))
        self.close()
        if not self.is_done:
            has = counted(TRACKED_JSON.read(self._run.child(TRACKERS), f"{self.name}.json").next_step, "step")
            again = command_for("track", self._run)
            self._say(f"{self.name} has {has} and lacks the run's end; `{again}` sends what it lacks")

    def close(self) -> None:
        """Kill the process, if it has not ended by itself."""
        self._is_left = True
        self._ended.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _follow(self) -> None:
        for seconds in chain(RETRY_SECONDS, repeat(RETRY_SECONDS[-1])):
            try:
                problem = self._run_process()
            except OSError as error:  # the system starts no more processes
                problem = str(error)
            if self.is_done or self._is_left:
                return
            self._hear(problem)
            if self._ended.wait(seconds):
                time.sleep(END_RETRY_SECONDS)

    def _run_process(self) -> str:
        """Start the process, and say what it tells until it ends; return the last line that its package wrote."""
        with (
            tempfile.TemporaryFile(prefix="dp_ray-") as errors,
            subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, self.name],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._env,
                start_new_session=True,  # Ctrl-C is for the run's driver alone
            ) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):  # it has ended: its last words say why
                # The location may hold a secret, so that it stands in no command.
                process.stdin.write(f"{self._run.location}\n".encode())
            self._process = process
            # Looked at once the process is set: a call of `end` or `close` before that did not reach it.
            if self._ended.is_set():
                self.end()
            if self._is_left:
                process.kill()
            for line in process.stdout:
                self._hear(line.decode().strip())
            process.wait()
            self.is_done = self._ended.is_set() and process.returncode == 0
            errors.seek(0)
            words = [line for line in errors.read().decode(errors="replace").split("\n") if line.strip()]
            return words[-1] if words else "its process has ended"

    def _hear(self, problem: str) -> None:
        """Say, once, that the tracker does not answer; once there is no problem any more, that it does again."""
        if problem and not self._has_said and not self._is_left:
            self._say(f"{self.name} does not answer, the run goes on; it gets later what it misses: {problem}")
        elif not problem and self._has_said:
            self._say(f"{self.name} answers again")
        self._has_said = bool(problem)


class RunTrackers:
    """The trackers of a run, by default TensorBoard's files; the `writers` get the rows of its history."""

    def __init__(
        self, names: Sequence[str] | None, run: Storage, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        names = ["tensorboard"] if names is None else names
        self.writers = [TensorBoardWriter(run)] if "tensorboard" in names else []
        self._all = [TrackerProcess(name, run, env, say) for name in names if name in CLIENTS]

    def finish(self, status: str) -> None:
        """End the trackers' runs with that of a run, whose result is in its directory."""
        self.end(END_SECONDS if status == "done" else STOP_SECONDS)

    def end(self, seconds: float) -> list[str]:
        """End the trackers' runs, all within the same seconds; return those that do not answer, which are left."""
        until = time.monotonic() + seconds
        for tracker in self._all:
            tracker.end()
        for tracker in self._all:
            tracker.leave(until)
        return [tracker.name for tracker in self._all if not tracker.is_done]

    def close(self) -> None:
        """Kill the processes that have not ended."""
        for tracker in self._all:
            tracker.close()


def send_late(run_dir: str) -> Iterator[str]:
    """Send what the trackers of an ended run lack; yield a line for each.

    Raises JobError if the run goes on, or has no trackers, and StorageError if they still do not answer.
    """
    run = Storage(run_dir)
    job, result = kept_job(run, "a training"), RESULT_JSON.read(run)
    names = [name for name in job.get("trackers") or () if name in CLIENTS]
    if not names:
        raise JobError(f"{run}: the job has no trackers but TensorBoard's files")
    if not result or last_alive(run)[0]:
        raise JobError(f"{run}: has not ended; its trackers get what they lack when it goes on")
    for name in names:
        check_installed(f"trackers: {name}", name, name)
    said: list[str] = []
    if lacking := RunTrackers(names, run, {}, said.append).end(LATE_SECONDS):
        raise StorageError(f"{run}: {', '.join(lacking)} did not answer: {said[-1]}")
    for name in names:
        yield f"{name} has all {TRACKED_JSON.read(run.child(TRACKERS), f'{name}.json').next_step} steps"
