"""A GAN by a loop of one's own, against two DDP modules by hand, and against two parallel modules in one process.

Both loops on workers run in the same processes and take turns every few steps, as in the benchmark `train`.
"""

import time
from collections.abc import Iterator
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

import dp_ray
from benchmarks.compare import at_least, compared
from benchmarks.table import Row, rate_text
from benchmarks.train import in_turns
from benchmarks.training import BATCH, STEPS, job_of, plain_batches
from dp_ray.engine.world import World
from dp_ray.messages import StepControl
from dp_ray.storage import Storage
from dp_ray.tasks.own_loop import train_by_loop
from dp_ray.tasks.setup import Context

NOISE, CALLS = 64, 12
RATE = 2e-4


def layers(inputs: int, outputs: int) -> nn.Sequential:
    """Three linear layers."""
    return nn.Sequential(nn.Linear(inputs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, outputs))


class Gan(nn.Module):
    """A generator of rows of 784 numbers, and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = layers(NOISE, 784), layers(784, 1)


def tells_apart(critic: nn.Module, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """The critic's loss of each row; it is called once, on the real rows and the made ones."""
    of_real, of_made = critic(torch.cat([real, made])).chunk(2)
    losses: torch.Tensor = softplus(-of_real) + softplus(of_made)
    return losses[:, 0]


def train(run: dp_ray.Loop) -> None:
    """The loop of dp_ray's side."""
    critic, generator = run.model.critic, run.model.generator
    of_critic = run.optimizer(torch.optim.Adam(critic.parameters(), RATE))
    of_generator = run.optimizer(torch.optim.Adam(generator.parameters(), RATE))
    for step in run.steps():
        step.backward(
            lambda batch: tells_apart(critic, batch[0], generator(torch.randn(len(batch[0]), NOISE))), critic
        )
        of_critic.step()
        step.backward(lambda batch: softplus(-critic(generator(torch.randn(len(batch[0]), NOISE))))[:, 0], generator)
        of_generator.step()


def ours(world: World, control: StepControl) -> None:
    """The loop on this worker, with all that it reports and keeps but the checkpoints."""
    keys = {"model": Gan, "loop": train, "loss": None, "optimizer": None}
    with TemporaryDirectory() as folder:
        train_by_loop(Context(job_of("mlp", keys, world), world, Storage(folder), lambda _: None, control))


def by_hand(world: World, control: StepControl) -> None:
    """Two DDP modules: the critic is frozen while the generator's loss goes through it."""
    torch.manual_seed(0)
    model = Gan()
    critic, generator = DistributedDataParallel(model.critic), DistributedDataParallel(model.generator)
    of_critic = torch.optim.Adam(critic.parameters(), RATE)
    of_generator = torch.optim.Adam(generator.parameters(), RATE)
    batches = plain_batches(world, BATCH // world.world_size)
    for step in range(STEPS):
        control.before(step)
        real, _ = next(batches)
        with torch.no_grad():
            made = model.generator(torch.randn(len(real), NOISE))
        of_critic.zero_grad()
        tells_apart(critic, real, made).mean().backward()  # type: ignore[no-untyped-call]
        of_critic.step()
        model.critic.requires_grad_(False)
        of_generator.zero_grad()
        softplus(-model.critic(generator(torch.randn(len(real), NOISE)))).mean().backward()  # type: ignore[no-untyped-call]
        of_generator.step()
        model.critic.requires_grad_(True)


def one_process() -> float:
    """Rows a second of the same steps by two parallel modules, whose loop runs in this process."""
    model, real = Gan(), torch.randn(BATCH, 784)
    critic, generator = dp_ray.DataParallel(model.critic, workers=2), dp_ray.DataParallel(model.generator, workers=2)
    of_critic = torch.optim.Adam(model.critic.parameters(), RATE)
    of_generator = torch.optim.Adam(model.generator.parameters(), RATE)
    seconds = []
    try:
        for _ in range(CALLS):
            began = time.perf_counter()
            with torch.no_grad():
                made = generator(torch.randn(BATCH, NOISE))
            of_critic.zero_grad()
            (softplus(-critic(real)) + softplus(critic(made))).mean().backward()  # type: ignore[no-untyped-call]
            of_critic.step()
            of_generator.zero_grad()
            softplus(-critic(generator(torch.randn(BATCH, NOISE)))).mean().backward()  # type: ignore[no-untyped-call]
            of_generator.step()
            seconds.append(time.perf_counter() - began)
    finally:
        critic.close()
        generator.close()
    return BATCH / median(seconds[2:])


def measure() -> Iterator[Row]:
    rates = [(BATCH / mine, BATCH / theirs) for mine, theirs in in_turns(ours, by_hand, workers=2)]
    what = f"loops: rows a second of a GAN of 1.2 M, 2 workers, global batches of {BATCH:,}"
    yield compared(what, rates, rate_text, "two DDP modules by hand", at_least(0.90))
    beside = one_process()
    pairs: Any = [(mine, beside) for mine, _ in rates]
    yield compared(what, pairs, rate_text, "two dp_ray.DataParallel in one process", at_least(1.0))
