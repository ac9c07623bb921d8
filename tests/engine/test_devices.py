"""A model over several devices of a worker: as on one device in a plain torch loop; wrong moves are named."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dp_ray
from dp_ray.cli.main import cli
from dp_ray.engine.devices import blocks_of, devices_here, input_device, mixed_devices, spread
from dp_ray.engine.forward.model import build_model, plan_blocks
from dp_ray.engine.forward.step import beside
from dp_ray.engine.world import World
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.plan.costs import PlacedBlock
from dp_ray.rundir import ledger
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from dp_ray.tensors.files import moved
from jobs.model_parallel import Stack, TwoParts
from tests.support import training
from tests.support.cli import status_of
from tests.support.group import history_of, run_group, weights_of
from tests.support.training import plain_loop
from tests.support.trainings import assert_close, initial, job_of, mean_loss

CPU, META = torch.device("cpu"), torch.device("meta")
TWO = {"devices": ["cpu", "cpu"]}


class Halves(nn.Module):
    """Two parts, with LayerNorm and dropout, on the devices that it is given or asks for."""

    def __init__(self, devices: Sequence[torch.device] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.devices = list(devices) if devices is not None else dp_ray.devices()
        self.net1 = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU()).to(self.devices[0])
        self.net2 = nn.Sequential(nn.Dropout(dropout), nn.Linear(16, 3)).to(self.devices[-1])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.net1(inputs.to(self.devices[0]))
        outputs: torch.Tensor = self.net2(hidden.to(self.devices[-1]))
        return outputs


class Asks(Halves):
    """Takes no argument: it asks dp_ray for its devices."""

    def __init__(self) -> None:
        super().__init__()


class Forgets(nn.Module):
    """Moves nothing between its parts."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6, device=device) for device in devices])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            inputs = part(inputs)
        return inputs


