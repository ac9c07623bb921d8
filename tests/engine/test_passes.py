"""Several passes over a step's shards: a GAN, whose critic and generator have losses and updates of their own.

It is written on a step, its shards, passes and updates, as a training of the product is.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from dp_ray.engine.forward_state import ForwardState
from dp_ray.engine.placement import Placement, place
from dp_ray.engine.step import Step
from dp_ray.engine.trainer import Pass
from dp_ray.engine.update import OptimizerStep
from dp_ray.engine.votes import StepControl, StepSums
from dp_ray.job.job import Job
from dp_ray.job.plan import split_of
from dp_ray.plan.split import Work
from dp_ray.tasks.setup import Context
from tests.support.builders import pass_of, steps_of
from tests.support.group import run_group
from tests.support.trainings import initial, job_of

HERE = "tests.engine.test_passes"
ROWS, BATCH, EPOCHS, LR = 23, 10, 3, 0.1  # the last batch is short, and its shards uneven


class Points(torch.utils.data.Dataset[Any]):
    """Real points, and the noise of which the generator makes others."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(7)
        self.real = torch.randn(ROWS, 2, generator=draws) * 0.3 + 1
        self.noise = torch.randn(ROWS, 3, generator=draws)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.real[index], self.noise[index]


class Gan(nn.Module):
    """A generator of points, and a critic that tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def of_real(self, _: nn.Module, batch: Any) -> torch.Tensor:
        """The critic's loss on real points, one number a row."""
        return softplus(-self.critic(batch[0]))[:, 0]

    def of_made(self, _: nn.Module, batch: Any) -> torch.Tensor:
        """The critic's loss on the generator's points, which it does not train."""
        return softplus(self.critic(self.generator(batch[1]).detach()))[:, 0]

    def of_fooling(self, _: nn.Module, batch: Any) -> torch.Tensor:
        """The generator's loss: the critic should take its points for real."""
        return softplus(-self.critic(self.generator(batch[1])))[:, 0]

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Make points."""
        made: torch.Tensor = self.generator(noise)
        return made


class HookedGan(Gan):
    """A GAN with a hook on a gradient of its critic, which is the sum of two passes, and on one of its generator."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("critic.0.weight", "generator.0.weight"):
            self.get_parameter(name).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]


class TrainsGan(StepControl):
    """The training loop, in place of the task's own."""

    def task(self, context: Context) -> None:
        """Train, with three passes and two updates in each step; the weights are kept by rank 0."""
        job, dataset = context.job, Points()
        split = split_of(job, len(dataset))
        placement = place(job, context.world, context.notify)
        model: Any = placement.model
        buffers = ForwardState(model)
        critic = replace(placement, model=model.critic, called=model.critic)
        generator = replace(placement, model=model.generator, called=model.generator)
        of_critic, of_generator = critic.optimizer_step(), generator.optimizer_step()

        def a_pass(at: Placement, update: OptimizerStep, step: Step) -> Pass:
            return pass_of(at, update, step, split, buffers)

        real, made = a_pass(critic, of_critic, model.of_real), a_pass(critic, of_critic, model.of_made)
        fooling = a_pass(generator, of_generator, model.of_fooling)
        stats = StepSums(split.shards, 1, context.world)
        work = Work(split, context.world.world_size, context.world.rank)
        for loaded in steps_of(job, dataset, work):
            shards = list(loaded.loaded)  # each pass goes over them
            for number, one in enumerate((real, made, fooling)):
                stats.begin()
                again = loaded._replace(loaded=iter(shards))
                one.run(again, stats, adds=one is made, number=number)
                weight, rows = stats.numbers.sum(0)[1].item(), loaded.whole.rows
                assert weight == rows
                if one is made:
                    of_critic.apply(weight, rows, loaded.step)
                elif one is fooling:
                    of_generator.apply(weight, rows, loaded.step)
                    model.critic.zero_grad()  # the way to the generator leads through it
        for one in (real, made, fooling):
            one.close()
        if context.world.rank == 0:
            torch.save(model.state_dict(), Path(context.run.location, "gan.pt"))


def gan_job(workers: int, model: str = "Gan", **keys: Any) -> Job:
    return job_of(
        {"target": f"{HERE}:{model}"},
        dataset={"target": f"{HERE}:Points"},
        loss=None,
        step=f"{HERE}:Gan.of_real",
        workers=workers,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        shards=3,
        optimizer={"target": "torch.optim:SGD", "args": {"lr": LR}},
        **keys,
    )


def trained(folder: Path, workers: int, **keys: Any) -> dict[str, torch.Tensor]:
    run_group(gan_job(workers, **keys), folder, TrainsGan())
    return dict(torch.load(folder / "gan.pt", weights_only=True))


def by_hand(kind: type[Gan] = Gan) -> dict[str, torch.Tensor]:
    """Train the same GAN in plain torch, on whole batches."""
    model: Any = initial(kind)
    points = Points()
    critic, generator = (torch.optim.SGD(one.parameters(), lr=LR) for one in (model.critic, model.generator))
    for _ in range(EPOCHS):
        for start in range(0, ROWS, BATCH):
            batch = points.real[start : start + BATCH], points.noise[start : start + BATCH]
            critic.zero_grad()
            (model.of_real(model, batch) + model.of_made(model, batch)).mean().backward()
            critic.step()
            generator.zero_grad()
            model.of_fooling(model, batch).mean().backward()
            generator.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("keys", [{}, {"bitwise": True}], ids=["sums", "bitwise"])
def test_a_gan_of_three_passes_trains_as_in_plain_torch_on_any_number_of_workers(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """The critic's second pass adds to the sums of its first one: summed twice, these would count for each worker."""
    expected, found = by_hand(), [trained(tmp_path / str(workers), workers, **keys) for workers in (1, 2, 3)]
    for weights in found:
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=2e-5, atol=1e-6)
            if keys:
                assert torch.equal(tensor, found[0][name]), name


def test_a_hook_on_a_gradient_sees_the_sum_of_the_passes_before_an_update(tmp_path: Path) -> None:
    expected, plain, found = by_hand(HookedGan), by_hand(), trained(tmp_path, 2, model="HookedGan")
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=1e-6)
    assert any((value - plain[name]).abs().max() > 0.01 for name, value in found.items())
