"""What it costs a worker to send the driver every shard's shapes, against a `ray.train.report` for each batch.

dp_ray's cost is the difference between a loop of forwards with its Probe and Recorder, sending to a real Channel, and
the same loop without. Ray Train's is what a call takes, in two workers with its defaults.
"""

import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import Goal, at_most, compared
from benchmarks.measure import alternate, seconds
from benchmarks.table import Row, time_text
from dp_ray.cluster.channel import open_channel, send
from dp_ray.engine.world import World
from dp_ray.plan.split import Shard
from dp_ray.telemetry.shapes import Probe, Recorder
from jobs.tutorial import Model

STEPS = 4_000
ROWS = 15
CALLS = 8
REPEATS = 25
CHEAPER = at_most(1 / 1_000, "1/1,000")
SHORT = Goal("under 200.0 µs", 0.2e-3, is_least=False, absolute=True)


def measure() -> list[Row]:
    with local_ray(), scratch() as folder:
        channel = open_channel()
        found = alternate(partial(seconds, partial(_told, channel)), partial(seconds, _silent), REPEATS)
        theirs = _report_seconds(folder)
    pairs = [((told - silent) / STEPS, theirs) for told, silent in found]
    what = "reports: a shard's shapes told to the driver, on the worker's step"
    return [compared(what, pairs, time_text, "ray.train.report", CHEAPER, SHORT)]


@torch.inference_mode()
def _silent() -> None:
    model, batch = Model(5, 2), torch.randn(ROWS, 5)
    for _ in range(STEPS):
        model(batch)


@torch.inference_mode()
def _told(channel: Any) -> None:
    model, batch = Model(5, 2), torch.randn(ROWS, 5)
    with (
        Recorder(World(world_size=2), lambda report: send(channel, report)) as recorder,
        Probe(model) as probe,
    ):
        for step in range(STEPS):
            model(batch)
            recorder.on_shard(Shard(step, 0, step * ROWS, (step + 1) * ROWS), *probe.take(ROWS))
            recorder.on_step(step)


def _report_seconds(folder: Path) -> float:
    TorchTrainer(
        _report_each_batch,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="reports", storage_path=str(folder)),
    ).fit()
    taken: list[float] = json.loads((folder / "seconds.json").read_text())
    return median(taken)


def _report_each_batch(config: dict[str, Any]) -> None:
    taken = []
    for _ in range(CALLS):
        started = time.perf_counter()
        ray.train.report({"input_size": [ROWS, 5], "output_size": [ROWS, 2]})
        taken.append(time.perf_counter() - started)
    if ray.train.get_context().get_world_rank() == 0:
        (config["folder"] / "seconds.json").write_text(json.dumps(taken))
