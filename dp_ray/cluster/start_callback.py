"""Reports the progress of the workers' start; it runs in the controller's process, which imports no torch."""

import uuid
from collections.abc import Callable
from typing import Any

import ray

from dp_ray.cluster.channel import encoded
from dp_ray.cluster.ray_internals.train import WorkersStart
from dp_ray.cluster.requests import GROUP
from dp_ray.monitor.messages import Message, Starting
from dp_ray.system.imports import prepare_imports
from dp_ray.text import counted


class StartCallback(WorkersStart):
    """Reports the progress of the workers' start to the driver, and sets `env` in each worker's process.

    It sets `env` before torch or user code is imported there. Ray's runtime_env must not hold the values, since Ray's
    agent logs it.
    """

    def __init__(self, env: dict[str, str], channel: Any) -> None:
        self._env = env
        self._channel = channel

    def on_placing(self, count: int) -> None:
        """Report that workers are being started."""
        self._say(Starting(f"starting {counted(count, 'worker')}"))

    def on_processes(self, count: int, call: Callable[..., list[Any]]) -> None:
        """Report that the workers import torch, and set their `env` and the group's id in each process."""
        self._say(Starting(f"{counted(count, 'worker')} importing torch"))
        call(prepare_imports, {**self._env, GROUP: uuid.uuid4().hex})

    def _say(self, phase: Message) -> None:
        ray.get(self._channel.put_phase.remote(encoded(phase)))
