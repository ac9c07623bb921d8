"""A model over a GPU and the CPU, predictions, a GPU without memory left, and jobs one after the other."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dp_ray
from benchmarks.nets import Images, resnet
from dp_ray.errors import JobError, ModelError
from dp_ray.messages import ShardsFound
from dp_ray.outputs.files import prove_outputs
from dp_ray.outputs.read import Merged
from dp_ray.storage import Storage
from tests.gpu.support import GPT, MLP, RESNET, bits, job_on, run_here
from tests.support import training
from tests.support.cluster import ROOT
from tests.support.group import run_group, weights_of
from tests.support.merging import merged
from tests.support.trainings import assert_close, initial, mean_loss


class Wide(nn.Sequential):
    """Blocks wide enough for a copy between devices to take its time."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 2048), nn.ReLU(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 3))


WIDE = {"target": "tests.gpu.test_memory_and_devices:Wide"}


@pytest.mark.parametrize("order", [1, -1], ids=["GPU first", "CPU first"])
def test_a_model_over_a_gpu_and_the_cpu_trains_as_on_the_cpu(
    tmp_path: Path, device: torch.device, order: int
) -> None:
    """A copy to the CPU that is not waited for gives other numbers now and then: hence many steps."""
    slow = {"target": "torch.optim:SGD", "args": {"lr": 0.01}}  # so that rounding does not grow
    keys = {"model": WIDE, "device_map": "auto", "batch_size": 50, "epochs": 60, "optimizer": slow}
    run_here(job_on(device, **keys, devices=[str(device), "cpu"][::order]), tmp_path)
    model = initial(Wide)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = training.plain_loop(model, training.Pairs(), 50, 60, mean_loss, optimizer)
    assert_close(tmp_path, model, losses, tolerance=5e-4)


class DrawnThere(nn.Module):
    """A model that draws its weights on each of its devices."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.parts = nn.ModuleList(nn.Linear(6, 6, device=device) for device in devices)
        self.last = nn.Linear(6, 3, device=devices[-1])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for part, device in zip(self.parts, self.devices, strict=True):
            inputs = part(inputs.to(device))
        outputs: torch.Tensor = self.last(inputs)
        return outputs


@pytest.mark.parametrize("order", [1, -1], ids=["GPU first", "CPU first"])
def test_weights_drawn_on_a_gpu_are_the_seeds_in_each_process(
    tmp_path: Path, device: torch.device, order: int
) -> None:
    model = {"target": "tests.gpu.test_memory_and_devices:DrawnThere"}
    devices = [str(device), "cpu"][::order]
    for name in ("one", "other"):
        fresh(job_code(tmp_path / name, model=model, devices=devices, max_steps=1))
    one, other = (weights_of(tmp_path / name) for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def job_code(folder: Path, **keys: Any) -> str:
    """A program that runs a job."""
    return (
        "from pathlib import Path; import torch\n"
        "from tests.gpu.support import job_on, run_here\n"
        f"run_here(job_on(torch.device('cpu'), **{keys!r}), Path({str(folder)!r}))\n"
    )


def fresh(code: str) -> None:
    """Run a program in a process of its own, with no settings of ours."""
    clean = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    path = f"{ROOT}{os.pathsep}{clean.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env={**clean, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def test_a_bitwise_job_may_follow_another_job_in_the_same_process(tmp_path: Path, device: torch.device) -> None:
    keys = {**MLP, "devices": [str(device)], "epochs": 1}
    code = job_code(tmp_path / "first", **keys) + job_code(tmp_path / "bitwise", **keys, bitwise=True)
    fresh(code)
    run_group(job_on(device, **{**keys, "bitwise": True}), tmp_path / "alone")
    assert bits(tmp_path / "bitwise") == bits(tmp_path / "alone")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loader", [{}, {"processes": 2}])
def test_a_prediction_is_a_plain_loops(
    tmp_path: Path, device: torch.device, precision: str, loader: dict[str, Any]
) -> None:
    keys = {**RESNET, "task": "predict", "optimizer": None, "shuffle": False, "batch_size": 13, "shards": 3}
    run_group(job_on(device, **keys, precision=precision, loader=loader, workers=3), tmp_path)
    run = Storage(str(tmp_path))
    prove_outputs(run, 48)
    merged = Merged.of(run).read()
    model = initial(lambda: resnet(**RESNET["model"]["args"])).to(device).eval()
    dataset = Images(**RESNET["dataset"]["args"])
    batch = torch.stack([dataset[index][0] for index in range(48)]).to(device)
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        expected = torch.cat([model(batch[at : at + 5]) for at in range(0, 48, 5)]).cpu()
    tolerance = 5e-3 if precision == "fp32" else 5e-2  # cuDNN's convolutions are in TF32
    torch.testing.assert_close(merged.float(), expected.float(), atol=tolerance, rtol=tolerance)


class Filling(nn.Module):
    """A model that takes a tenth of the GPU for each row of a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = training.mlp()
        self.size = torch.cuda.get_device_properties(0).total_memory // 10

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        torch.empty(len(inputs), self.size, dtype=torch.uint8, device=inputs.device)
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


FILLING = {"target": "tests.gpu.test_memory_and_devices:Filling"}


