"""A worker's place among those that Ray Train has started, and the devices that Ray gave it."""

from typing import Any

import torch

from dp_ray.system.imports import postponed

with postponed("ray.data", "pandas"):
    from ray.air._internal.device_manager import get_torch_device_manager_by_context
    from ray.train.v2._internal.execution.context import get_train_context


def place_of_this_worker() -> Any:
    """Return the context: it has get_world_rank, get_world_size, get_local_rank, get_local_world_size, get_node_rank.

    Public: ray.train.get_context, which imports Ray Tune, 700 modules with pandas, to say the same.
    """
    return get_train_context()


def assigned_devices() -> list[torch.device]:
    """Return the devices that Ray gave this worker: its GPUs, else the CPU.

    Public: ray.train.torch.get_devices, which calls the same; its package imports Ray Data and pandas.
    """
    return list(get_torch_device_manager_by_context().get_devices())
