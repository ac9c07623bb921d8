"""Ray Train's worker: the first thing that a worker's process imports, without Ray Data and pandas.

Public: none; `import ray.train` imports both, which takes a quarter of the time of a worker's start.
"""

from dataclasses import dataclass
from typing import Any

import ray

from dp_ray.system.imports import postponed
from dp_ray.system.process import bind_to

with postponed("ray.data", "pandas"):
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker as RaysOwn


class RayTrainWorker(RaysOwn):  # type: ignore[misc]
    """Ray Train's own, in a module that imports less."""


def bind_to_ray_address() -> None:
    """Have gloo and NCCL use the interface with the node's Ray address, unless the user set one."""
    bind_to(ray.util.get_node_ip_address())


class _WorkerBackend(Backend):  # type: ignore[misc]
    """The workers choose their interface when they start; each job forms a process group.

    A host with several addresses may resolve its own name to any of them, and gloo would listen there.
    """

    share_cuda_visible_devices = True  # as of Ray Train's torch backend: NCCL needs it

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray Train when the workers' processes run."""
        worker_group.execute(bind_to_ray_address)


@dataclass
class WorkerBackendConfig(BackendConfig):  # type: ignore[misc]
    """Ray Train's settings for `_WorkerBackend`; not a TorchConfig, so that the controller imports no torch."""

    backend: str = "gloo"  # TorchTrainer asks for it; nobody uses it

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that Ray Train uses."""
        return _WorkerBackend
