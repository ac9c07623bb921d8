"""Hooks on the gradients of parameters: once for each batch, on its mean gradient, as in plain torch."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dp_ray.engine.trainer import Trainer
from dp_ray.engine.world import World
from dp_ray.errors import ModelError
from dp_ray.job.plan import split_of
from tests.gpu.support import run_here
from tests.support.builders import step_of, steps_of, trainer_of
from tests.support.group import ProcessExit, history_of, run_group, weights_of
from tests.support.training import Pairs, plain_loop
from tests.support.trainings import assert_close, initial, job_of

HERE = "tests.engine.sums.test_gradient_hooks"
SHARDS_AND_WORKERS = [(1, 1), (3, 1), (3, 2), (6, 3)]


class Hooked(nn.Module):
    """Hooks that no sum of shards' gradients goes through unseen, and of which the order counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(2, 2)
        self.body.weight.register_post_accumulate_grad_hook(shrink)  # type: ignore[no-untyped-call]
        self.body.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
        self.body.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        self.body.bias.register_hook(mask)  # type: ignore[no-untyped-call]
        self.head.weight.register_post_accumulate_grad_hook(add_to)  # type: ignore[no-untyped-call]
        self.unused.weight.register_hook(never)  # type: ignore[no-untyped-call]
        self.unused.bias.register_post_accumulate_grad_hook(never)  # type: ignore[no-untyped-call]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        outputs: torch.Tensor = self.head(torch.tanh(self.body(inputs)))
        return outputs


