"""Translates Ray Train's errors into one line, or into the types of `restart_decision`."""

import re
from typing import Any

import ray

from dp_ray.cluster.restart_decision import StartFailed, StartTrouble, WorkersFailed
from dp_ray.monitor.messages import WorkerExit
from dp_ray.system.imports import postponed

with postponed("ray.data", "pandas"):
    import ray.train
    from ray.train.v2._internal.exceptions import (
        WorkerGroupStartupFailedError,
        WorkerGroupStartupTimeoutError,
        WorkerHealthCheckFailedError,
        WorkerHealthCheckTimeoutError,
    )

_DEATHS = {
    "running low on memory": "its node ran low on memory, and Ray killed it",
    "has been marked dead because": "its node was lost",
    "node was terminated": "its node was lost",
    "its node has died": "its node was lost",
    "temporarily unavailable": "it does not answer",
    "connection error code 2": "its process was killed, or crashed",
    "SYSTEM_ERROR": "its process was killed, or crashed",
}
_EXIT_DETAIL = "Worker exit detail: "


def why_failed(error: Any) -> str:
    """Why a worker failed, in one line; Ray's own text is a page. Public: none; Ray's errors have no such field."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    text = str(error).strip()
    for sign, says in _DEATHS.items():
        if sign in text:
            return says
    if detail := re.search(f"{_EXIT_DETAIL}([^.]+)", text):
        return detail[1]
    return text.splitlines()[0] if text else type(error).__name__


def is_death(error: BaseException) -> bool:
    """Whether a worker's process died, rather than raised. Public: ray.exceptions, except for the health checks."""
    deaths = ray.exceptions.RayActorError | ray.exceptions.NodeDiedError
    return isinstance(error, deaths | WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)


def failure_of(error: Exception) -> WorkersFailed | StartFailed:
    """Translate a failure that Ray Train's controller reports into the types of `restart_decision`."""
    if isinstance(error, ray.train.WorkerGroupError):
        failures = error.worker_failures
        ended = {rank: one for rank, one in failures.items() if isinstance(one, WorkerExit)}
        return WorkersFailed(ended, {rank: why_failed(one) for rank, one in failures.items() if rank not in ended})
    cause = getattr(error, "controller_failure", error)
    if isinstance(cause, WorkerGroupStartupTimeoutError):
        return StartFailed(StartTrouble.NO_CAPACITY, why_failed(cause))
    is_lost = isinstance(cause, WorkerGroupStartupFailedError | ray.exceptions.RayError)
    return StartFailed(StartTrouble.LOST if is_lost else StartTrouble.ERROR, why_failed(cause))
