"""What only several GPUs show: jobs on Ray, a worker for each. `make gpu` runs it where there are two or more.

DP_RAY_GPU_SUITE_MANY=4 runs what CPUs can show on so many workers without GPUs, with DP_RAY_GPU_SUITE_ON=cpu.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.world import own_rank
from tests.support.cluster import ROOT
from tests.support.training import Pairs

pytestmark = pytest.mark.ray

SKEW = 90.0
SECONDS = 600
SIZES = (1, 255, 4099, 2**16, 2**20 + 3, 2**24)  # NCCL sums few numbers by other protocols than many


@pytest.fixture
def many(device: torch.device) -> int:
    """How many workers there can be, each with a GPU of its own; at least two."""
    count = torch.cuda.device_count() if device.type == "cuda" else int(os.environ.get("DP_RAY_GPU_SUITE_MANY", 0))
    if count < 2:
        pytest.skip("it needs two GPUs")
    return count


def run(folder: Path, name: str, workers: int, *more: str, **settings: Any) -> dict[str, Any]:
    """The result of `dp-ray run jobs/digits.yaml` in a process of its own."""
    line = ["dp_ray", "run", "jobs/digits.yaml", f"--workers={workers}", f"--storage={folder}", f"--name={name}"]
    sets = [f"--set={key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", *line, "--json", *sets, *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_bits_are_the_same_on_any_number_of_gpus(tmp_path: Path, many: int) -> None:
    """Ten classes have gradients of ten numbers, which end at no multiple of 16 bytes; a norm clips all of them."""
    results = [run(tmp_path, f"on-{count}", count, grad_clip=0.5) for count in (1, 2, 4, 8) if count <= many]
    assert len({result["weights_sha256"] for result in results}) == 1
    for result in results:
        devices = [(worker["node"], tuple(worker["gpu_ids"])) for worker in result["workers"]]
        assert torch.cuda.is_available() is False or len(set(devices)) == len(devices), "a GPU for each worker"


def test_half_precision_and_shards_of_a_model_have_the_same_bits_too(tmp_path: Path, many: int) -> None:
    for keys in ({"precision": "bf16"}, {"strategy": "fsdp"}):
        one, two = (run(tmp_path, f"{next(iter(keys))}-{count}", count, **keys) for count in (1, 2))
        assert one["weights_sha256"] == two["weights_sha256"], keys


@pytest.mark.parametrize("nvls", ["0", "1"], ids=["without NVLS", "with NVLS"])
def test_an_all_reduce_of_two_is_torchs_add_to_the_bit(many: int, nvls: str) -> None:
    """What `bitwise` on two workers rests on. Where the GPUs have no NVLink switch, NCCL does without NVLS."""
    line = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.gpu.test_many"]
    environment = {**os.environ, "NCCL_NVLS_ENABLE": nvls}
    done = subprocess.run(
        [sys.executable, "-m", *line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.split() == ["float32", "float64"]


def compare_sums() -> None:
    """One of two processes: sum numbers with the other one, and compare with the sum of both by torch.add."""
    rank, backend = int(os.environ["RANK"]), "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    for dtype, as_bits in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        for size in SIZES:
            both = [number.to(device) for number in numbers(size, dtype)]
            summed = both[rank].clone()
            dist.all_reduce(summed)
            expected = torch.add(*both)
            is_nan = expected.isnan()
            assert torch.equal(summed.isnan(), is_nan), f"{dtype}, {size} numbers: NaN elsewhere"
            differ = (summed.view(as_bits) != expected.view(as_bits)) & ~is_nan
            found = [one[differ][:3].tolist() for one in (*both, summed, expected)]
            assert not differ.any(), f"{dtype}, {size} numbers: {int(differ.sum())} differ, the first ones: {found}"
        if rank == 0:
            print(str(dtype).removeprefix("torch."))
    dist.destroy_process_group()


def numbers(size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each of two processes holds: all pairs of special numbers first, then any."""
    most = torch.finfo(dtype)
    denormal = most.smallest_normal / 8
    half = [0.0, denormal, most.smallest_normal, 1.0, 1 + most.eps, most.max, float("inf"), float("nan")]
    special = torch.tensor([*half, *(-one for one in half)], dtype=dtype)
    pairs = torch.cartesian_prod(special, special).T
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randn(2, size, dtype=dtype, generator=generator)
    drawn *= torch.randn(2, size, dtype=dtype, generator=generator).mul(30).exp2()
    return list(torch.cat([pairs, drawn], 1)[:, :size].contiguous())


