"""Loops of a user's, as `dp_ray.Loop` runs them, and the same trainings in plain torch on whole batches."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, softplus
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from dp_ray.system.threads import last_call

ROWS, BATCH, EPOCHS, LR = 23, 10, 3, 0.1  # the last batch is short, and its shards uneven


def keys_of(loop: str, **keys: Any) -> dict[str, Any]:
    """The keys of a training by one of these loops, or by that of a full name."""
    given: dict[str, Any] = {
        "task": "train",
        "model": f"{__name__}:Gan",
        "dataset": f"{__name__}:Points",
        "loop": loop if ":" in loop else f"{__name__}:{loop}",
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "shuffle": False,
        "shards": 3,
    }
    return {**given, **keys}


class Points(Dataset[Any]):
    """Real points, and the noise of which a generator makes others."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(7)
        self.real = torch.randn(ROWS, 2, generator=draws) * 0.3 + 1
        self.noise = torch.randn(ROWS, 3, generator=draws)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.real[index], self.noise[index]


class SlowPoints(Points):
    """The same, each of which takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Gan(nn.Module):
    """A generator of points, and a critic that tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Make points."""
        made: torch.Tensor = self.generator(noise)
        return made


class HookedGan(Gan):
    """A GAN with a hook on a gradient of its critic, which two passes add to, and on one of its generator."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("critic.0.weight", "generator.0.weight"):
            self.get_parameter(name).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, whose state a checkpoint must keep."""
    return torch.optim.SGD(module.parameters(), lr=LR, momentum=0.5)


def gan(run: Any) -> None:
    """Train critic and generator in turns; the critic's loss is the sum of two passes."""
    critic, generator = run.model.critic, run.model.generator
    of_critic, of_generator = run.optimizer(sgd(critic)), run.optimizer(sgd(generator))
    for step in run.steps():
        real = step.backward(lambda batch: softplus(-critic(batch[0]))[:, 0], critic)
        made = step.backward(lambda batch: softplus(critic(generator(batch[1])))[:, 0], critic)
        of_critic.step(clip=1.0)
        fooling = step.backward(lambda batch: softplus(-critic(generator(batch[1])))[:, 0], generator)
        of_generator.step()
        step.log(critic=real + made, generator=fooling)


def gan_by_hand(model: Any, batch: Any, updates: dict[str, torch.optim.Optimizer]) -> dict[str, float]:
    """A step of the same in plain torch."""
    critic, generator, (points, noise) = model.critic, model.generator, batch
    updates["critic"].zero_grad()
    of_critic = softplus(-critic(points)).mean()
    of_critic.backward()  # type: ignore[no-untyped-call]
    of_made = softplus(critic(generator(noise).detach())).mean()
    of_made.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    updates["critic"].step()
    updates["generator"].zero_grad()
    fooling = softplus(-critic(generator(noise))).mean()
    fooling.backward()  # type: ignore[no-untyped-call]
    updates["generator"].step()
    return {"critic": (of_critic + of_made).item(), "generator": fooling.item()}


