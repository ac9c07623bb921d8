"""Run PyTorch models data-parallel on Ray clusters: exact, elastic, merged."""

__version__ = "0.2.0"

TYPE_CHECKING = False  # as mypy reads it; `typing` takes longer to import than all else that `dp-ray` begins with

if TYPE_CHECKING:
    from dp_ray import data, errors
    from dp_ray.driver.run import run
    from dp_ray.driver.sessions import Session, session
    from dp_ray.engine.devices import devices
    from dp_ray.errors import Error
    from dp_ray.job.job import Job
    from dp_ray.parallel.module import DataParallel
    from dp_ray.results.result import Result, load
    from dp_ray.tasks.own_loop import Loop

__all__ = [
    "DataParallel",
    "Error",
    "Job",
    "Loop",
    "Result",
    "Session",
    "data",
    "devices",
    "errors",
    "load",
    "run",
    "session",
]

# Imported when first used, so that `dp-ray plan` and `import dp_ray` wait neither for torch nor for Ray.
_HOMES = {
    "DataParallel": "dp_ray.parallel.module",
    "Loop": "dp_ray.tasks.own_loop",
    "Error": "dp_ray.errors",
    "Job": "dp_ray.job.job",
    "Result": "dp_ray.results.result",
    "devices": "dp_ray.engine.devices",
    "load": "dp_ray.results.result",
    "Session": "dp_ray.driver.sessions",
    "run": "dp_ray.driver.run",
    "session": "dp_ray.driver.sessions",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'dp_ray' has no attribute {name!r}")
    import importlib

    if name not in _HOMES:
        return importlib.import_module(f"dp_ray.{name}")
    found: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
