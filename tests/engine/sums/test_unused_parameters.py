"""Parameters that only some steps use, and those that freeze or thaw: one plain process is the oracle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import dp_ray
from dp_ray.job.job import Job
from dp_ray.messages import Note
from tests.support.group import ProcessExit, run_group, weights_of
from tests.support.training import plain_loop
from tests.support.trainings import assert_close, initial, job_of, mean_loss

# The expert of each row, in batches of 6: all experts in the first one; then some, in the last shard alone, in the
# first one alone, and in batches of fewer rows than there are workers.
BATCHES = [[0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1], [2, 2, 0, 0, 0, 0], [3, 3, 3, 1, 1, 1], [0, 1, 2, 3, 0, 1], [2]]
ROUTES = [route for batch in BATCHES for route in batch]
SHARDED: dict[str, Any] = {"strategy": "fsdp", "fsdp": {"blocks": ["Mixture"]}}
HERE = "tests.engine.sums.test_unused_parameters"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}


class Routed(Dataset[Any]):
    """Rows of 6 numbers, of which the first is the row's expert, and a class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(len(ROUTES), 6, generator=generator)
        self.inputs[:, 0] = torch.tensor(ROUTES)
        self.targets = torch.randint(3, (len(ROUTES),), generator=generator)

    def __len__(self) -> int:
        return len(ROUTES)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


class NoGradient(torch.autograd.Function):
    """The inputs; the weight gets None for a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the inputs."""
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the inputs."""
        return gradients[0], None


class Mixture(nn.Module):
    """Four experts, of which each row runs its own; `reentrant` recomputes them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.experts, self.reentrant = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), reentrant

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(hidden)
        for number in routes.unique().tolist():  # type: ignore[no-untyped-call]
            rows, expert = routes == number, self.experts[number]
            of_rows = checkpoint(expert, hidden[rows], use_reentrant=True) if self.reentrant else expert(hidden[rows])
            made[rows] = torch.tanh(of_rows)
        return made


class Experts(nn.Module):
    """Rows to 3 classes, each by way of its expert. One layer is never used, and a weight's gradient is None."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.never, self.body, self.head = nn.Linear(2, 2), nn.Linear(6, 4), nn.Linear(4, 3)
        self.mixture, self.without = Mixture(reentrant), nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = NoGradient.apply(torch.tanh(self.body(inputs)), self.without)  # type: ignore[no-untyped-call]
        outputs: torch.Tensor = self.head(self.mixture(hidden, inputs[:, 0].long()))
        return outputs


def experts_job(reentrant: bool = False, optimizer: str = "SGD", **keys: Any) -> Any:
    common = {"shuffle": False, "batch_size": 6, "shards": 3, "epochs": 3}
    given = {"optimizer": {"target": f"torch.optim:{optimizer}", "args": OPTIMIZERS[optimizer]}}
    model = {"target": f"{HERE}:Experts", "args": {"reentrant": reentrant}}
    return job_of(model, {"target": f"{HERE}:Routed"}, **{**common, **given, **keys})


def notes(messages: list[Any]) -> list[str]:
    return [message.text for message in messages if isinstance(message, Note) and "no shard used" in message.text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "reentrant", "keys"),
    [
        ("SGD", False, {}),
        ("SGD", False, {"bitwise": True}),
        ("AdamW", False, {"find_unused_parameters": True}),
        ("AdamW", True, {"bitwise": True}),
        ("SGD", True, {"shards": 6}),  # several of a worker
        ("SGD", False, {"shards": 6, "bitwise": True}),
        ("AdamW", False, SHARDED),
        ("SGD", False, {**SHARDED, "bitwise": True}),
    ],
)
def test_experts_that_only_some_steps_use_train_as_in_one_process(
    tmp_path: Path, optimizer: str, reentrant: bool, keys: dict[str, Any]
) -> None:
    """Without a gradient, an expert has no decay and no momentum in the step; with one shard's, it has that."""
    model = initial(Experts)
    plain = getattr(torch.optim, optimizer)(model.parameters(), **OPTIMIZERS[optimizer])
    losses = plain_loop(model, Routed(), 6, 3, mean_loss, plain, order_of=lambda _: range(len(ROUTES)))
    told = {}
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        told[workers] = notes(run_group(experts_job(reentrant, optimizer, workers=workers, **keys), folder))
        assert_close(folder, model, losses, 3e-5)
    if keys.get("bitwise"):
        for workers in (2, 3):
            for name, tensor in weights_of(tmp_path / "1").items():
                assert torch.equal(weights_of(tmp_path / str(workers))[name], tensor), (workers, name)
    tells = "find_unused_parameters" not in keys and "strategy" not in keys
    for workers in (2, 3):
        assert [(text[:6], "experts.2.weight" in text, "never" in text) for text in told[workers]] == [
            ("step 0", False, True),
            ("step 1", True, False),
        ] * tells