class Named(nn.Module):
    """Blocks that are no Sequential, called with keywords, and layers outside them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Residual(16) for _ in range(4)])
        self.head = nn.Linear(16, 3)
        if tied:
            self.blocks[3].linear.weight = self.blocks[0].linear.weight  # type: ignore[union-attr]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, scale=torch.full((1,), 1.0 / (number + 1)))
        outputs: torch.Tensor = self.head(hidden)
        return outputs


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = hidden + scale * self.linear(hidden).relu()
        return added


def named(**keys: Any) -> Job:
    given = {"model": "tests.engine.test_devices:Named", "dataset": "tests.support.training:Pairs", "batch_size": 8}
    return Job.make({**given, **TWO, "device_map": "auto", **keys}, "job")


BLOCKS = [f"blocks.{number}" for number in range(4)]


@pytest.mark.full(but=["Asks-False"])
@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("name", ["Halves", "Asks"])
def test_a_training_on_two_devices_is_that_of_one_device_in_a_plain_loop(
    tmp_path: Path, name: str, bitwise: bool
) -> None:
    job = job_of({"target": f"tests.engine.test_devices:{name}"}, workers=2, shards=2, bitwise=bitwise, **TWO)
    run_group(job, tmp_path)
    model = initial(Halves, [CPU])

    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = plain_loop(model, training.Pairs(), 7, 2, mean_loss, optimizer)
    assert_close(tmp_path, model, losses)


@pytest.mark.slow
def test_the_same_bits_on_one_two_and_four_workers(tmp_path: Path) -> None:
    found = set()
    for workers in (1, 2, 4):
        model = {"target": "tests.engine.test_devices:Halves", "args": {"dropout": 0.3}}
        job = job_of(model, workers=workers, shards=4, bitwise=True, **TWO)
        run_group(job, tmp_path / str(workers))
        weights = weights_of(tmp_path / str(workers))
        found.add((str(history_of(tmp_path / str(workers))), *(weights[name].numpy().tobytes() for name in weights)))
        assert all(tensor.device == CPU for tensor in weights.values())
    assert len(found) == 1


@pytest.mark.slow
def test_device_map_auto_trains_as_the_same_model_on_one_device(tmp_path: Path) -> None:
    for device_map in (None, "auto"):
        devices = {"device_map": device_map, **TWO} if device_map else {}
        run_group(job_of("mlp", workers=2, bitwise=True, **devices), tmp_path / str(device_map))
    parted, whole = weights_of(tmp_path / "auto"), weights_of(tmp_path / "None")
    assert parted.keys() == whole.keys()
    assert all(torch.equal(parted[name], whole[name]) for name in whole)
    model = initial(training.mlp)
    losses = plain_loop(model, training.Pairs(), 7, 2, mean_loss, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    assert_close(tmp_path / "auto", model, losses)


def test_a_sequential_is_dealt_by_bytes_and_moves_what_reaches_a_part() -> None:
    job = Job.make({"model": Stack, "dataset": [1], "batch_size": 1, "device_map": "auto", **TWO}, "job")
    blocks = blocks_of(job, Stack(64), ["cpu", "meta"])
    linear, last = 64 * 65 * 4, 65 * 10 * 4
    assert [block.bytes for block in blocks] == [0, linear, 0, linear, 0, last]
    assert [block.device for block in blocks] == ["cpu"] * 3 + ["meta"] * 3

    model = spread(job, Stack(64), [META, CPU])
    assert [parameter.device for parameter in model.parameters()] == [META] * 2 + [CPU] * 4
    assert [len(module._forward_pre_hooks) for module in model.children()] == [1] * 6
    assert input_device(job, model, [META, CPU]) == META
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model(torch.zeros(1, 1, 8, 8))  # what comes out of the first part has no numbers to copy


def test_targets_go_to_where_the_outputs_are_and_inputs_to_where_the_job_says() -> None:
    target = {"class": torch.zeros(2), "name": "odd"}
    moved = beside((torch.zeros(2, device=META),), target)
    assert (moved["class"].device, moved["name"]) == (META, "odd")
    assert beside("no tensor", target) is target
    job = Job.make({"model": Stack, "dataset": [1], "batch_size": 1, **TWO}, "job")
    placed = spread(job.model_copy(update={"device_map": "auto"}), Stack(64), [META, CPU])
    assert input_device(job, placed, [META, CPU]) == META
    assert input_device(job.model_copy(update={"input_device": "cpu"}), placed, [META, CPU]) == CPU


class AsksWhere(torch.Tensor):
    """A tensor that keeps how it was asked to move, and stays where it is."""

    asked: ClassVar[list[bool]] = []

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(kwargs["non_blocking"])
        return self


def test_a_copy_to_the_cpu_is_waited_for() -> None:
    leaf = torch.ones(2).as_subclass(AsksWhere)
    moved(leaf, torch.device("cuda", 0))
    moved(leaf, torch.device("cpu"))
    # torch copies to pinned memory: a module on the CPU would read it before the numbers are there.
    assert AsksWhere.asked == [True, False]


def test_a_layer_that_stands_twice_in_a_sequential_is_placed_too() -> None:
    twice = nn.Linear(4, 4)
    job = Job.make({"model": Stack, "dataset": [1], "batch_size": 1, "device_map": "auto", **TWO}, "job")
    model = spread(job, nn.Sequential(twice, nn.Linear(4, 4), twice, nn.Linear(4, 4)), [CPU, META])
    assert [len(module._forward_pre_hooks) for module in model.children()] == [1, 1, 1]


def test_named_blocks_get_their_tensors_and_the_rest_stays_on_the_first_device(tmp_path: Path) -> None:
    job = named(device_map=BLOCKS)
    model = initial(Named)
    assert [block.device for block in blocks_of(job, model, ["a", "b"])] == ["a", "a", "b", "b"]
    placed = spread(job, initial(Named), [CPU, CPU])
    inputs = torch.randn(5, 6)
    assert torch.equal(placed(inputs), model(inputs))
    placed = spread(job, initial(Named), [CPU, META])
    where = {name: parameter.device for name, parameter in placed.named_parameters()}
    assert {name for name, device in where.items() if device == META} == {
        f"blocks.{number}.linear.{kind}" for number in (2, 3) for kind in ("weight", "bias")
    }
    seen: list[Any] = []
    placed.get_submodule("blocks.2").register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0].device, kwargs["scale"].device)), with_kwargs=True
    )
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        placed(inputs)  # back from meta nothing can come
    assert seen == [(META, META)]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"device_map": ["blocks.0", "blocks.9"]},
            r"device_map: the model has no module 'blocks.9'; it has embed, blocks",
        ),
        ({"device_map": ["blocks", "blocks.1"]}, r"device_map: 'blocks.1' is a part of another block"),
        ({"device_map": ["blocks.1"]}, r"device_map: 1 blocks \(blocks.1\) cannot be placed on 2 devices"),
        ({}, r"device_map: auto places the blocks of a torch.nn.Sequential; the model is a Named: name its blocks"),
    ],
)
def test_blocks_that_cannot_be_are_told(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        blocks_of(named(**keys), Named(), ["cpu", "meta"])


def test_a_parameter_on_two_devices_is_told_with_both_its_names() -> None:
    with pytest.raises(JobError, match=r"blocks.0.linear.weight and blocks.3.linear.weight are the same parameter"):
        blocks_of(named(device_map=BLOCKS), Named(tied=True), ["cpu", "meta"])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"gpus_per_worker": 1.5}, "gpus_per_worker: must be 'auto', at most 1, or a whole number, got 1.5"),
        ({"gpus_per_worker": 3}, "devices: 2 are named, and gpus_per_worker is 3"),
        ({"blocks": ["a"]}, "blocks: is no key of a job; here it is device_map: a list of modules' names"),
        ({"devices": ["cpu"]}, "device_map: a worker has one device"),
        ({"devices": []}, "devices"),
        (
            {"devices": ["cuda:0", "cuda:1"], "workers": 2, "shards": 2, "gpus_per_worker": 1},
            "devices: cuda:0, cuda:1 are of each worker's own GPUs, 2 each, and gpus_per_worker is 1; leave one",
        ),
        (
            {"devices": ["cuda:0", "cpu"], "workers": 2, "shards": 2, "gpus_per_worker": 0},
            "devices: cuda:0, cpu are of each worker's own GPUs, 1 each, and gpus_per_worker is 0",
        ),
    ],
)
def test_keys_that_cannot_hold_together_are_told(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        named(**keys)


def test_an_object_cannot_place_its_parts() -> None:
    job = Job.make({"model": Halves([CPU]), "dataset": [1], "batch_size": 1, **TWO}, "job")
    with pytest.raises(JobError, match="cannot place its parts on 2 devices; give a target, or set device_map: auto"):
        build_model(job, [CPU, CPU])
    assert dp_ray.devices() == [CPU], "outside of a worker there is this one"


def test_a_forward_that_mixes_devices_names_both_and_the_module(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.child(ledger.PARTS).create()
    target = {"target": "tests.engine.test_devices:Forgets"}
    for task in ({}, {"task": "train", "loss": "torch.nn:CrossEntropyLoss", "optimizer": "torch.optim:SGD"}):
        keys = {"model": target, "dataset": "tests.support.training:Pairs", "batch_size": 8, "inputs": "first"}
        job = Job.make({**keys, "devices": ["cpu", "meta"], **task}, "job")
        world = World(device=CPU, all_devices=(CPU, META))
        with pytest.raises(
            ModelError,
            match=r"device meta is not .* device cpu.* module 'parts\.1' got tensors on two devices: move",
        ):
            run_task(job, world, run, lambda what: None)
    assert run.child(ledger.PARTS).names() == []
    assert not run.exists("weights.safetensors")
    assert not list(tmp_path.rglob(".tmp-*"))


def test_other_errors_are_not_taken_for_mixed_devices() -> None:
    assert mixed_devices(nn.Linear(1, 1), ValueError("a number that I do not like")) == ""
    torchs = (
        "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other tensors on "
        "cuda:1 (when checking argument in method wrapper_CUDA_addmm)",
        "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cpu!",
    )
    for text in torchs:
        says = mixed_devices(nn.Linear(1, 1), RuntimeError(text))
        assert "the model's own forward" in says


@pytest.mark.parametrize(
    ("keys", "there", "says"),
    [
        ({"gpus_per_worker": 1}, 0, "gpus_per_worker: 1 is asked for, and torch finds no GPU on this machine"),
        ({"gpus_per_worker": 0.5}, 0, "gpus_per_worker: 0.5 is asked for, and torch finds no GPU on this machine"),
        ({"gpus_per_worker": 2}, 1, "gpus_per_worker: 2 is asked for, and torch finds 1 GPU on this machine; to try"),
        ({"devices": ["cuda:0"]}, 0, "devices: cuda:0 is named, and torch finds no GPU on this machine"),
        ({"devices": ["cpu", "cuda"]}, 0, "devices: cuda is named, and torch finds no GPU on this machine"),
        (
            {"devices": ["cuda:7"]},
            2,
            "devices: cuda:7 is named, and torch finds 2 GPUs on this machine: cuda:0, cuda:1;",
        ),
        ({"input_device": "cuda:0"}, 0, "input_device: cuda:0 is named, and torch finds no GPU on this machine"),
    ],
)
def test_a_gpu_that_is_not_there_is_an_error_before_anything_starts(
    keys: dict[str, Any], there: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if there:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    elif torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    job = {"model": "tests.support.training:mlp", "dataset": "tests.support.training:Pairs", "batch_size": 8}
    job |= {"workers": 0, "storage": str(tmp_path / "runs"), "name": "run", **keys}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert status_of(monkeypatch, "run", str(tmp_path / "job.yaml")) == 2
    told = capsys.readouterr().err
    assert f"error: {says}" in told
    assert ("the same file runs anywhere" in told) == (keys.get("gpus_per_worker") != 2)
    assert not (tmp_path / "runs").exists()
    assert status_of(monkeypatch, "plan", str(tmp_path / "job.yaml")) == 0
    assert f"a run would not start: {says}" in capsys.readouterr().out


def test_a_gpu_that_is_not_asked_for_is_not_missed() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for keys in ({}, {"gpus_per_worker": 0}, {"devices": ["cpu"], "gpus_per_worker": 1}):
        job = {"model": Stack, "dataset": [1], "batch_size": 1, "workers": 0, **keys}
        assert devices_here(Job.make(job, "job")) == (CPU,)


@pytest.mark.slow
def test_the_jobs_of_the_manual(tmp_path: Path, in_project: Path) -> None:
    from jobs.digits import Digits

    result = dp_ray.run("jobs/model_parallel.yaml", workers=0, storage=str(tmp_path), quiet=True)
    torch.manual_seed(0)
    model = TwoParts(64)
    with torch.inference_mode():
        assert torch.allclose(result.outputs, model(Digits().images), atol=1e-6)
    trained = dp_ray.run("jobs/model_parallel_train.yaml", workers=0, storage=str(tmp_path), quiet=True)
    model.load_state_dict(load_file(trained.weights_path or ""))
    test = Digits("test")
    with torch.inference_mode():
        accuracy = (model(test.images).argmax(1) == test.labels).double().mean().item()
    assert accuracy == pytest.approx(trained.metrics["eval_accuracy"], abs=1e-12)
    assert accuracy > 0.8


class Counts(nn.Sequential):
    """Computes with its own numbers while it is built, which a model without memory has not."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self.total = sum(float(parameter.sum()) for parameter in self.parameters())


