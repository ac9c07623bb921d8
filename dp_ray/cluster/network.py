"""Has the process groups of a worker use the network interface with the node's Ray address."""

import os
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.train.torch import TorchConfig

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """The name of the network interface with an IP address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None


def bind_to_ray_address() -> None:
    """Have gloo and NCCL use the interface with the node's Ray address, unless the user set one."""
    interface = interface_of(ray.util.get_node_ip_address())
    for variable in INTERFACE_VARIABLES:
        if interface and variable not in os.environ:
            os.environ[variable] = interface


class _WorkerBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray Train's torch backend, but its workers only choose their interface; each job forms a process group.

    A host with several addresses may resolve its own name to any of them, and gloo would listen there.
    """

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Called by Ray Train when the workers' processes run."""
        worker_group.execute(bind_to_ray_address)


@dataclass
class WorkerTorchConfig(TorchConfig):  # type: ignore[misc]
    """TorchConfig with `_WorkerBackend`."""

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that Ray Train uses."""
        return _WorkerBackend