def penalty(critic: nn.Module, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """The gradient penalty of WGAN-GP for each row, between real points and made ones."""
    between = (real + made).detach() / 2
    between.requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    rows: torch.Tensor = (slope.norm(dim=1) - 1).square()
    return rows


def wgan(run: Any) -> None:
    """WGAN-GP: a second derivative in the critic's pass, and a generator that is updated each second step."""
    critic, generator = run.model.critic, run.model.generator
    of_critic, of_generator = run.optimizer(sgd(critic)), run.optimizer(sgd(generator))

    def tells_apart(batch: Any) -> torch.Tensor:
        made = generator(batch[1])
        rows: torch.Tensor = (critic(made) - critic(batch[0]))[:, 0] + 10 * penalty(critic, batch[0], made)
        return rows

    for step in run.steps():
        step.backward(tells_apart, critic)
        of_critic.step()
        if step.number % 2:
            step.backward(lambda batch: -critic(generator(batch[1]))[:, 0], generator)
            of_generator.step()


def wgan_by_hand(model: Any, batch: Any, updates: dict[str, torch.optim.Optimizer], number: int) -> None:
    """A step of the same in plain torch."""
    critic, generator, (real, noise) = model.critic, model.generator, batch
    updates["critic"].zero_grad()
    made = generator(noise).detach()
    ((critic(made) - critic(real)).mean() + 10 * penalty(critic, real, made).mean()).backward()
    updates["critic"].step()
    if number % 2:
        updates["generator"].zero_grad()
        (-critic(generator(noise)).mean()).backward()
        updates["generator"].step()


def lbfgs(run: Any) -> None:
    """LBFGS, which computes the loss several times in an update."""
    update = run.optimizer(torch.optim.LBFGS(run.model.generator.parameters(), lr=0.5, max_iter=4))
    for step in run.steps():

        def closure(step: Any = step) -> torch.Tensor:
            loss: torch.Tensor = step.backward(fits, run.model.generator)
            return loss

        def fits(batch: Any) -> torch.Tensor:
            rows: torch.Tensor = (run.model.generator(batch[1]) - batch[0]).square().mean(1)
            return rows

        update.step(closure=closure)


def contrastive(run: Any) -> None:
    """A loss over the whole batch, added to one of rows."""
    update = run.optimizer(sgd(run.model))
    for step in run.steps():
        step.backward(lambda batch: (run.model(batch[1]) - batch[0]).square().mean(1), run.model.generator)
        step.backward(
            lambda batch: {"outputs": run.model(batch[1]), "target": batch[0]}, run.model.generator, over=spread
        )
        update.step()


def spread(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss of all pairs of rows."""
    return mse_loss(outputs @ outputs.T, target @ target.T)


BROKEN = (3, 10, 12)


class Broken(Points):
    """Points of which some cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index in BROKEN:
            raise ValueError("unreadable")
        return super().__getitem__(index)


class FirstBroken(Points):
    """Points of which the first batch cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index < BATCH:
            raise ValueError("unreadable")
        return super().__getitem__(index)


class Pairs(Points):
    """Noise, and the points that should come of it."""

    def __getitem__(self, index: int) -> Any:
        return self.noise[index], self.real[index]


def error(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The squared error of each row."""
    return (outputs - target).square().sum(1)


def batches(points: Points, epochs: int = EPOCHS, without: Sequence[int] = ()) -> Iterator[Any]:
    """The global batches of a training that does not shuffle."""
    for _ in range(epochs):
        for start in range(0, ROWS, BATCH):
            rows = [row for row in range(start, min(ROWS, start + BATCH)) if row not in without]
            yield points.real[rows], points.noise[rows]


def averaged_gan_by_hand() -> tuple[dict[str, torch.Tensor], list[float]]:
    """The average of a GAN's weights after each step, by torch's own, and its error each second step and last."""
    torch.manual_seed(0)
    model, points = Gan(), Points()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    updates = {"critic": sgd(model.critic), "generator": sgd(model.generator)}
    history = []
    for number, batch in enumerate(batches(points), 1):
        gan_by_hand(model, batch, updates)
        average.update_parameters(model)
        if number % 2 == 0 or number == 9:
            with torch.no_grad():
                history.append(error(average.module(points.noise), points.real).mean().item())
    return dict(average.module.state_dict()), history


def by_hand(
    step: Callable[..., Any], epochs: int = EPOCHS, kind: type[Gan] = Gan, without: Sequence[int] = ()
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Train a GAN in plain torch, on whole batches; return its weights and what each step returned."""
    torch.manual_seed(0)
    model = kind()
    updates = {"critic": sgd(model.critic), "generator": sgd(model.generator)}
    takes_number = step.__code__.co_argcount == 4
    found = [
        step(model, batch, updates, *([number] if takes_number else []))
        for number, batch in enumerate(batches(Points(), epochs, without))
    ]
    return dict(model.state_dict()), found


class Rows(Dataset[Any]):
    """Rows without data, of which a loop makes its own."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Policy(nn.Module):
    """A policy of two moves, and the value of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.value = nn.Linear(3, 1)


def ppo(run: Any) -> None:
    """PPO on a world of its own: rollouts of the whole batch, and four updates by them, cut into shards."""
    policy, value = run.model.policy, run.model.value
    update = run.optimizer(torch.optim.SGD(run.model.parameters(), lr=LR))
    counts = run.state("counts", {"played": 0})

    def play(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = torch.randn(len(rows), 3)
        chances = policy(seen).log_softmax(1)
        move = torch.multinomial(chances.exp(), 1)[:, 0]
        return {
            "seen": seen,
            "move": move,
            "before": chances.gather(1, move[:, None])[:, 0],
            "won": seen[:, 0] * move,
        }

    def loss(played: dict[str, torch.Tensor]) -> torch.Tensor:
        now = policy(played["seen"]).log_softmax(1).gather(1, played["move"][:, None])[:, 0]
        ratio = (now - played["before"]).exp()
        clipped = torch.minimum(ratio * played["gain"], ratio.clamp(0.8, 1.2) * played["gain"])
        rows: torch.Tensor = 0.5 * (value(played["seen"])[:, 0] - played["won"]).square() - clipped
        return rows

    for step in run.steps():
        played = step.gather(play)
        counts["played"] += len(played["won"])
        won = played["won"]
        played["gain"] = (won - won.mean()) / (won.std() + 0.1)
        for _ in range(4):
            step.backward(loss, run.model, batch=played)
            update.step(clip=0.5)
        step.log(won=won.mean(), played=counts["played"])


def ppo_of_one_pass(run: Any) -> None:
    """One update by a given batch: what a plain gradient step by its mean is."""
    update = run.optimizer(torch.optim.SGD(run.model.generator.parameters(), lr=LR))
    table = torch.linspace(0, 1, 11)[:, None].expand(11, 3).contiguous()
    for step in run.steps():
        step.backward(lambda rows: run.model.generator(rows).square().sum(1), run.model.generator, batch=table)
        update.step()


def supervised(run: Any) -> None:
    """The declared training, as the page on loops has it."""
    page = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
    names: dict[str, Any] = {"torch": torch}
    (_, rest) = page.split("```python\ndef supervised")
    exec(f"def supervised{rest.partition('```')[0]}", names)
    names["supervised"](run)


def normalised() -> nn.Module:
    """A model with batch statistics and dropout, whose forwards write buffers and draw numbers."""
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def _rank() -> int:
    from dp_ray.engine.world import own_rank

    return own_rank()


def _one_of_two(run: Any, of_other: Callable[[Any, Any, Any], None]) -> None:
    """Train both parts; on rank 1, from step 1 on, `of_other` runs in place of the passes."""
    critic, generator = run.model.critic, run.model.generator
    updates = run.optimizer(sgd(critic)), run.optimizer(sgd(generator))

    def of_critic(batch: Any) -> torch.Tensor:
        rows: torch.Tensor = critic(batch[0])[:, 0]
        return rows

    def of_generator(batch: Any) -> torch.Tensor:
        rows: torch.Tensor = generator(batch[1])[:, 0]
        return rows

    for step in run.steps():
        if _rank() and step.number == 1:
            of_other(step, of_critic, of_generator)
        else:
            step.backward(of_critic, critic)
            step.backward(of_generator, generator)
        for update in updates:
            update.step()


def another_order(run: Any) -> None:
    """Rank 1 runs the passes in another order."""
    parts = run.model

    def other(step: Any, of_critic: Any, of_generator: Any) -> None:
        step.backward(of_generator, parts.generator)
        step.backward(of_critic, parts.critic)

    _one_of_two(run, other)


def a_pass_left_out(run: Any) -> None:
    """Rank 1 leaves a pass out."""

    def other(step: Any, of_critic: Any, of_generator: Any) -> None:
        step.backward(of_critic, run.model.critic)

    _one_of_two(run, other)


def another_part(run: Any) -> None:
    """Rank 1 trains all of the model."""

    def other(step: Any, of_critic: Any, of_generator: Any) -> None:
        step.backward(of_critic, run.model)
        step.backward(of_generator, run.model.generator)

    _one_of_two(run, other)


def one_ends_early(run: Any) -> None:
    """Rank 1 leaves the loop."""
    update = run.optimizer(sgd(run.model.critic))
    for step in run.steps():
        if _rank() and step.number == 1:
            return
        step.backward(lambda batch: run.model.critic(batch[0])[:, 0], run.model.critic)
        update.step()


def one_stops(run: Any) -> None:
    """Rank 1 stops the training."""
    update = run.optimizer(sgd(run.model.critic))
    for step in run.steps():
        step.backward(lambda batch: run.model.critic(batch[0])[:, 0], run.model.critic)
        update.step()
        if _rank() and step.number == 1:
            run.stop("enough")


def one_stops_where_kept(run: Any) -> None:
    """The same after a step whose state a checkpoint keeps."""
    run.state("kept", {"one": 1})
    one_stops(run)


def forgets(run: Any) -> None:
    """Count in a local variable, by which the loss is weighed: a run that goes on begins at 0 again."""
    _counts(run, {"steps": 0})


def remembers(run: Any) -> None:
    """The same, kept."""
    _counts(run, run.state("count", {"steps": 0}))


def _counts(run: Any, count: dict[str, int]) -> None:
    update = run.optimizer(sgd(run.model.generator))
    for step in run.steps():
        count["steps"] += 1
        step.backward(
            lambda batch: (run.model(batch[1]) - batch[0]).square().mean(1) / count["steps"], run.model.generator
        )
        update.step()


def counts_by_rank(run: Any) -> None:
    """Keep what differs by worker."""
    seen = run.state("seen", {"rank": 0})
    for step in run.steps():
        seen["rank"] = _rank()
        step.log(one=1.0)


def looks_at_its_calls(run: Any) -> None:
    """Log the number of the last call, which beats carry."""
    update = run.optimizer(sgd(run.model.critic))
    for step in run.steps():
        step.gather(lambda batch: batch[0])
        step.backward(lambda batch: run.model.critic(batch[0])[:, 0], run.model.critic)
        update.step()
        number, call = last_call()
        assert call == f"step {step.number}, pass 1: step.backward(looks_at_its_calls.<lambda>, critic)"
        step.log(last=number)
        if step.number == 2:
            run.stop("enough")


def stops_itself(run: Any) -> None:
    """Stop after the second step."""
    update = run.optimizer(sgd(run.model.critic))
    for step in run.steps():
        assert step.number < 2
        step.backward(lambda batch: run.model.critic(batch[0])[:, 0], run.model.critic)
        update.step()
        if step.number == 1:
            run.stop("enough")


def halves(run: Any) -> None:
    """Two passes and two updates of one model, by half of its loss each, and what a step gathers."""
    update = run.optimizer(torch.optim.AdamW(run.model.parameters(), lr=0.01))

    def half(batch: Any) -> torch.Tensor:
        return cross_entropy(run.model(batch[0]), batch[1], reduction="none") / 2

    for step in run.steps():
        for _ in range(2):
            step.backward(half, run.model)
        update.step(clip=0.5)
        answers = step.gather(lambda batch: run.model(batch[0]).argmax(1))
        step.log(sum=answers.sum())


def in_an_order(run: Any) -> None:
    """Make the optimizers of the parts in the order that the environment names."""
    parts = {name: getattr(run.model, name) for name in os.environ["PARTS"].split()}
    updates = {name: run.optimizer(sgd(part)) for name, part in parts.items()}
    for step in run.steps():
        step.backward(lambda batch: run.model.critic(run.model(batch[1]))[:, 0], run.model)
        for update in updates.values():
            update.step()


def keeps(run: Any, folder: str, rows: int | None = None, over: bool = False) -> None:
    """Keep what a pass makes of the step's batch, or of one of so many rows; write it for each step."""
    update = run.optimizer(sgd(run.model.generator))
    kept = run.state("kept", {})

    def loss(batch: Any) -> dict[str, Any]:
        real, noise = batch
        made = run.model(noise)
        names = [f"{number:.3f}" for number in noise[:, 0].tolist()]
        outputs = {"made": made, "seen": (noise, [made.argmax(1)]), "names": names}
        if over:
            return {"outputs": outputs, "target": real}
        return {"loss": (made - real).square().mean(1), "outputs": outputs}

    for step in run.steps():
        batch = None if rows is None else own_batch(rows, step.number)
        of_pairs = (lambda outputs, target: spread(outputs["made"], target)) if over else None
        step.backward(loss, run.model.generator, over=of_pairs, batch=batch, keep=kept)
        update.step()
        torch.save(dict(kept), Path(folder) / f"{step.number}-{_rank()}.pt")


def own_batch(rows: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of a loop's own in place of a step's."""
    made = torch.linspace(-1, 1 + number, rows * 5).reshape(rows, 5).sin()
    return made[:, :2].contiguous(), made[:, 2:].contiguous()


def keeps_by_hand(rows: int | None, over: bool) -> list[dict[str, Any]]:
    """What the same keeps in plain torch, step by step."""
    torch.manual_seed(0)
    model, found = Gan(), []
    optimizer = sgd(model.generator)
    for number, batch in enumerate(batches(Points())):
        real, noise = batch if rows is None else own_batch(rows, number)
        made = model(noise)
        names = [f"{number:.3f}" for number in noise[:, 0].tolist()]
        found.append({"made": made.detach().clone(), "seen": (noise, [made.argmax(1)]), "names": names})
        (spread(made, real) if over else (made - real).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def one_keeps(run: Any) -> None:
    """Rank 0 alone keeps what its pass makes."""
    update = run.optimizer(sgd(run.model.critic))
    for step in run.steps():
        keep: Any = {} if _rank() == 0 else None
        step.backward(
            lambda batch: {"loss": run.model.critic(batch[0])[:, 0], "outputs": {"seen": batch[0]}},
            run.model.critic,
            keep=keep,
        )
        update.step()


def anneals(run: Any) -> None:
    """Weigh the loss by what was evaluated last, and log that."""
    update = run.optimizer(sgd(run.model.generator))
    for step in run.steps():
        last = run.evaluated.get("eval_error", 1.0)
        step.backward(lambda batch, last=last: (run.model(batch[1]) - batch[0]).square().mean(1) * last, run.model)
        update.step()
        step.log(last=last, named=len(run.evaluated))


class RankError:
    """The mean error as a metric with a state, whose value differs by worker."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.total, self.count = 0.0, 0

    def update(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        """Take a shard in."""
        self.total, self.count = self.total + float(error(outputs, target).sum()), self.count + len(outputs)

    def merge_state(self, other: "RankError") -> None:
        """Take another one in."""
        self.total, self.count = self.total + other.total, self.count + other.count

    def compute(self) -> float:
        """Return the mean, which is another one on each worker."""
        return self.total / self.count * (1 + _rank())


def recurs_by_state(run: Any) -> None:
    """Take what a pass keeps into the next one; it comes back with a checkpoint."""
    _recurs(run, run.state("kept", {}))


def recurs_by_variable(run: Any) -> None:
    """The same in a variable, which does not."""
    _recurs(run, {})


def _recurs(run: Any, kept: dict[str, Any]) -> None:
    update = run.optimizer(sgd(run.model.generator))

    def loss(batch: Any) -> dict[str, Any]:
        real, noise, before = batch
        made = run.model(noise + before)
        return {"loss": (made - real).square().mean(1), "outputs": {"before": made.sum(1, keepdim=True).sin()}}

    for step in run.steps():
        real, noise = step.gather(lambda batch: batch)
        before = kept.get("before", torch.zeros(step.rows, 1))[: step.rows]
        before = torch.cat([before, torch.zeros(step.rows - len(before), 1)])  # after a short batch
        step.backward(loss, run.model.generator, batch=(real, noise, before), keep=kept)
        update.step()
