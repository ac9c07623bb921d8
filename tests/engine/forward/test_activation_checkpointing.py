"""`activation_checkpointing`: blocks compute their activations again; every number stays the same."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.engine.forward.model import build_model
from dp_ray.engine.forward.recompute import recompute_blocks
from dp_ray.engine.world import World
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.messages import FlopsCounted
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support import training
from tests.support.group import ProcessExit, history_of, run_group, weights_of
from tests.support.training import plain_loop
from tests.support.trainings import assert_close, initial, job_of, mean_loss

CPU = torch.device("cpu")


class Messy(nn.Module):
    """A block with all that a second forward could change: random numbers of every kind, and buffers."""

    calls: torch.Tensor
    one: torch.Tensor
    two: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, width)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("large", torch.arange(5.0))
        shared = torch.zeros(())
        self.register_buffer("one", shared)
        self.register_buffer("two", shared)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)

    def forward(self, inputs: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls = self.calls + 1  # a new tensor in the place of the old one
        self.one += 0.1
        noise = (
            torch.rand(inputs.shape[1], generator=self.generator) + self.numpy.random() + np.random.random_sample()
        )
        hidden: torch.Tensor = inputs + self.layers(inputs * noise.to(inputs.device) * scale)
        return hidden * (random.random() * (1 + self.calls) + self.two)


class Parts(nn.Module):
    """Messy blocks on the first and the last device of a worker, placed by hand."""

    def __init__(self, devices: tuple[torch.device, ...] = (CPU,), width: int = 8) -> None:
        super().__init__()
        self.first, self.last = devices[0], devices[-1]
        self.stem = nn.Linear(6, width).to(self.first)
        self.blocks = nn.ModuleList(Messy(width).to(devices[at * len(devices) // 4]) for at in range(4))
        self.head = nn.Linear(width, 3).to(self.last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs.to(self.first))
        for block in self.blocks:
            hidden = block(hidden.to(next(block.parameters()).device), scale=0.5)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


def stack() -> nn.Module:
    """Messy blocks for `device_map: auto`."""
    return nn.Sequential(nn.Linear(6, 8), Messy(8), Messy(8), nn.Linear(8, 3))


def messy(**keys: Any) -> Job:
    model = keys.pop("model", "Parts")
    given = {
        "epochs": 1,
        "shards": 4,
        "batch_size": 12,
        "drop_last": True,
        "optimizer": {"target": "torch.optim:AdamW"},
    }
    return job_of({"target": f"tests.engine.forward.test_activation_checkpointing:{model}"}, **{**given, **keys})


def run_alone(job: Job, folder: Path) -> None:
    run = Storage(str(folder))
    run.child("parts").create()
    devices = tuple(torch.device(device) for device in job.devices or ["cpu"])
    run_task(job, World(device=devices[0], all_devices=devices), run, lambda _: None)


def end_of(job: Job, folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    if job.max_workers > 1:
        run_group(job, folder)
    else:
        run_alone(job, folder)
    return weights_of(folder), history_of(folder)


COMBINATIONS: dict[str, dict[str, Any]] = {
    "ddp": {"workers": 2, "grad_clip": 0.5},
    "fsdp": {"workers": 2, "strategy": "fsdp", "grad_clip": 0.5},
    "bitwise": {"workers": 2, "bitwise": True},
    "bf16": {"precision": "bf16"},
    "by hand": {"devices": ["cpu", "cpu"], "precision": "bf16"},
    "device_map": {"devices": ["cpu", "cpu"], "device_map": "auto", "model": "stack", "precision": "bf16"},
    "fp16, some classes": {"precision": "fp16", "activation_checkpointing": ["Messy"]},
    "a budget": {"activation_checkpointing": {"budget": 0.5}},
}


@pytest.mark.full(but=["ddp", "bitwise"])
@pytest.mark.slow
@pytest.mark.parametrize("what", list(COMBINATIONS))
def test_weights_losses_and_buffers_are_the_same_bits(tmp_path: Path, what: str) -> None:
    keys = {"activation_checkpointing": True, **COMBINATIONS[what]}
    weights, history = end_of(messy(**keys), tmp_path / "with")
    expected, losses = end_of(messy(**{**keys, "activation_checkpointing": False}), tmp_path / "without")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert repr(history) == repr(losses)  # fp16 has steps whose gradients are not finite
    assert any("calls" in name and int(tensor) == 8 for name, tensor in weights.items()), "one for each step"


@pytest.mark.full(but=["fsdp"])
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_language_model_ends_where_plain_torch_does(tmp_path: Path, strategy: str) -> None:
    keys = {"loss": "tests.support.training:token_loss", "epochs": 1, "batch_size": 14, "shards": 4}
    job = job_of("Blocks", "Sentences", workers=2, strategy=strategy, activation_checkpointing=True, **keys)
    run_group(job, tmp_path)
    model = initial(training.Blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = plain_loop(model, training.Sentences(), 14, 1, mean_loss, optimizer)
    assert_close(tmp_path, model, losses, 1e-5)


def saved_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
    """The most bytes that a forward and a backward keep for the backward at a time, counted by torch's own hooks."""
    held: dict[int, int] = {}
    most = 0

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            storage = tensor.untyped_storage()
            self.key = storage.data_ptr()
            held[self.key] = held.get(self.key, 0) + 1
            sizes[self.key] = storage.nbytes()
            nonlocal most
            most = max(most, sum(sizes[one] for one in held))

        def __del__(self) -> None:
            held[self.key] -= 1
            if not held[self.key]:
                del held[self.key]

    sizes: dict[int, int] = {}
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in parameters else Packed(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor if isinstance(one, Packed) else one):
        model(inputs).sum().backward()
    return most


