"""What each worker's process is given before its process group forms: the job's `env`, its network interface."""

import os
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
from ray.train.torch import TorchConfig

from dp_ray.runner.environment import set_environment

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """The name of the network interface that holds an IP address, None where none does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None


def bind_to_ray_address() -> None:
    """Name that interface to gloo and NCCL, unless the user named one."""
    interface = interface_of(ray.util.get_node_ip_address())
    for variable in INTERFACE_VARIABLES:
        if interface and variable not in os.environ:
            os.environ[variable] = interface


class _BoundBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray Train's torch backend, whose workers get the job's `env`, and choose their interface, before it forms.

    The variables come first: what is imported later, torch and the user's modules, reads them. They do not go into
    Ray's runtime_env, which its agent logs. A host with several addresses resolves its own name to any of them, and
    gloo would listen there.
    """

    def on_start(self, worker_group: Any, backend_config: "BoundTorchConfig") -> None:
        worker_group.execute(set_environment, backend_config.environment)
        worker_group.execute(bind_to_ray_address)
        super().on_start(worker_group, backend_config)


@dataclass
class BoundTorchConfig(TorchConfig):  # type: ignore[misc]
    """TorchConfig with `_BoundBackend`, which sets `environment` on each worker and shows it nowhere."""

    environment: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def backend_cls(self) -> type[Any]:
        return _BoundBackend
