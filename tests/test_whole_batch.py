"""Losses and metrics over the whole batch, against plain torch on the whole batch in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.job.job import Job
from tests.support.group import history_of, run_group, weights_of

ROWS, BATCH = 46, 23
HERE = "tests.test_whole_batch"
CONTRASTIVE = {"target": f"{HERE}:contrastive", "over": "batch"}


class Views(torch.utils.data.Dataset[Any]):
    """Two views of each of 46 rows, and their number."""

    def __init__(self, dtype: str = "float64") -> None:
        made = torch.Generator().manual_seed(3)
        self.views = torch.randn(2, ROWS, 6, generator=made).to(getattr(torch, dtype))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return (self.views[0, index], self.views[1, index]), index


class Twins(nn.Module):
    """Two encoders and a learned temperature, which the model gives beside the embeddings, as CLIP does."""

    def __init__(self, dtype: str = "float64") -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(getattr(torch, dtype))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(getattr(torch, dtype))
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=getattr(torch, dtype)))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Any:
        return {
            "left": nn.functional.normalize(self.left(left), dim=1),
            "right": nn.functional.normalize(self.right(right), dim=1),
            "scale": self.scale.exp(),
        }


def contrastive(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    logits = outputs["scale"] * outputs["left"] @ outputs["right"].T
    labels = torch.arange(len(logits))
    return (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2


def drawing(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss that draws: the workers must draw the same."""
    kept = torch.rand(len(target)) < 0.8
    return contrastive({**outputs, "left": outputs["left"][kept], "right": outputs["right"][kept]}, target[kept])


class Dropping(Twins):
    """Twins with dropout."""

    def __init__(self) -> None:
        super().__init__("float32")
        self.left.append(nn.Dropout(0.3))


def loss_of(name: str) -> dict[str, str]:
    return {"target": f"{HERE}:{name}", "over": "batch"}


def job_of(**keys: Any) -> Job:
    args = {"dtype": keys.pop("dtype", "float64")}
    given = {
        "task": "train",
        "model": {"target": f"{HERE}:Twins", "args": args},
        "dataset": {"target": f"{HERE}:Views", "args": args},
        "call": "args",
        "loss": CONTRASTIVE,
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.5}},
        "batch_size": BATCH,
        "shards": 6,
        "epochs": 2,
        "max_steps": 3,
    }
    return Job.make({**given, **keys}, "job")


def plain(job: Job, loss: Any = contrastive, steps: int = 3) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and losses of plain torch, which sees each batch as a whole."""
    torch.manual_seed(job.seed)
    args = job.model.args
    model, data = Twins(**args), Views(**args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        rows = [row for row in range(ROWS) if row // BATCH == step % 2 and row not in (job.skip or ())]
        value = loss(model(data.views[0, rows], data.views[1, rows]), torch.tensor(rows))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return model.state_dict(), losses


def check(job: Job, folder: Path, tolerance: float, **keys: Any) -> None:
    weights, losses = plain(job, **keys)
    for name, one in weights_of(folder).items():
        assert torch.allclose(one, weights[name], rtol=tolerance, atol=tolerance), name
    assert [row["loss"] for row in history_of(folder)] == pytest.approx(losses, rel=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("keys", [{}, {"strategy": "fsdp"}, {"shards": 3}, {"shards": 3, "strategy": "fsdp"}])
@pytest.mark.slow
def test_it_is_plain_torch_on_the_whole_batch(
    tmp_path: Path, dtype: str, tolerance: float, keys: dict[str, Any]
) -> None:
    """With 3 shards on 3 workers each has one, whose graph is kept."""
    for workers in (1, 2, 3):
        job = job_of(dtype=dtype, workers=workers, **keys)
        run_group(job, tmp_path / str(workers))
        check(job, tmp_path / str(workers), tolerance)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.slow
def test_the_same_bits_on_any_number_of_workers(tmp_path: Path, strategy: str) -> None:
    """Also with dropout, and the loss's own random numbers; 6 shards on 6 workers keep their graphs."""
    for name, more in {"bare": {}, "draws": {"model": f"{HERE}:Dropping", "loss": loss_of("drawing")}}.items():
        found = []
        for workers in (1, 2, 3, 6):
            folder = tmp_path / name / str(workers)
            run_group(job_of(dtype="float32", workers=workers, bitwise=True, strategy=strategy, **more), folder)
            found.append((weights_of(folder), [row["loss"] for row in history_of(folder)]))
        for weights, losses in found[1:]:
            assert losses == found[0][1]
            for key, one in weights.items():
                assert torch.equal(one, found[0][0][key]), (name, key)
