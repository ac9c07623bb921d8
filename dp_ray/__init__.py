"""Run PyTorch models data-parallel on Ray clusters: exact, elastic, merged."""

from typing import TYPE_CHECKING, Any

from dp_ray import errors
from dp_ray.errors import Error

if TYPE_CHECKING:
    from dp_ray.driver import run
    from dp_ray.job import Job
    from dp_ray.replica.devices import devices
    from dp_ray.results.result import Result, load
    from dp_ray.sessions import Session, session

__all__ = ["Error", "Job", "Result", "Session", "devices", "errors", "load", "run", "session"]

# Imported when first used, so that `dp-ray plan` and `import dp_ray` wait neither for torch nor for Ray.
_HOMES = {
    "Job": "dp_ray.job",
    "Result": "dp_ray.results.result",
    "devices": "dp_ray.replica.devices",
    "load": "dp_ray.results.result",
    "Session": "dp_ray.sessions",
    "run": "dp_ray.driver",
    "session": "dp_ray.sessions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dp_ray' has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
