"""Ray Train's worker: the first thing that a worker's process imports, without Ray Data and pandas.

Public: none; `import ray.train` imports both, which takes a quarter of the time of a worker's start.
"""

import os
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from dp_ray.system.imports import postponed

with postponed("ray.data", "pandas"):
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker as RaysOwn


class RayTrainWorker(RaysOwn):  # type: ignore[misc]
    """Ray Train's own, in a module that imports less."""


# NCCL takes a name as the begin of names, eth1 for eth10 too, unless after an equals sign; gloo takes names whole.
INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}


def interface_of(address: str) -> str | None:
    """The name of the network interface with an IP address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None


def bind_to_ray_address() -> None:
    """Have gloo and NCCL use the interface with the node's Ray address, unless the user set one."""
    interface = interface_of(ray.util.get_node_ip_address())
    for variable, sign in INTERFACE_VARIABLES.items():
        if interface and variable not in os.environ:
            os.environ[variable] = sign + interface


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
