"""Loops as users write them from docs/loops.md: diffusion, DQN, MAML; and a plain run of these loops."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import one_hot, smooth_l1_loss
from torch.utils.data import Dataset

import dp_ray
from dp_ray.plan.order import derive_seed
from tests.support.drawn_loops import PlainRun, PlainStep

ROWS, BATCH, SHARDS = 23, 10, 3  # the last batch is short, and its shards uneven


class Spiral(Dataset[torch.Tensor]):
    """Points of which a diffusion learns the distribution, each float32 [2]."""

    def __init__(self) -> None:
        turn = torch.linspace(0, 6, ROWS)
        self.points = torch.stack([turn.cos(), turn.sin()], 1) * turn[:, None] / 3

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index]


class Denoiser(nn.Module):
    """Predicts the noise in points [rows, 2] at times [rows] in 0 .. 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 2))

    def forward(self, points: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return the noise, [rows, 2]."""
        noise: torch.Tensor = self.layers(torch.cat([points, times[:, None]], 1))
        return noise


def diffusion(run: dp_ray.Loop) -> None:
    """Train a noise prediction; the job's `ema` keeps the weights with which one samples."""
    optimizer = torch.optim.AdamW(run.model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.num_steps)
    update = run.optimizer(optimizer, scheduler)

    def loss(points: torch.Tensor) -> torch.Tensor:
        times = torch.rand(len(points), device=run.device)
        noise = torch.randn_like(points)
        share = (times * torch.pi / 2).cos()[:, None]
        noisy = share * points + (1 - share.square()).sqrt() * noise
        squares: torch.Tensor = (run.model(noisy, times) - noise).square()
        return squares.mean(1)

    for step in run.steps():
        error = step.backward(loss, run.model)
        update.step(clip=1.0)
        step.log(error=error, rate=update.rate)


PLACES, CAPACITY = 6, 64  # of the world, and of the buffer


class Agent(nn.Module):
    """The values of both moves at each place; and the same, of some steps ago."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(PLACES, 16), nn.Tanh(), nn.Linear(16, 2))
        self.target = copy.deepcopy(self.online)


def rounds() -> range:
    """Return the rounds of an epoch: rows without data, which the loop makes itself."""
    return range(ROWS)


def dqn(run: dp_ray.Loop) -> None:
    """Learn to walk to the right end of a line; each row of a batch is a walker that makes one move."""
    online, target = run.model.online, run.model.target
    update = run.optimizer(torch.optim.Adam(online.parameters(), 5e-3))
    buffer = run.state(
        "buffer",
        {
            "place": torch.zeros(CAPACITY, dtype=torch.long, device=run.device),
            "move": torch.zeros(CAPACITY, dtype=torch.long, device=run.device),
            "reached": torch.zeros(CAPACITY, dtype=torch.long, device=run.device),
            "won": torch.zeros(CAPACITY, device=run.device),
        },
    )
    counts = run.state("counts", {"played": 0})

    def seen(places: torch.Tensor) -> torch.Tensor:
        return one_hot(places, PLACES).float()

    def play(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        place = torch.randint(0, PLACES - 1, (len(rows),), device=run.device)
        best = online(seen(place)).argmax(1)
        move = torch.where(torch.rand(len(rows), device=run.device) < 0.3, torch.randint_like(best, 2), best)
        reached = (place + 2 * move - 1).clamp(0)
        return {"place": place, "move": move, "reached": reached, "won": (reached == PLACES - 1).float()}

    def loss(drawn: dict[str, torch.Tensor]) -> torch.Tensor:
        value = online(seen(drawn["place"])).gather(1, drawn["move"][:, None])[:, 0]
        later = target(seen(drawn["reached"])).max(1).values
        return smooth_l1_loss(value, drawn["won"] + 0.9 * (1 - drawn["won"]) * later, reduction="none")

    for step in run.steps():
        played = step.gather(play)
        slots = (counts["played"] + torch.arange(step.rows, device=run.device)) % CAPACITY
        for name, kept in buffer.items():
            kept[slots] = played[name]
        counts["played"] += step.rows
        for _ in range(2):
            drawn = torch.randint(0, min(counts["played"], CAPACITY), (17,), device=run.device)
            step.backward(loss, online, batch={name: kept[drawn] for name, kept in buffer.items()})
            update.step(clip=1.0)
        if step.number % 3 == 2:
            target.load_state_dict(online.state_dict())
        step.log(won=played["won"].mean(), played=counts["played"])


class Waves(Dataset[Any]):
    """Each row is a task: a wave, with points to adapt to and others to measure by, (x [5, 1], y [5, 1]) twice."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        draws = torch.Generator().manual_seed(index)
        height, shift = torch.rand(2, generator=draws)
        x = torch.rand(10, 1, generator=draws) * 4 - 2
        y = (height + 0.5) * (x + 3 * shift).sin()
        return (x[:5], y[:5]), (x[5:], y[5:])


class Wave(nn.Sequential):
    """x [points, 1] to y [points, 1]."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


INNER_RATE = 0.1


def maml(run: dp_ray.Loop) -> None:
    """Train weights from which one step of SGD fits a task; the second derivative is taken in the function."""
    model = run.model
    update = run.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.5))

    def after_a_step(near: Any, far: Any) -> torch.Tensor:
        weights = dict(model.named_parameters())
        x, y = near
        error = (torch.func.functional_call(model, weights, (x,)) - y).square().mean()
        slopes = torch.autograd.grad(error, list(weights.values()), create_graph=True)
        adapted = {name: one - INNER_RATE * slope for (name, one), slope in zip(weights.items(), slopes, strict=True)}
        x, y = far
        found: torch.Tensor = (torch.func.functional_call(model, adapted, (x,)) - y).square().mean()
        return found

    def loss(batch: Any) -> torch.Tensor:
        (x, y), (far_x, far_y) = batch
        tasks = zip(x, y, far_x, far_y, strict=True)
        return torch.stack([after_a_step((x, y), far) for x, y, *far in tasks])

    for step in run.steps():
        step.log(error=step.backward(loss, model))
        update.step(clip=1.0)


def maml_by_hand(epochs: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train the same on whole batches, by torch.func: its gradients of gradients, mapped over the tasks."""
    torch.manual_seed(0)
    model, data = Wave(), Waves()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)

    def error(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (torch.func.functional_call(model, weights, (x,)) - y).square().mean()
        return found

    def adapted(weights: Any, near: Any, far: Any) -> torch.Tensor:
        slopes = torch.func.grad(error)(weights, *near)
        return error({name: one - INNER_RATE * slopes[name] for name, one in weights.items()}, *far)

    def mean(weights: Any, near: Any, far: Any) -> torch.Tensor:
        return torch.func.vmap(adapted, in_dims=(None, 0, 0))(weights, near, far).mean()

    history = []
    for _ in range(epochs):
        for start in range(0, ROWS, BATCH):
            near, far = torch.utils.data.default_collate([data[at] for at in range(start, min(ROWS, start + BATCH))])
            weights = {name: one.detach() for name, one in model.named_parameters()}
            slopes, loss = torch.func.grad_and_value(mean)(weights, near, far)
            history.append(loss.item())
            for name, one in model.named_parameters():
                one.grad = slopes[name]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return dict(model.state_dict()), history


class DrawingRun(PlainRun):
    """A plain run of a loop on whole batches, of which each shard draws its own random numbers."""

    def __init__(self, model: nn.Module, given: Any, steps_of_epoch: int) -> None:
        super().__init__(model, given)
        self._steps_of_epoch = steps_of_epoch

    def optimizer(self, optimizer: Any, scheduler: Any = None) -> Any:
        """Return the update of an optimizer, with its rate."""
        update = super().optimizer(optimizer, scheduler)
        type(update).rate = property(lambda update: update._optimizer.param_groups[0]["lr"])
        return update

    def steps(self) -> Iterator[Any]:
        """Yield the steps."""
        for number, batch in enumerate(self._given):
            yield DrawingStep(self, number, batch, number // self._steps_of_epoch)


class DrawingStep(PlainStep):
    """A step on a whole batch, whose functions are called on each shard after its seed."""

    def __init__(self, run: PlainRun, number: int, batch: Any, epoch: int) -> None:
        super().__init__(run, number, (batch,))
        self._batch, self._key, self._passes = batch, (epoch, number), 0
        torch.manual_seed(derive_seed(0, "update", *self._key, 0))

    def _of_shards(self, function: Any, batch: Any) -> Any:
        """Call a function on each shard, and give the whole batch's outputs."""
        more = (self._passes,) if self._passes else ()
        outputs = []
        for shard, part in enumerate(_cut(batch)):
            torch.manual_seed(derive_seed(0, "forward", *self._key, shard, *more))
            outputs.append(function(part))
        self._passes += 1
        passes = () if self._passes == 1 else (self._passes,)  # after the first one as in a declared training
        torch.manual_seed(derive_seed(0, "update", *self._key, *passes))
        return _joined(outputs)

    def gather(self, function: Any, batch: Any = None) -> Any:
        """Call the function on the shards, without gradients."""
        return super().gather(lambda batch: self._of_shards(function, batch), batch)

    def backward(self, loss: Any, of: Any, over: Any = None, batch: Any = None, keep: Any = None) -> torch.Tensor:
        """Take the mean loss's gradient in some parts."""
        return super().backward(lambda batch: self._of_shards(loss, batch), of, over, batch, keep)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(parts)


def _cut(batch: Any) -> list[Any]:
    if not isinstance(batch, dict):
        return list(batch.chunk(SHARDS))
    parts = zip(*(tensor.chunk(SHARDS) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def plainly(
    loop: Callable[[Any], None], kind: type[nn.Module], data: torch.Tensor, epochs: int, batch_size: int = BATCH
) -> tuple[nn.Module, list[dict[str, float]]]:
    """Run a loop in plain torch on batches of the data; return the model and what it has logged."""
    torch.manual_seed(0)
    model = kind()
    batches = data.split(batch_size)  # type: ignore[no-untyped-call]
    run: Any = DrawingRun(model, [batch for _ in range(epochs) for batch in batches], len(batches))
    loop(run)
    return model, run.logged