def deep(depth: int = 8) -> nn.Module:
    block = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(depth)]
    return nn.Sequential(*block)


@pytest.mark.parametrize(
    ("given", "share"),
    [(False, 1), (True, 1 / 9), (["Sequential"], 1 / 9), ({"budget": 0.5}, 5 / 9), ({"budget": 1}, 1)],
)
def test_fewer_bytes_are_kept_for_the_backward(given: Any, share: float) -> None:
    made = {"target": "tests.engine.forward.test_activation_checkpointing:deep"}
    whole, kept = (
        saved_bytes(recompute_blocks(job, build_model(job, [CPU]), [CPU]), torch.randn(512, 64, requires_grad=True))
        for job in (job_of(made), job_of(made, activation_checkpointing=given))
    )
    assert kept / whole == pytest.approx(share)  # a block keeps 64 numbers a row for its input, and 512 of its own


class Twice(nn.Module):
    """One block that runs twice, around a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())])
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.blocks[0](self.blocks[0](inputs)))
        return outputs


def test_a_block_that_runs_twice(tmp_path: Path) -> None:
    ends = [end_of(messy(model="Twice", activation_checkpointing=on), tmp_path / str(on)) for on in (True, False)]
    assert all(torch.equal(ends[0][0][name], value) for name, value in ends[1][0].items())


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: Any = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))  # type: ignore[no-untyped-call]
    return nn.Sequential(made)


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        (training.HalfMlp, True, r"the model has no blocks .*it has HalfMlp, Linear"),
        (training.mlp, ["Layer"], "the model has no module of class Layer; it has Dropout"),
        (traced, ["TopLevelTracedModule"], "0 is a TorchScript module"),
    ],
)
def test_a_model_without_such_blocks_is_told(model: Any, given: Any, says: str) -> None:
    with pytest.raises(JobError, match=f"activation_checkpointing: {says}"):
        recompute_blocks(job_of("mlp", activation_checkpointing=given), model(), [CPU])


def test_a_module_that_holds_blocks_of_fsdp_is_told() -> None:
    model = {"target": "tests.support.constructors:Constructed", "args": {"steps": []}}
    job = job_of(model, strategy="fsdp", activation_checkpointing=["Sequential"])
    with pytest.raises(JobError, match="body holds blocks of fsdp; name the classes of these blocks"):
        recompute_blocks(job, build_model(job, [CPU]), [CPU])


def test_operations_that_run_again_are_not_counted(tmp_path: Path) -> None:
    told: list[Any] = []
    for on in (False, True):
        job = job_of("Blocks", "Sentences", flops=True, max_steps=1, activation_checkpointing=on)
        run = Storage(str(tmp_path / str(on)))
        run.child("parts").create()
        run_task(job, World(), run, told.append)
    without, checkpointed = (one.flops.per_row for one in told if isinstance(one, FlopsCounted))
    assert checkpointed == without


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"compile": True}, "activation_checkpointing: .*compile"),
        ({"activation_checkpointing": {"budget": 1.5}}, r"activation_checkpointing.budget: must be less than"),
        ({"activation_checkpointing": "yes please"}, r"activation_checkpointing: must be true, false"),
        ({"activation_checkpointing": {"share": 0.5}}, r"its keys are budget"),
        ({"activation_checkpointing": []}, r"activation_checkpointing: "),
    ],
)
def test_what_it_cannot_be(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        job_of("mlp", **{"activation_checkpointing": True, **keys})


def test_a_jobs_fingerprint_does_not_know_it() -> None:
    assert job_of("mlp", activation_checkpointing=True).fingerprint() == job_of("mlp").fingerprint()


def test_an_evaluation_and_a_prediction_run_as_ever(tmp_path: Path) -> None:
    keys = {
        "model": "tests.support.training:Blocks",
        "dataset": "tests.support.training:Sentences",
        "activation_checkpointing": True,
        "inputs": "first",
        "batch_size": 20,
        "workers": 0,
        "quiet": True,
        "storage": str(tmp_path),
    }
    outputs = dp_ray.run(**keys).outputs
    data = training.Sentences()
    tokens = torch.stack([data[at][0] for at in range(len(data))])
    assert torch.allclose(outputs, initial(training.Blocks).eval()(tokens), atol=1e-6)


class WritesItself(nn.Linear):
    """A block that writes its weight."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(inputs)


def writes_itself() -> nn.Module:
    return nn.Sequential(WritesItself(), nn.Linear(6, 3))


def test_a_block_that_writes_a_parameter_is_refused(tmp_path: Path) -> None:
    """It would write it again in the backward."""
    model = {"target": "tests.engine.forward.test_activation_checkpointing:writes_itself"}
    says = "step 0, shard 0: .*forward of a WritesItself wrote its parameter weight, and would write it again"
    with pytest.raises(ProcessExit, match=says):
        run_group(job_of(model, workers=1, activation_checkpointing=["WritesItself"]), tmp_path)
