"""Launches the workers of a session: a TorchTrainer with dp_ray's policies."""

import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.train import LoggingConfig, RunConfig, ScalingConfig

from dp_ray.cluster.channel import encoded
from dp_ray.cluster.connect import train_environment
from dp_ray.cluster.network import WorkerTorchConfig
from dp_ray.cluster.ray_internals.train import ControlledTrainer, WorkersStart
from dp_ray.cluster.resources import Resources
from dp_ray.cluster.restarts import RestartPolicy
from dp_ray.cluster.scaling import ElasticScalingPolicy
from dp_ray.cluster.scaling_decision import Wanted
from dp_ray.cluster.worker import GROUP, WorkerConfig, train_loop_per_worker
from dp_ray.job_keys import WorkerKeys
from dp_ray.monitor.messages import Message, Starting
from dp_ray.system.environment import set_environment
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
        call(set_environment, {**self._env, GROUP: uuid.uuid4().hex})

    def _say(self, phase: Message) -> None:
        ray.get(self._channel.put_phase.remote(encoded(phase)))


def launch(
    keys: WorkerKeys, each: Resources, config: WorkerConfig, folder: str, is_own: bool, verbose: bool
) -> ControlledTrainer:
    """Start the workers with the resources `each`, and return the trainer that keeps them; it does not wait.

    Ray Train's own files go to `folder`, a temporary one of the driver.
    """
    channel = config.channel
    trainer = ControlledTrainer(
        train_loop_per_worker,
        train_loop_config={"worker": config},
        torch_config=WorkerTorchConfig(),
        scaling_config=_scaling(keys, each),
        run_config=RunConfig(
            name="dp_ray",
            storage_path=folder,
            logging_config=LoggingConfig("INFO" if verbose else "CRITICAL"),
        ),
        scaling=lambda given: ElasticScalingPolicy(given, _wanted_workers(keys, each), channel),
        restarts=lambda given: RestartPolicy(given, channel),
        start=StartCallback(dict(keys.env), channel),
        is_own=is_own,
    )
    with train_environment():
        trainer.start()
    return trainer


def _scaling(keys: WorkerKeys, each: Resources) -> ScalingConfig:
    elastic = keys.min_workers != keys.max_workers
    return ScalingConfig(
        num_workers=(keys.min_workers, keys.max_workers) if elastic else keys.max_workers,
        use_gpu=each.get("GPU", 0) > 0,
        resources_per_worker=dict(each),
        placement_strategy=keys.placement,
        accelerator_type=keys.accelerator_type,
    )


def _wanted_workers(keys: WorkerKeys, each: Resources) -> Wanted:
    return Wanted(
        min_workers=keys.min_workers,
        max_workers=keys.max_workers,
        each=each,
        placement=keys.placement,
        accelerator_type=keys.accelerator_type,
        capacity_seconds=keys.timeouts.capacity,
    )
