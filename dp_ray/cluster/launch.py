"""Launches the workers of a session: a TorchTrainer with dp_ray's policies."""

from ray.train import LoggingConfig, RunConfig, ScalingConfig

from dp_ray.cluster.connect import train_environment
from dp_ray.cluster.network import WorkerBackendConfig
from dp_ray.cluster.ray_internals.trainer import ControlledTrainer
from dp_ray.cluster.requests import WorkerConfig
from dp_ray.cluster.resources import Resources
from dp_ray.cluster.restarts import RestartPolicy
from dp_ray.cluster.scaling import ElasticScalingPolicy
from dp_ray.cluster.scaling_decision import Wanted
from dp_ray.cluster.start_callback import StartCallback
from dp_ray.cluster.worker import train_loop_per_worker
from dp_ray.job_keys import WorkerKeys


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
        torch_config=WorkerBackendConfig(),
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