class Freezing(nn.Module):
    """Two layers; `first` is frozen in some of the steps, by their number, which the rows have."""

    def __init__(self, frozen: list[int], thaws: bool = False) -> None:
        super().__init__()
        self.first, self.head, self.frozen = nn.Linear(6, 4), nn.Linear(4, 3), frozen
        self.first.requires_grad_(not thaws)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.first.requires_grad_(int(inputs[0, 0]) not in self.frozen)
        outputs: torch.Tensor = self.head(torch.tanh(self.first(inputs)))
        return outputs


class Numbered(Routed):
    """The same rows in batches of 6, with the number of the batch in the first column."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs[:, 0] = torch.arange(len(ROUTES)) // 6


def freezing_job(workers: int, frozen: Sequence[int] = (0, 1, 3), thaws: bool = False, **keys: Any) -> Any:
    model = {"target": f"{HERE}:Freezing", "args": {"frozen": list(frozen), "thaws": thaws}}
    common = {"shuffle": False, "batch_size": 6, "shards": 3, "optimizer": SGD}
    return job_of(model, {"target": f"{HERE}:Numbered"}, **{**common, "workers": workers, **keys})


SGD = {"target": "torch.optim:SGD", "args": OPTIMIZERS["SGD"]}


@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("frozen", [[0, 1, 3], [0, 1, 4]])
def test_a_layer_that_freezes_on_the_way_and_thaws_again_trains_as_in_one_process(
    tmp_path: Path, bitwise: bool, frozen: list[int]
) -> None:
    """After step 4 it thaws in a step of one row: the forward that lets it thaw runs on one worker alone."""
    model = initial(Freezing, frozen)
    plain = torch.optim.SGD(model.parameters(), **OPTIMIZERS["SGD"])
    losses = plain_loop(model, Numbered(), 6, 2, mean_loss, plain, order_of=lambda _: range(len(ROUTES)))
    for workers in (1, 2, 3):
        # It is frozen at some checkpoints, and where the FLOPs of the first shard are counted.
        keys: dict[str, Any] = {"bitwise": bitwise, "checkpoint": {"every_steps": 2}, "flops": bitwise}
        run_group(freezing_job(workers, frozen, **keys), tmp_path / str(workers))
        assert_close(tmp_path / str(workers), model, losses, 3e-6)


@pytest.mark.parametrize(
    ("workers", "keys", "says"),
    [
        (1, {"thaws": True}, r"step 2: first\.weight.*requires a gradient now"),
        (2, {"thaws": True}, r"step 2: first\.weight.*requires a gradient now"),
        (2, {"thaws": True, "strategy": "fsdp"}, r"step 2, shard .*requires_grad of first\.\S+ .*has changed"),
        (2, {"strategy": "fsdp"}, r"step 0, shard .*requires_grad of first\.\S+ .*has changed"),
    ],
)
def test_a_layer_that_nothing_would_train_once_it_thaws_is_named(
    tmp_path: Path, workers: int, keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(ProcessExit, match=says):
        run_group(freezing_job(workers, **keys), tmp_path)


def thawing(run: dp_ray.Loop) -> None:
    """A loop whose optimizer holds a layer that is frozen in some steps, the first ones too."""
    update = run.optimizer(torch.optim.SGD(run.model.parameters(), **OPTIMIZERS["SGD"]))

    def loss(batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(run.model(batch[0]), batch[1], reduction="none")

    for step in run.steps():
        run.model.first.requires_grad_(step.number % len(BATCHES) not in (0, 1, 3))
        step.backward(loss, run.model)
        update.step()


@pytest.mark.slow
def test_a_loop_whose_optimizer_holds_a_frozen_layer_trains_it_once_it_thaws(tmp_path: Path) -> None:
    model = initial(Freezing, [0, 1, 3])
    plain = torch.optim.SGD(model.parameters(), **OPTIMIZERS["SGD"])
    losses = plain_loop(model, Numbered(), 6, 2, mean_loss, plain, order_of=lambda _: range(len(ROUTES)))
    for workers in (1, 2, 3):
        given = freezing_job(workers, thaws=True, checkpoint={"every_steps": 1}).model_dump(exclude_unset=True)
        keys = {key: value for key, value in given.items() if key not in ("loss", "optimizer")}
        run_group(Job.make({**keys, "loop": {"target": f"{HERE}:thawing"}}, "job"), tmp_path / str(workers))
        assert_close(tmp_path / str(workers), model, losses, 3e-6)
