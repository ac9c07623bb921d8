"""Whether Ray Train's controller starts workers anew when some were lost, or raised."""

import re
import time
from typing import Any

import ray
from ray.train import FailureConfig
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2.api.exceptions import WorkerGroupError

from dp_ray.cluster.channel import END, tell
from dp_ray.monitor.messages import Interrupted, Waits, WorkerExit

DEATHS = {
    "running low on memory": "its node ran low on memory, and Ray killed it",
    "node has been marked dead": "its node was lost",
    "node was terminated": "its node was lost",
    "The node has died": "its node was lost",
    "temporarily unavailable": "it does not answer",
    "connection error code 2": "its process was killed, or crashed",
    "SYSTEM_ERROR": "its process was killed, or crashed",
}
DEATH_SECONDS = 3.0  # in which Ray sees a death of which a peer already has


class RestartPolicy(FailurePolicy):  # type: ignore[misc]
    """Whether to start anew: `retries` times after a loss; or after an error that may pass, and is not back."""

    def __init__(self, config: FailureConfig, retries: int, channel: Any) -> None:
        super().__init__(config)
        self._left = retries
        self._channel = channel
        self._seen: set[str] = set()
        self._lost_peer_since: float | None = None

    def make_decision(self, training_failed_error: Exception) -> Any:
        if ray.get(self._channel.ordered.remote())[0] == END:
            return FailureDecision.RAISE  # the user stops the run
        if not isinstance(training_failed_error, WorkerGroupError):
            return self._on_start_failure(training_failed_error)
        failures: dict[int, Exception] = training_failed_error.worker_failures
        ended = {rank: error for rank, error in failures.items() if isinstance(error, WorkerExit)}
        died = {rank: error for rank, error in failures.items() if rank not in ended}
        if not died and all(error.kind == "lost peer" for error in ended.values()) and self._may_see_a_death():
            return FailureDecision.NOOP
        self._lost_peer_since = None
        if died:
            return self._retry("worker", _of_all(died), tuple(died))
        for kind in ("mistaken", "raised"):
            if raised := {rank: error for rank, error in ended.items() if error.kind == kind}:
                return self._on_error(raised)
        yielded = [error for error in ended.values() if error.kind == "yielded"]
        if yielded:
            _, why = ray.get(self._channel.ordered.remote())
            tell(self._channel, Interrupted("preemption" if "drain" in why else "resize", why, ()))
            return FailureDecision.RETRY
        return self._retry("network", _of_all(ended), tuple(ended))

    def _may_see_a_death(self) -> bool:
        """A worker that lost its peer is often sooner to tell than Ray is to find the peer dead."""
        now = time.monotonic()
        self._lost_peer_since = self._lost_peer_since or now
        return now - self._lost_peer_since < DEATH_SECONDS

    def _on_error(self, raised: dict[int, WorkerExit]) -> Any:
        """An error of the user's code is retried if it may pass: if the worker had come some way, and not here."""
        rank, error = min(raised.items())
        what = re.sub(r"[0-9a-f]{32}", "", f"{error.kind} {error.text}")
        if error.kind == "mistaken" or not error.has_progressed or what in self._seen:
            return FailureDecision.RAISE
        self._seen.add(what)
        return self._retry("error", cause_of(error), (rank,))

    def _on_start_failure(self, error: Exception) -> Any:
        """Workers died, or found no place, while they were started."""
        cause = getattr(error, "controller_failure", error)
        if isinstance(cause, WorkerGroupStartupTimeoutError):  # somebody else was sooner: Sizing waits for room
            tell(self._channel, Waits("the room that there was is taken, or lies in pieces too small: waiting"))
            return FailureDecision.RETRY
        if not isinstance(cause, WorkerGroupStartupFailedError | ray.exceptions.RayError):
            return FailureDecision.RAISE
        return self._retry("worker", f"the workers could not be started: {cause_of(cause)}", ())

    def _retry(self, kind: str, what: str, ranks: tuple[int, ...]) -> Any:
        if self._left == 0:
            return FailureDecision.RAISE
        self._left -= 1
        tell(self._channel, Interrupted(kind, what, ranks))
        return FailureDecision.RETRY


def _of_all(failures: dict[int, Any]) -> str:
    return "; ".join(sorted({cause_of(error) for error in failures.values()}))


def cause_of(error: Any) -> str:
    """Why a worker is gone, in a line; Ray's own text is a page."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    text = str(error).strip()
    for sign, says in DEATHS.items():
        if sign in text:
            return says
    if detail := re.search(r"Worker exit detail: ([^.]+)", text):
        return detail[1]
    return text.splitlines()[0] if text else type(error).__name__
