"""Ray Train's worker: the first thing that a worker's process imports, without Ray Data and pandas.

Public: none; `import ray.train` imports both, which takes a quarter of the time of a worker's start.
"""

from dp_ray.system.imports import postponed

with postponed("ray.data", "pandas"):
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker as RaysOwn


class RayTrainWorker(RaysOwn):  # type: ignore[misc]
    """Ray Train's own, in a module that imports less."""
