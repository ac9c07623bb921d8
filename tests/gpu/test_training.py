"""Trainings on a GPU: as plain torch on one device, and the same bits again and on other numbers of processes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.nets import Gpt, Texts
from dp_ray.engine.sums.votes import LAG
from dp_ray.messages import StepControl
from dp_ray.plan.order import Order
from tests.gpu.conftest import ON
from tests.gpu.support import GPT, MLP, RESNET, bits, job_on, plain_training, run_here
from tests.support import training
from tests.support.group import ProcessExit, StopsBefore, history_of, run_group
from tests.support.trainings import ADAMW, assert_close, initial

PROCESSES = [1, 2, 3]
KINDS: dict[str, dict[str, Any]] = {"an MLP with dropout": MLP, "a ResNet": RESNET, "a GPT with AdamW": GPT}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plain_mlp(device: torch.device, **keys: Any) -> tuple[torch.nn.Module, list[float]]:
    """The training of the MLP by plain torch on one device: the model, on the CPU, and its losses."""
    model = initial(training.mlp).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = plain_training(model, training.Pairs(), device, optimizer, **keys)
    return model.cpu(), losses


@pytest.mark.parametrize("processes", PROCESSES)
def test_processes_that_share_a_gpu_end_at_a_plain_loops_weights(
    tmp_path: Path, device: torch.device, processes: int
) -> None:
    run_group(job_on(device, workers=processes), tmp_path)
    assert_close(tmp_path, *plain_mlp(device), tolerance=1e-5)


def test_a_gpt_ends_at_a_plain_loops_weights(tmp_path: Path, device: torch.device) -> None:
    model = {"target": GPT["model"]["target"], "args": {**GPT["model"]["args"], "dropout": 0.0}}
    keys = {"model": model, "dataset": GPT["dataset"], "batch_size": 12}
    run_group(job_on(device, **keys, workers=2, shards=4), tmp_path)
    plain: torch.nn.Module = initial(lambda: Gpt(**model["args"])).to(device)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, 0.9)
    losses = plain_training(plain, Texts(**GPT["dataset"]["args"]), device, optimizer, batch_size=12)
    assert_close(tmp_path, plain.cpu(), losses, tolerance=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_bitwise_twice_and_on_one_two_and_three_processes(
    tmp_path: Path, device: torch.device, kind: str, precision: str
) -> None:
    keys = {"bitwise": True, "shards": 6, "batch_size": 12, "epochs": 1, "precision": precision, **KINDS[kind]}
    found = []
    for number, processes in enumerate([1, *PROCESSES]):
        run_group(job_on(device, **keys, workers=processes), tmp_path / str(number))
        found.append(bits(tmp_path / str(number)))
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("precision", list(HALF))
def test_half_precision_is_autocasts(tmp_path: Path, device: torch.device, precision: str) -> None:
    run_group(job_on(device, precision=precision), tmp_path)
    scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
    model, losses = plain_mlp(device, dtype=HALF[precision], scaler=scaler)
    assert_close(tmp_path, model, losses, tolerance=5e-3)


def test_a_step_whose_scaled_gradient_overflows_is_left_out_by_all(tmp_path: Path, device: torch.device) -> None:
    """Inputs so large that the gradients of the first steps overflow; a step that is left out steps no scheduler."""
    slow = {"target": "torch.optim:SGD", "args": {"lr": 1e-6}}
    keys = {"optimizer": slow, "scheduler": "tests.support.training:warm_up", "precision": "fp16"}
    loud = {**keys, "dataset": {"target": "tests.gpu.test_training:LoudPairs"}}
    run_group(job_on(device, **loud), tmp_path / "one shard")
    rates = [row["learning_rate"] for row in history_of(tmp_path / "one shard")]
    assert rates == plain_rates(device)
    assert rates[0] == rates[1], "no step was left out"
    for processes in PROCESSES:
        run_group(job_on(device, **loud, bitwise=True, shards=3, workers=processes), tmp_path / str(processes))
        assert bits(tmp_path / str(processes)) == bits(tmp_path / "1")


def plain_rates(device: torch.device) -> list[float]:
    """The learning rate of each step of a plain training, warmed up by the steps that are not left out."""
    model = initial(training.mlp).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    scheduler, scaler = training.warm_up(optimizer), torch.amp.GradScaler(device.type)
    rates, scales = [optimizer.param_groups[0]["lr"]], [scaler.get_scale()]

    def after_step(_: int) -> None:
        scales.append(scaler.get_scale())
        if scales[-1] >= scales[-2]:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])

    plain_training(model, LoudPairs(), device, optimizer, dtype=torch.float16, scaler=scaler, after_step=after_step)
    return rates[:-1]


class LoudPairs(training.Pairs):
    """The pairs, a thousand times as large."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs * 1000, target


