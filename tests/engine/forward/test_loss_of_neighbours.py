"""A loss of which one row depends on the others is told once, and no other loss is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dp_ray.engine.forward.step import build_loss, total_of
from dp_ray.trials.measures import of_neighbours
from tests.support.group import run_group, weights_of
from tests.support.trainings import job_of

ROWS = 12
Pair = tuple[torch.Tensor, torch.Tensor]


def contrastive(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each row against all rows of its shard."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")


def contrastive_sum(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return contrastive(outputs, target).sum(), len(outputs)


def centred(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - outputs.mean(0)).square()


def mean_with_weight_one(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return functional.cross_entropy(outputs, target), 1


def own(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, target, reduction="none")


def own_flat(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The elements of all rows in turn, the rows changing fastest."""
    return (outputs.T - 1).abs().reshape(-1)


def weighted(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.tensor([1.0, 0.0, 3.0])[target]
    return (own(outputs, target) * weight).sum(), weight.sum()


def signed(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - outputs.detach()).sum(1) + torch.where(target > 0, 1.0, -1.0) * 1e4


def noisy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return own(outputs, target) + torch.rand(len(target))


class Counting(nn.Module):
    """A loss that keeps a state."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.times: list[int] = []

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.times.append(len(target))
        return own(outputs, target) * self.calls


def of_dict(outputs: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return own(outputs["logits"], target)


def in_place(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs.mul_(2).sum(1)


def pairs_only(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    assert len(outputs) % 2 == 0
    return own(outputs, target)


def drawn() -> Pair:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 3, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def found(loss: Any, seen: Any) -> Any:
    compare = build_loss(loss, torch.device("cpu"))
    return of_neighbours(compare, compare(*seen), seen, ROWS, 0, True)


@pytest.mark.parametrize("loss", [contrastive, contrastive_sum, centred, mean_with_weight_one])
def test_a_loss_of_neighbours_is_found(loss: Callable[..., Any]) -> None:
    seen = drawn()
    apart = found(loss, seen)
    first, others = (loss(*(one[piece] for one in seen)) for piece in (slice(0, 1), slice(1, ROWS)))
    sums = [float(one[0] if isinstance(one, tuple) else one.sum()) for one in (first, others, loss(*seen))]
    assert list(apart) == pytest.approx(sums)


@pytest.mark.parametrize(
    "loss", [own, own_flat, weighted, signed, noisy, Counting(), pairs_only, nn.CrossEntropyLoss()]
)
def test_no_other_loss_is(loss: Any) -> None:
    assert found(loss, drawn()) is None


def test_outputs_in_a_dict_and_ones_without_rows_raise_no_alarm() -> None:
    logits, target = drawn()
    assert found(of_dict, ({"logits": logits}, target)) is None
    assert found(of_dict, ({"logits": logits, "balance": torch.tensor(0.1)}, target)) is None
    assert found(of_dict, ({"logits": logits, "layers": torch.zeros(2, ROWS, 3)}, target)) is None


def test_a_look_changes_nothing() -> None:
    loss, seen = Counting(), drawn()
    value = loss(*seen)
    state = torch.get_rng_state()
    of_neighbours(loss, value, seen, ROWS, 0, True)
    of_neighbours(noisy, own(*seen), seen, ROWS, 0, True)
    assert torch.equal(torch.get_rng_state(), state)
    assert (int(loss.calls), loss.times) == (1, [ROWS])
    outputs = seen[0].clone()
    of_neighbours(in_place, total_of(outputs), (outputs, seen[1]), ROWS, 0, True)
    assert torch.equal(outputs, seen[0])


def lines(loss: str, folder: Path, **keys: Any) -> list[str]:
    job = job_of("mlp", loss=f"tests.engine.forward.test_loss_of_neighbours:{loss}", epochs=1, **keys)
    told = [getattr(message, "text", "") for message in run_group(job, folder)]
    return [one for one in told if one.startswith("loss:")]


@pytest.mark.slow
def test_a_training_tells_it_once_before_its_second_step(tmp_path: Path) -> None:
    (said,) = lines("contrastive", tmp_path / "two", workers=2, shards=2)
    assert "sums up to" in said and "each of the 2 shards has its own" in said and "over: batch" in said
    assert lines("contrastive", tmp_path / "two", workers=1, shards=2) == [], "a training that goes on"
    assert lines("contrastive", tmp_path / "one", workers=1, shards=1) == []
    assert lines("own", tmp_path / "own", workers=1, shards=2) == []
    assert lines("own", tmp_path / "half", workers=1, shards=2, precision="bf16") == []


def noisy_first(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return own(outputs, target) * torch.rand(len(target)) + contrastive(outputs, target)


def noisy_step(model: nn.Module, batch: Pair) -> torch.Tensor:
    return noisy_first(model(batch[0]), batch[1])


@pytest.mark.slow
def test_a_training_that_is_looked_at_has_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    """A step of the user's is not called again."""
    keys: dict[str, Any] = {"workers": 1, "shards": 2, "epochs": 1, "bitwise": True}
    run_group(
        job_of("mlp", loss="tests.engine.forward.test_loss_of_neighbours:noisy_first", **keys), tmp_path / "loss"
    )
    run_group(
        job_of("mlp", loss=None, step="tests.engine.forward.test_loss_of_neighbours:noisy_step", **keys),
        tmp_path / "step",
    )
    ours, plain = weights_of(tmp_path / "loss"), weights_of(tmp_path / "step")
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