def test_a_gpu_without_memory_left_is_told_and_the_next_job_runs(tmp_path: Path, cuda: torch.device) -> None:
    """Ten rows do not fit beside the GPU's context."""
    keys = {"model": FILLING, "batch_size": 20, "max_steps": 2, "bitwise": True}
    before = torch.cuda.memory_allocated(cuda)
    says = r"step 0, shard 0: model raised OutOfMemoryError: CUDA out of memory.*shards have 20 rows.*shards: 2 "
    with pytest.raises(ModelError, match=says):
        run_here(job_on(cuda, **keys), tmp_path / "full")
    assert torch.cuda.memory_allocated(cuda) - before < 2**20, "the failed job's memory is still held"
    # Four rows a shard fit twice: a small tensor in what a shard has left may keep the next one from that memory.
    run_here(job_on(cuda, **keys, shards=5), tmp_path / "cut")


def test_a_run_finds_how_many_rows_of_a_shard_fit(tmp_path: Path, cuda: torch.device) -> None:
    """A tenth of the GPU stays free, and its context takes some: ten rows do not fit, and five do."""
    keys = {"model": FILLING, "batch_size": 80, "max_steps": 2}
    before = torch.cuda.memory_allocated(cuda)
    told = run_here(job_on(cuda, **keys, shards="auto"), tmp_path / "found")
    assert [one.shards for one in told if isinstance(one, ShardsFound)] == [16]
    assert torch.cuda.memory_allocated(cuda) - before < 2**20, "what was tried is still held"
    run_here(job_on(cuda, **keys, shards=16), tmp_path / "run")


def test_samples_that_are_on_the_gpu_already_are_taken_as_they_are(tmp_path: Path, device: torch.device) -> None:
    there = {"target": "tests.gpu.test_memory_and_devices:There", "args": {"device": str(device)}}
    keys = {**MLP, "bitwise": True}
    run_here(job_on(device, **keys, dataset=there, loader={"pin_memory": False}), tmp_path / "there")
    run_here(job_on(device, **keys), tmp_path / "here")
    assert bits(tmp_path / "there") == bits(tmp_path / "here")


class There(training.Pairs):
    """The pairs, on a device from the start."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)


def test_a_run_from_python_finds_the_gpu(tmp_path: Path, device: torch.device) -> None:
    """`workers: 0` takes the GPU by itself, and its result is read as any other's."""
    keys = {"task": "train", "loss": "torch.nn:CrossEntropyLoss", **GPT, "batch_size": 12, "max_steps": 3}
    result = dp_ray.run(**keys, workers=0, storage=str(tmp_path), name="run", quiet=True)
    assert result.status == "done"
    assert {shape.device for shape in result.shapes} == {str(device)}
    assert result.weights and all(weight.device.type == "cpu" for weight in result.weights.values())


@pytest.mark.ray
def test_each_of_several_workers_has_the_gpu_that_the_job_names_for_itself(
    tmp_path: Path, cuda: torch.device
) -> None:
    keys = {"task": "train", "loss": "torch.nn:CrossEntropyLoss", **GPT, "batch_size": 12, "max_steps": 3}
    keys |= {"devices": ["cuda:0"], "workers": 2, "storage": str(tmp_path), "name": "run", "quiet": True}
    if (there := torch.cuda.device_count()) < 2:
        says = f"^devices: cuda:0 is of each worker's own GPUs; 2 workers need 2 CPU, 2 GPU .*, {there} GPU, room for"
        with pytest.raises(JobError, match=says):
            dp_ray.run(**keys)
        return
    result = dp_ray.run(**keys)
    assert result.status == "done"
    assert sorted(worker["gpu_ids"] for worker in result.workers) == [["0"], ["1"]]
    assert sorted(worker["device"] for worker in result.workers) == ["cuda:0", "cuda:1"]


@pytest.mark.ray
def test_the_line_computes_on_the_gpu_as_the_plain_module_does(cuda: torch.device) -> None:
    torch.manual_seed(0)
    inputs, module = torch.randn(13, 3, 32, 32), resnet(**RESNET["model"]["args"])
    plain = copy.deepcopy(module).to(cuda)
    with dp_ray.DataParallel(module, workers=1, quiet=True) as replicated:
        outputs = replicated(inputs)
        outputs.square().mean().backward()
        assert {shape.device for shape in replicated.shapes} == {str(cuda)}
    expected = plain(inputs.to(cuda))
    expected.square().mean().backward()
    torch.testing.assert_close(outputs.cpu(), expected.cpu(), atol=5e-3, rtol=5e-3)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad.cpu(), atol=5e-3, rtol=5e-2)


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the sizes of what is copied to the CPU from another device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "cpu":
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.sizes += [tuple(one.shape) for one in given if one.device.type != "cpu" and one.ndim]
        return made


class Layers(nn.Module):
    """Logits, and a wide hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(inputs), "wide": inputs.repeat(1, 500)}


def test_what_is_not_kept_is_not_copied_from_the_gpu(tmp_path: Path, device: torch.device) -> None:
    found = {}
    for name, keep in (("all", None), ("kept", ["logits"])):
        outputs = {"keep": keep, "dtype": "float16"}
        model = {"target": "tests.gpu.test_memory_and_devices:Layers"}
        job = job_on(device, model=model, task="predict", inputs="first", outputs=outputs, shards=2, batch_size=20)
        with Copies() as copies:
            run_here(job, tmp_path / name)
        found[name] = {size[1] for size in copies.sizes if len(size) == 2}
        logits = merged(job, tmp_path / name, len(training.Pairs())).read()["logits"]
        assert logits.dtype == torch.float16
    if device.type == "cuda":
        assert 3000 in found["all"] and 3000 not in found["kept"] and 3 in found["kept"]