@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("bitwise", [False, True] if ON.startswith("cuda") else [True])
def test_a_compiled_model_trains_as_the_plain_one(tmp_path: Path, device: torch.device, bitwise: bool) -> None:
    run_group(job_on(device, compile=True, bitwise=bitwise, shards=2, epochs=1), tmp_path)
    assert_close(tmp_path, *plain_mlp(device, epochs=1), tolerance=1e-4)


class Asks(StepControl):
    """Asks for a stop at a step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.wants_stop = False

    def before(self, step: int) -> None:
        self.wants_stop = self.wants_stop or step >= self._step

    def leave(self) -> None:
        """All is kept."""


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_all_processes_stop_after_the_same_step_and_go_on_to_the_same_end(
    tmp_path: Path, device: torch.device, processes: int
) -> None:
    job = job_on(device, **MLP, bitwise=True, shards=3, workers=processes, epochs=4)
    run_group(job, tmp_path / "whole")
    run_group(job, tmp_path / "stopped", Asks(20))
    lag = LAG if device.type == "cuda" and processes > 1 else 0
    assert len(history_of(tmp_path / "stopped")) == 20 + 1 + lag
    run_group(job, tmp_path / "stopped")
    assert bits(tmp_path / "stopped") == bits(tmp_path / "whole")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_ends_at_a_loss_that_is_nan_with_the_state_before_it(
    tmp_path: Path, device: torch.device, processes: int
) -> None:
    bad = Order(101, 0, 0, shuffle=True)[5 * 7]
    data = {"target": "tests.support.bad_data:Broken", "args": {"nan": [bad]}}
    keys = {"shards": 2, "workers": processes, "stop_on_nan": True, "checkpoint": {"every_steps": 1}}
    with pytest.raises(ProcessExit, match="step 5: the loss is nan"):
        run_group(job_on(device, dataset=data, **keys), tmp_path)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-4.safetensors", "step-5.safetensors"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_training_that_dies_goes_on_from_its_checkpoint_to_the_same_bits(
    tmp_path: Path, device: torch.device, precision: str
) -> None:
    job = job_on(
        device,
        **GPT,
        bitwise=True,
        shards=4,
        batch_size=6,
        workers=2,
        precision=precision,
        checkpoint={"every_steps": 3},
    )
    run_group(job, tmp_path / "whole")
    run_group(job, tmp_path / "died", StopsBefore(11))
    run_group(job, tmp_path / "died")
    assert bits(tmp_path / "died") == bits(tmp_path / "whole")


def test_a_run_gives_back_what_it_took(tmp_path: Path, cuda: torch.device) -> None:
    job = job_on(cuda, **MLP)
    run_here(job, tmp_path / "first")
    torch.cuda.manual_seed(3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda), torch.cuda.get_rng_state(cuda)
    run_here(job, tmp_path / "second")
    after = torch.cuda.memory_allocated(cuda), torch.cuda.get_rng_state(cuda)
    assert after[0] == before[0], "memory of the run is still held"
    assert torch.equal(after[1], before[1]), "the run drew from the caller's generator"


def test_adamws_fused_step_is_the_same_bits_after_a_resume(tmp_path: Path, cuda: torch.device) -> None:
    optimizer = {"target": ADAMW["target"], "args": {"lr": 0.01, "fused": True}}
    job = job_on(cuda, **{**RESNET, "optimizer": optimizer}, bitwise=True, checkpoint={"every_steps": 2})
    run_group(job, tmp_path / "whole")
    run_group(job, tmp_path / "died", StopsBefore(9))
    run_group(job, tmp_path / "died")
    assert bits(tmp_path / "died") == bits(tmp_path / "whole")
