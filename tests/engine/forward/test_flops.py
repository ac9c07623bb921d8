"""The operations of a row against what paper says, and that counting them leaves no trace."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.engine.clock import Flops
from dp_ray.telemetry.utilization import PEAKS, peak_of, utilization
from tests.support.group import run_group, weights_of
from tests.support.training import Pairs
from tests.support.trainings import job_of

FORWARD = 2 * (6 * 16 + 16 * 3)  # of a row of Noisy: two operations for each weight
BACKWARD = 2 * FORWARD - 2 * 6 * 16  # for the weights and for the inputs, but those of the first layer


class Noisy(nn.Module):
    """Linear layers with dropout and BatchNorm: random numbers and buffers."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16)
        self.layers = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def ran(folder: Path, **keys: Any) -> dp_ray.Result:
    given = {
        "model": Noisy,
        "dataset": partial(Pairs, 100),
        "loss": nn.CrossEntropyLoss,
        "optimizer": torch.optim.SGD,
    }
    common = {"batch_size": 20, "shards": 4, "workers": 0, "quiet": True, "storage": str(folder), "inputs": "first"}
    return dp_ray.run(**{**given, **common, **keys}, name=f"run{len(list(folder.iterdir()))}")


@pytest.mark.parametrize("bitwise", [False, True])
def test_the_operations_of_a_training_are_counted_without_a_trace(tmp_path: Path, bitwise: bool) -> None:
    counted = ran(tmp_path, task="train", flops=True, bitwise=bitwise)
    plain = ran(tmp_path, task="train", bitwise=bitwise)
    assert counted.flops_per_row == FORWARD + BACKWARD
    assert (plain.flops_per_row, plain.mfu, counted.mfu) == (None, None, None), "nobody knows a CPU's peak"
    assert counted.weights_sha256 == plain.weights_sha256
    assert [row["loss"] for row in counted.history] == [row["loss"] for row in plain.history]
    assert dp_ray.load(counted.run_dir) == counted


@pytest.mark.slow
def test_counting_leaves_no_trace_on_several_workers(tmp_path: Path) -> None:
    def weights(name: str, **keys: Any) -> dict[str, torch.Tensor]:
        run_group(job_of("mlp", workers=2, shards=4, bitwise=True, epochs=1, **keys), tmp_path / name)
        return weights_of(tmp_path / name)

    counted, plain = weights("counted", flops=True), weights("plain")
    assert counted.keys() == plain.keys()
    assert all(torch.equal(counted[name], plain[name]) for name in plain)


def test_the_operations_of_a_prediction_are_those_of_its_forward(tmp_path: Path) -> None:
    counted, plain = ran(tmp_path, task="predict", flops=True), ran(tmp_path, task="predict")
    assert counted.flops_per_row == FORWARD
    assert counted.outputs_sha256 == plain.outputs_sha256


def test_the_share_of_a_known_peak() -> None:
    flops = Flops(1e9, "NVIDIA A100-SXM4-80GB", "bf16")
    assert utilization(flops, 156_000, 1) == 0.5
    assert utilization(flops, 156_000, 4) == 0.125
    assert utilization(flops._replace(arithmetic="tf32"), 156_000, 2) == 0.5
    assert utilization(flops._replace(device_name="NVIDIA A10G"), 1, 1) is None
    assert utilization(flops._replace(device_name="cpu", arithmetic="fp32"), 1, 1) is None


@pytest.mark.parametrize(
    ("name", "arithmetic", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A10", "fp16", 125e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "fp32", 30.3e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7e12),
    ],
)
def test_peaks_by_the_names_that_torch_gives(name: str, arithmetic: str, peak: float | None) -> None:
    assert peak_of(name, arithmetic) == peak


def test_no_name_hides_a_longer_one() -> None:
    names = [name for name, _ in PEAKS]
    assert all(not later.startswith(name) for at, name in enumerate(names) for later in names[at + 1 :])