def test_a_killed_rank_costs_no_bit(tmp_path: Path, many: int) -> None:
    whole = run(tmp_path, "whole", 2)
    for rank in (0, 1):
        killed = run(tmp_path, f"killed-{rank}", 2, f"--inject=kill worker {rank} at step 50")
        assert [(one["kind"], one["ranks"]) for one in killed["interruptions"]] == [("worker", [rank])]
        assert killed["weights_sha256"] == whole["weights_sha256"]


class Late(Pairs):
    """A dataset that rank 1 is late to build."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        if own_rank() == 1:
            time.sleep(seconds)


def test_a_worker_may_come_late_to_the_first_collective(tmp_path: Path, many: int) -> None:
    skew = SKEW if torch.cuda.is_available() else 2.0
    dataset = {"target": "tests.gpu.test_many:Late", "args": {"seconds": skew}}
    plain = {"model": {"target": "tests.support.training:mlp"}, "metrics": {}, "eval": None, "checkpoint": {}}
    result = run(tmp_path, "late", 2, dataset=dataset, **plain)
    assert result["status"] == "done"
    assert result["restarts"] == 0
    assert result["seconds"] > skew


class Hangs(nn.Module):
    """A model that on rank 1 has its GPU spin for minutes in the tenth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.count = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == 10 and own_rank() == 1:
            torch.cuda._sleep(10**12)  # type: ignore[no-untyped-call]
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


def test_a_kernel_that_hangs_is_named_by_its_rank(tmp_path: Path, cuda: torch.device, many: int) -> None:
    plain = {"dataset": {"target": "tests.support.training:Pairs"}, "metrics": {}, "eval": None, "checkpoint": {}}
    line = ["dp_ray", "run", "jobs/digits.yaml", "--workers=2", f"--storage={tmp_path}", "--name=hangs"]
    keys = {"model": {"target": "tests.gpu.test_many:Hangs"}, **plain, "retries": 0, "timeouts": {"step": 20}}
    sets = [f"--set={key}={json.dumps(value)}" for key, value in keys.items()]
    done = subprocess.run(
        [sys.executable, "-m", *line, *sets], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "GPU" in done.stderr, done.stderr[-6000:]


def test_each_worker_has_one_gpu_in_nvidia_smi(tmp_path: Path, cuda: torch.device, many: int) -> None:
    line = ["dp_ray", "run", "jobs/digits.yaml", f"--workers={many}", f"--storage={tmp_path}", "--name=seen"]
    running = subprocess.Popen([sys.executable, "-m", *line, "--quiet", "--set=epochs=200"], cwd=ROOT)
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    seen: list[tuple[str, ...]] = []
    try:
        end = time.monotonic() + 120
        while len(seen) < many and time.monotonic() < end and running.poll() is None:
            time.sleep(1)
            found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
            seen = [tuple(one.split(", ")) for one in found if one]
    finally:
        running.terminate()
        running.wait(60)
    assert len(seen) == many, seen
    assert len({pid for pid, _ in seen}) == len({gpu for _, gpu in seen}) == many, seen


def test_torchs_sanitizer_finds_no_race(tmp_path: Path, cuda: torch.device, many: int) -> None:
    result = run(tmp_path, "sanitized", 2, "--set=env={TORCH_CUDA_SANITIZER: '1'}", max_steps=20)
    assert result["restarts"] == 0


if __name__ == "__main__":
    compare_sums()