def shrink(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad / (1 + parameter.grad.norm())


def mask(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (gradient.abs() > 0.01)


def add_to(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad += 0.01


def never(_: torch.Tensor) -> None:
    raise AssertionError("a hook of a parameter without a gradient was called")


class Sparse(nn.Module):
    """An embedding whose sparse gradient a hook clamps."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)
        self.words.weight.register_hook(clamped)  # type: ignore[no-untyped-call]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        outputs: torch.Tensor = self.head(self.words((inputs.abs() * 2).long().clamp(max=4)).sum(1))
        return outputs


def clamped(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.coalesce()
    indices, values = gradient.indices(), gradient.values().clamp(-0.02, 0.02)
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False)


def weighing(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss that counts rows of class 1 twice."""
    weights = 1.0 + (targets == 1)
    return (functional.cross_entropy(outputs, targets, reduction="none") * weights).sum(), weights.sum()


def weighing_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    total, weight = weighing(outputs, targets)
    return total / weight


def plain_mean(model: nn.Module, chunks: Any) -> torch.Tensor:
    inputs, targets = (torch.cat(column) for column in zip(*chunks, strict=True))
    return weighing_mean(model(inputs), targets)


def hooked_job(model: str = "Hooked", **keys: Any) -> Any:
    given = {
        "loss": f"{HERE}:weighing",
        "batch_size": 13,
        "epochs": 1,
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
    }
    return job_of({"target": f"{HERE}:{model}"}, **{**given, **keys})


def trained_plainly(model: Callable[[], nn.Module], clip: float | None = None) -> tuple[nn.Module, list[float]]:
    """The oracle: the model after a training in one process of plain torch, and its losses."""
    made = initial(model)
    optimizer = torch.optim.SGD(made.parameters(), 0.1)

    def after_backward() -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(made.parameters(), clip)

    losses = plain_loop(made, Pairs(), 13, 1, plain_mean, optimizer, after_backward=after_backward)
    return made, losses


OVER_BATCH = {"loss": {"target": f"{HERE}:weighing_mean", "over": "batch"}}
KEYS: list[dict[str, Any]] = [{}, {"bitwise": True, "grad_clip": 0.05}, {**OVER_BATCH, "bitwise": True}]


@pytest.mark.full(but=["bitwise, clipped"])
@pytest.mark.parametrize("keys", KEYS, ids=["sums", "bitwise, clipped", "over the batch"])
def test_they_see_the_mean_gradient_of_the_batch_once(tmp_path: Path, keys: dict[str, Any]) -> None:
    expected = trained_plainly(Hooked, keys.get("grad_clip"))
    for shards, workers in SHARDS_AND_WORKERS:
        folder = tmp_path / f"{shards} {workers}"
        run_group(hooked_job(shards=shards, workers=workers, **keys), folder)
        assert_close(folder, *expected, tolerance=2e-5)
    if keys:
        alone, together = (weights_of(tmp_path / name) for name in ("3 1", "3 2"))
        assert all(torch.equal(value, together[name]) for name, value in alone.items())
        assert history_of(tmp_path / "3 1") == history_of(tmp_path / "3 2")


def test_a_sparse_gradient_stays_sparse(tmp_path: Path) -> None:
    expected = trained_plainly(Sparse)
    for shards, workers in [(3, 1), (3, 2)]:
        folder = tmp_path / str(workers)
        run_group(hooked_job("Sparse", shards=shards, workers=workers), folder)
        assert_close(folder, *expected, tolerance=2e-5)


class Noting(Hooked):
    """Notes the calls of its hooks, and sets one in its first forward."""

    calls: list[Any] = []  # noqa: RUF012  of the run in this process

    def __init__(self) -> None:
        super().__init__()
        self.is_hooked = False
        for name in ("head.bias", "body.bias", "head.weight", "body.weight"):
            one = self.get_parameter(name)
            one.register_hook(lambda gradient, name=name: self.calls.append((name, gradient.norm().item())))  # type: ignore[no-untyped-call]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        if not self.is_hooked and inputs.requires_grad is False:
            self.is_hooked = True
            self.body.weight.register_hook(lambda _: self.calls.append("late"))  # type: ignore[no-untyped-call]
        return super().forward(inputs)


def test_their_order_is_that_of_their_registration_and_later_ones_are_seen(tmp_path: Path) -> None:
    Noting.calls.clear()
    run_here(hooked_job("Noting", shards=3, max_steps=2), tmp_path)
    names = [call if call == "late" else call[0] for call in Noting.calls]
    assert names == ["head.bias", "body.bias", "head.weight", "body.weight", "late"] * 2


class Plain(nn.Module):
    """A layer; its hook notes the square of the gradient's norm."""

    squares: list[float] = []  # noqa: RUF012  of the run in this process

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        for parameter in self.layer.parameters():
            parameter.register_hook(lambda gradient: self.squares.append(gradient.double().square().sum().item()))  # type: ignore[no-untyped-call]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def test_they_see_gradients_without_the_scale_of_fp16_and_before_they_are_clipped(tmp_path: Path) -> None:
    Plain.squares.clear()
    run_here(hooked_job("Plain", shards=3, precision="fp16", grad_clip=0.01, max_steps=4), tmp_path)
    seen = [(weight + bias) ** 0.5 for weight, bias in zip(Plain.squares[::2], Plain.squares[1::2], strict=True)]
    assert seen == pytest.approx([row["gradient_norm"] for row in history_of(tmp_path)], rel=1e-5)


def test_one_that_the_optimizer_does_not_hold_has_no_hook_called(tmp_path: Path) -> None:
    """The optimizer has the weight alone."""
    Plain.squares.clear()
    job = hooked_job("Plain", shards=3, precision="fp16", max_steps=2, optimizer=f"{HERE}:of_weights")
    run_here(job, tmp_path)
    assert len(Plain.squares) == 2
    assert max(Plain.squares) < 10, "scaled"
    model = Plain()
    with training_of(model, optimizer=f"{HERE}:of_weights") as (trainer, step):
        step()
        model.layer.weight.grad, model.layer.bias.grad = torch.ones(3, 6), torch.ones(3)
        trainer.optimizer_step.apply(26, 13, 1)
    assert Plain.squares[-2:][1:] == [18 / 4], "weighed"


def of_weights(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for parameter in parameters if parameter.ndim > 1], 0.1)


@contextmanager
def training_of(model: nn.Module, **keys: Any) -> Iterator[tuple[Trainer, Callable[[], None]]]:
    """A trainer of the model, and a function that runs its next step."""
    job = hooked_job(shards=3, **keys)
    split = split_of(job, len(Pairs()))
    steps = steps_of(job, Pairs())
    trainer = trainer_of(job, World(), split, model)
    with closing(steps), closing(trainer):
        yield trainer, lambda: step_of(trainer, steps) and None


def test_a_hook_can_be_removed_and_set_between_steps_and_is_the_users_own_after_the_run() -> None:
    model, calls = nn.Linear(6, 3), list[str]()
    first = model.weight.register_hook(lambda _: calls.append("first"))  # type: ignore[no-untyped-call]
    model.bias.register_hook(kept := lambda _: calls.append("second"))  # type: ignore[no-untyped-call]
    with training_of(model) as (_, step):
        step()
        first.remove()
        step()
        third = model.weight.register_post_accumulate_grad_hook(lambda _: calls.append("third"))  # type: ignore[no-untyped-call]
        step()
        third.remove()
        step()
    assert calls == ["first", "second", "second", "second", "third", "second"]
    assert list(model.bias._backward_hooks.values()) == [kept]  # type: ignore[union-attr]
    model(torch.ones(1, 6)).sum().backward()
    assert calls[-1] == "second"
    assert len(calls) == 7


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (torch.ones(2), r"step 0: the hook of the gradient of weight .*\[2\]"),
        (1.0, r"step 0: the hook of the gradient of weight .* float"),
        (None, r"step 0: the hook of the gradient of weight raised ZeroDivisionError"),
    ],
)
def test_an_error_names_the_parameter(result: Any, error: str) -> None:
    model = nn.Linear(6, 3)
    model.weight.register_hook(lambda _: 1 // 0 if result is None else result)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=error), training_of(model) as (_, step):
        step()


class Noisy(Plain):
    """Its hook draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))  # type: ignore[no-untyped-call]


def test_what_a_hook_draws_is_the_same_on_all_workers(tmp_path: Path) -> None:
    for workers in (1, 2):
        run_group(hooked_job("Noisy", shards=2, workers=workers, bitwise=True), tmp_path / str(workers))
    assert history_of(tmp_path / "1") == history_of(tmp_path / "2")


class OnOneWorker(Plain):
    """Sets a hook where it sees a batch that not all workers have."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        if len(inputs) < 7 and not hasattr(self, "handle"):
            self.handle = self.layer.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        return super().forward(inputs)


def test_hooks_that_not_all_workers_have_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessExit, match=r"layer\.weight has other hooks on some workers than on rank 0: set them"):
        run_group(hooked_job("OnOneWorker", shards=2, workers=2), tmp_path)