def test_a_model_that_needs_its_numbers_to_be_built_is_planned_too() -> None:
    keys = {"model": "tests.engine.test_devices:Counts", "dataset": [1], "batch_size": 1, "device_map": "auto", **TWO}
    assert plan_blocks(Job.make(keys, "job")) == (PlacedBlock("0", 24, "cpu"), PlacedBlock("1", 24, "cpu"))


def test_the_plan_says_which_block_goes_where(tmp_path: Path, in_project: Path, capsys: Any) -> None:
    path = tmp_path / "job.yaml"
    model = {"target": "jobs.model_parallel:Stack", "args": {"width": 64}}
    keys = {"model": model, "dataset": {"target": "jobs.digits:Digits"}, "batch_size": 256, "device_map": "auto"}
    path.write_text(json.dumps({**keys, "gpus_per_worker": 2}))
    cli(["plan", str(path), "--json"], standalone_mode=False)
    blocks = json.loads(capsys.readouterr().out)["blocks"]
    assert [(block["name"], block["device"]) for block in blocks] == [
        (str(number), "cuda:0" if number < 3 else "cuda:1") for number in range(6)
    ]
    assert sum(block["bytes"] for block in blocks) == sum(parameter.nbytes for parameter in Stack(64).parameters())
    cli(["plan", str(path)], standalone_mode=False)
    assert f"{64 * 65 * 4:,} bytes on cuda:1" in capsys.readouterr().out
