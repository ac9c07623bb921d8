"""Models that compute gradients in their forward, as forces are, against plain torch in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.outputs.files import outputs_sha256
from dp_ray.storage import Storage
from tests.support.alone import predict_parts
from tests.support.group import run_group
from tests.support.merging import merged

HERE = "tests.engine.forward.test_forces"
ROWS = 11


class Positions(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(3.0) / 3 + index / ROWS


class Labelled(Positions):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), torch.zeros(3)


class Forces(nn.Module):
    """Energies, and their gradients by the positions and by a weight; it writes its inputs and a buffer."""

    enables = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        positions.add_(1)
        self.calls += 1
        with torch.set_grad_enabled(self.enables or torch.is_grad_enabled()):
            positions.requires_grad_()
            energies = self.layers(positions).squeeze(1) * self.calls
            weight: Any = self.layers[0].weight
            found = torch.autograd.grad(energies.sum(), [positions, weight])
        steepness = found[1].float().norm().expand(len(positions))
        return {"energy": energies, "force": -found[0], "steepness": steepness, "noise": torch.rand(len(positions))}


class Bare(Forces):
    enables = False


def keys(**more: Any) -> dict[str, Any]:
    return {"model": f"{HERE}:Forces", "dataset": f"{HERE}:Positions", "batch_size": 4, "shards": 2, **more}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_forces_are_those_of_plain_torch_on_any_number_of_workers(tmp_path: Path, precision: str) -> None:
    hashes = set()
    for workers in (1, 2):
        job = Job.make(keys(workers=workers, precision=precision), "job")
        predict_parts(job, tmp_path / str(workers))
        read = merged(job, tmp_path / str(workers), ROWS).read()
        hashes.add(outputs_sha256(Storage(str(tmp_path / str(workers)))))
    assert len(hashes) == 1
    torch.manual_seed(0)
    model, data = Forces(), Positions()
    shards = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    for rows in shards:
        model.calls.zero_()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            expected = model(torch.stack([data[row] for row in rows]))
        for name in ("energy", "force", "steepness"):
            assert torch.equal(read[name][rows], expected[name].detach()), name


def test_the_trial_leaves_the_random_numbers_and_shapes_as_they_are(tmp_path: Path) -> None:
    given: Any = {"workers": 0, "storage": str(tmp_path), "quiet": True, "flops": True}
    result = dp_ray.run(**keys(), name="forces", **given)
    plain = dp_ray.run(**keys(model=f"{HERE}:Noise"), name="noise", **given)
    assert torch.equal(result.outputs["noise"], plain.outputs)
    assert [shape.input_size for shape in result.shapes] == [shape.input_size for shape in plain.shapes]


class Noise(Forces):
    def forward(self, positions: torch.Tensor) -> Any:
        return torch.rand(len(positions))


@pytest.mark.parametrize("more", [{}, {"task": "evaluate", "dataset": f"{HERE}:Labelled", "loss": f"{HERE}:squares"}])
def test_a_model_that_never_turns_gradients_on_is_told_to(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(
        ModelError, match=r"step 0, shard 0: model raised RuntimeError: .* `with torch.enable_grad\(\):`"
    ):
        dp_ray.run(**keys(model=f"{HERE}:Bare", **more), workers=0, storage=str(tmp_path), quiet=True)


def squares(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = (outputs["force"] - target).square().mean(1)
    return losses


def test_forces_are_evaluated(tmp_path: Path) -> None:
    more = {"task": "evaluate", "dataset": f"{HERE}:Labelled", "loss": f"{HERE}:squares"}
    result = dp_ray.run(**keys(**more), workers=0, storage=str(tmp_path), quiet=True)
    assert result.metrics["loss"] > 0


class Jacobians(nn.Module):
    """By torch's functions, which turn gradients on; it keeps a tensor that its first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale: torch.Tensor | None = None

    def forward(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.scale is None:
            self.scale = torch.arange(1.0, 3.0)
        jacobian: Any = torch.autograd.functional.jacobian
        by_row = jacobian(lambda one: self.layer(one).tanh().sum(0) * self.scale, positions)
        forward = torch.func.jvp(lambda one: self.layer(one).tanh(), (positions,), (torch.ones_like(positions),))[1]
        return {"jacobian": by_row.transpose(0, 1), "forward": forward}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch.func
def test_jacobians_are_those_of_plain_torch(tmp_path: Path) -> None:
    result = dp_ray.run(**keys(model=f"{HERE}:Jacobians"), workers=0, storage=str(tmp_path), quiet=True)
    torch.manual_seed(0)
    expected = Jacobians()(torch.stack([Positions()[row] for row in range(ROWS)]))
    assert expected["jacobian"].abs().min() > 0
    for name, value in expected.items():
        torch.testing.assert_close(result.outputs[name], value.detach())


@pytest.mark.slow
def test_forces_of_a_sharded_model(tmp_path: Path) -> None:
    """The last batch has rows for one worker alone; the other runs a dummy."""
    wanted = {}
    for strategy in ("ddp", "fsdp"):
        job = Job.make(keys(workers=2, strategy=strategy, model=f"{HERE}:OfPositions"), "job")
        run_group(job, tmp_path / strategy)
        wanted[strategy] = merged(job, tmp_path / strategy, ROWS).read()
    assert torch.equal(wanted["ddp"], wanted["fsdp"])


class OfPositions(Forces):
    def forward(self, positions: torch.Tensor) -> Any:
        with torch.enable_grad():
            energies = self.layers(positions.requires_grad_())
            return torch.autograd.grad(energies.sum(), positions)[0]
