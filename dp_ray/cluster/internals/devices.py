"""The devices that Ray gave a worker."""

import torch
from ray.air._internal.device_manager import get_torch_device_manager_by_context


def assigned_devices() -> list[torch.device]:
    """The devices that Ray gave this worker: its GPUs, else the CPU.

    Public: ray.train.torch.get_devices, which calls the same; its package imports Ray Data and pandas.
    """
    return list(get_torch_device_manager_by_context().get_devices())
