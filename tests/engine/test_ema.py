"""The moving average of the weights: that of torch's own AveragedModel, evaluated, kept, and given to the user."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dp_ray
from dp_ray.driver.from_run import follow_up
from dp_ray.engine.average import Average
from dp_ray.engine.world import World
from dp_ray.errors import JobError, StorageError
from tests.support import training
from tests.support.group import ProcessExit, StopsBefore, history_of, measured, run_group, weights_of
from tests.support.training import plain_loop
from tests.support.trainings import chunked_statistics, eval_loss, initial, job_of, keys_of

PAIRS = "tests.support.training:Pairs"
EVAL = {"dataset": {"target": PAIRS, "args": {"length": 20}}, "every_steps": 4}


def averaged(model: nn.Module, decay: float = 0.9) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]


def assert_near(found: dict[str, torch.Tensor], module: nn.Module, tolerance: float = 2e-6) -> None:
    expected = module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), rtol=tolerance, atol=tolerance), name


def test_parameters_are_averaged_and_buffers_are_the_models_own(tmp_path: Path) -> None:
    job = job_of("conv", "Images", workers=2, shards=5, batch_size=14, epochs=1, ema={"decay": 0.9})
    run_group(job, tmp_path)
    model = initial(training.conv)
    average = averaged(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    step = lambda: average.update_parameters(model)  # noqa: E731
    plain_loop(model, training.Images(), 14, 1, chunked_statistics, optimizer, shards=5, after_step=step)
    found, last = load_file(tmp_path / "ema.safetensors"), weights_of(tmp_path)
    assert_near(found, average.module)
    buffers = [name for name, _ in model.named_buffers()]
    assert len(buffers) == 3 and all(torch.equal(found[name], last[name]) for name in buffers)
    assert not torch.equal(found["4.weight"], last["4.weight"])
    with safe_open(tmp_path / "ema.safetensors", "pt") as opened:
        assert '"decay": 0.9' in str(opened.metadata())


class Mixed(nn.Module):
    """Parameters of several dtypes and layouts, tied and frozen ones, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.first.weight
        self.of_64 = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.of_16 = nn.Parameter(torch.randn(9).bfloat16())
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.numbers = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.arange(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(5)


def test_each_update_gives_the_bits_of_torchs_own() -> None:
    torch.manual_seed(3)
    model = Mixed()
    average, expected = Average(job_of("mlp", ema={"decay": 0.9}), model, World()), averaged(model)
    for _ in range(4):
        with torch.no_grad():
            for parameter in (*model.parameters(), *model.buffers()):
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype))
        average.update()
        expected.update_parameters(model)
    found = average.state_dict()
    assert found.keys() == expected.state_dict().keys() and int(found["n_averaged"]) == 4
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.state_dict().items())
    assert not any(tensor.requires_grad for tensor in average.tensors().values())


@pytest.mark.full(but=["True"])
@pytest.mark.parametrize("is_evaluated", [True, False])
def test_what_is_evaluated_is_what_best_keeps(tmp_path: Path, is_evaluated: bool) -> None:
    overshoots = {"target": "torch.optim:SGD", "args": {"lr": 4.0}}
    keys = {"eval": EVAL, "optimizer": overshoots, "checkpoint": {"best": "eval_loss"}}
    run_group(job_of("mlp", workers=2, ema={"decay": 0.8, "evaluate": is_evaluated}, **keys), tmp_path)
    losses = {row["step"] + 1: row["eval_loss"] for row in history_of(tmp_path) if row["eval_loss"] is not None}
    ema, last = load_file(tmp_path / "ema.safetensors"), weights_of(tmp_path)
    ends = losses[max(losses)]
    assert eval_loss(ema if is_evaluated else last) == pytest.approx(ends, rel=1e-6)
    assert eval_loss(last if is_evaluated else ema) != pytest.approx(ends, rel=1e-3)
    assert min(losses.values()) < ends, "else the best are the last"
    assert eval_loss(load_file(tmp_path / "best.safetensors")) == pytest.approx(min(losses.values()), rel=1e-6)


def test_an_update_that_fp16_skipped_is_not_averaged(tmp_path: Path) -> None:
    """The scaler begins at 65,536: with these losses, the first updates overflow."""
    job = job_of("mlp", workers=1, precision="fp16", ema={"decay": 0.5}, max_steps=6, loss=f"{__name__}:huge",
                 shuffle=False)  # fmt: skip
    run_group(job, tmp_path)
    model, data = initial(training.mlp), training.Pairs()
    average, scaler = averaged(model, 0.5), torch.amp.GradScaler("cpu")
    optimizer, skipped = torch.optim.SGD(model.parameters(), 0.1, 0.9), 0
    for step in range(6):
        rows = slice(7 * step, 7 * step + 7)
        with torch.autocast("cpu", torch.float16):
            loss = huge(model(data.inputs[rows]), data.targets[rows]).sum() / 7
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < scale:
            skipped += 1
        else:
            average.update_parameters(model)
    assert 0 < skipped < 5
    assert_near(load_file(tmp_path / "ema.safetensors"), average.module, 1e-3)
    assert not torch.allclose(average.module[0].weight, model[0].weight, rtol=1e-2)  # type: ignore[index]


def huge(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 20 * nn.functional.cross_entropy(outputs.float(), target, reduction="none")


def test_a_step_whose_rows_are_all_set_aside_is_not_averaged(tmp_path: Path) -> None:
    data = {"target": "tests.engine.test_ema:Bad", "args": {"rows": 14}}
    keys = {"batch_size": 7, "shuffle": False, "epochs": 1, "on_error": {"quarantine": 7}}
    run_group(job_of("mlp", data, workers=1, ema={"decay": 0.5}, **keys), tmp_path / "bad")
    run_group(job_of("mlp", workers=1, ema={"decay": 0.5}, max_steps=1, shuffle=False), tmp_path / "one")
    bad, one = (load_file(tmp_path / name / "ema.safetensors") for name in ("bad", "one"))
    assert all(torch.equal(bad[name], tensor) for name, tensor in one.items())


class Bad(training.Pairs):
    """The pairs, of which those from the eighth on cannot be read."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        if index >= 7:
            raise OSError("a bad sector")
        return super().__getitem__(index)


def test_before_its_first_update_the_average_is_the_model(tmp_path: Path) -> None:
    """All steps are skipped: what is evaluated and written is the model as it began."""
    keys = {"precision": "fp16", "loss": "tests.engine.test_ema:infinite", "eval": EVAL, "max_steps": 4}
    run_group(job_of("mlp", workers=2, ema={"decay": 0.5}, metrics={"right": "tests.support.training:right"}, **keys),
              tmp_path)  # fmt: skip
    found = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in initial(training.mlp).state_dict().items())


def infinite(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs.float().sum(1) * 3e38


@pytest.mark.full
@pytest.mark.slow
class Transposing(nn.Linear):
    """A layer whose state_dict has its weight the other way round."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self._register_state_dict_hook(self._turned)  # type: ignore[no-untyped-call]

    @staticmethod
    def _turned(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()


def test_a_state_of_the_models_own_making_is_refused_by_name(tmp_path: Path) -> None:
    job = job_of({"target": "tests.engine.test_ema:Transposing"}, workers=1, ema={"decay": 0.9})
    with pytest.raises(ProcessExit, match="ema: the model's own state_dict makes weight anew"):
        run_group(job, tmp_path)


def test_the_average_of_a_compiled_model_is_compiled_too(tmp_path: Path) -> None:
    job = job_of("mlp", workers=1, ema={"decay": 0.8}, eval=EVAL, batch_size=101, epochs=2, compile=True)
    run_group(job, tmp_path)
    average = load_file(tmp_path / "ema.safetensors")
    assert history_of(tmp_path)[-1]["eval_loss"] == pytest.approx(eval_loss(average), rel=1e-5)


def test_recomputed_and_spread_models_are_averaged(tmp_path: Path) -> None:
    """The copy has its own blocks and hooks: its evaluation is that of its own weights."""
    cases: dict[str, dict[str, Any]] = {
        "recomputed": {"activation_checkpointing": ["Linear"]},
        "spread": {"devices": ["cpu", "cpu"], "device_map": "auto"},
    }
    for name, keys in cases.items():
        job = job_of("mlp", workers=1, ema={"decay": 0.8}, eval=EVAL, epochs=1, **keys)
        run_group(job, tmp_path / name)
        ends = history_of(tmp_path / name)[-1]["eval_loss"]
        assert eval_loss(load_file(tmp_path / name / "ema.safetensors")) == pytest.approx(ends, rel=1e-6), name


def test_another_runs_checkpoint_without_an_average_begins_one(tmp_path: Path) -> None:
    run_group(job_of("mlp", workers=1, max_steps=5), tmp_path / "first")
    goes_on = {"workers": 2, "init_from": str(tmp_path / "first")}
    run_group(job_of("mlp", ema={"decay": 0.5}, max_steps=6, **goes_on), tmp_path / "one")
    ema, last = load_file(tmp_path / "one" / "ema.safetensors"), weights_of(tmp_path / "one")
    assert all(torch.equal(ema[name], value) for name, value in last.items()), (
        "the first update is the average's start"
    )
    run_group(job_of("mlp", max_steps=7, **{**goes_on, "init_from": str(tmp_path / "one")}), tmp_path / "without")
    assert not (tmp_path / "without" / "ema.safetensors").exists()


def test_init_from_takes_the_average(tmp_path: Path) -> None:
    run_group(job_of("mlp", workers=1, ema={"decay": 0.8}, max_steps=9), tmp_path / "first")
    file = tmp_path / "first" / "ema.safetensors"
    data = {"target": PAIRS, "args": {"length": 20}}
    job = job_of("mlp", data, workers=1, task="evaluate", init_from=str(file), shuffle=False)
    assert measured(run_group(job, tmp_path / "eval"))["loss"] == pytest.approx(eval_loss(load_file(file)), rel=1e-6)


@pytest.mark.usefixtures("in_project")
def test_the_result_gives_it_and_evaluate_takes_what_was_evaluated(tmp_path: Path) -> None:
    keys = keys_of(storage=str(tmp_path), eval=EVAL, epochs=1)
    result = dp_ray.run(**keys, name="averaged", ema={"decay": 0.8})
    loaded = dp_ray.load(result.run_dir)
    file = Path(result.run_dir) / "ema.safetensors"
    assert loaded.ema is not None and loaded.ema["weights"] == str(file) and loaded.ema["decay"] == 0.8
    assert all(torch.equal(loaded.ema_weights[name], value) for name, value in load_file(file).items())
    assert eval_loss(loaded.ema_weights) == pytest.approx(result.metrics["eval_loss"], rel=1e-6)
    told = {weights: follow_up("evaluate", result.run_dir, weights, {}) for weights in (None, "ema", "last")}
    assert told[None].job.init_from == told["ema"].job.init_from == str(file)
    assert told["last"].job.init_from == str(file.with_name("weights.safetensors"))
    assert "evaluates the ema weights of" in told[None].lines[0] and told[None].job.ema is None
    plain = dp_ray.run(**keys, name="plain")
    with pytest.raises(StorageError, match="the run has no average of its weights; set ema"):
        _ = plain.ema_weights
    with pytest.raises(JobError, match=r"--weights ema: .* holds no ema\.safetensors: set ema"):
        follow_up("evaluate", plain.run_dir, "ema", {})


BLOCKS: dict[str, Any] = {
    "loss": "tests.support.training:token_loss",
    "eval": {"dataset": {"target": "tests.support.training:Sentences", "args": {"length": 11}}, "every_steps": 2},
    "batch_size": 14,
    "shards": 4,
    "epochs": 2,
    "ema": {"decay": 0.8},
    "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.01}},
}


def left(folder: Path) -> tuple[dict[str, bytes], ...]:
    files = [load_file(folder / f"{name}.safetensors") for name in ("weights", "ema", "best")]
    return tuple({name: value.numpy().tobytes() for name, value in file.items()} for file in files)


@pytest.mark.full
@pytest.mark.slow
def test_sharded_averages_are_the_same_bits_as_whole_ones(tmp_path: Path) -> None:
    """Also of a run that goes on with another strategy, on another number of workers."""
    keys = {"bitwise": True, "batch_size": 33, "shards": 4, "ema": {"decay": 0.8}, "eval": {**EVAL, "every_steps": 2}}
    keys |= {"checkpoint": {"best": "eval_loss", "every_steps": 3}, "optimizer": BLOCKS["optimizer"]}
    model = {"target": "tests.support.training:mlp", "args": {"dropout": 0.2}}
    run_group(job_of(model, workers=2, **keys), tmp_path / "whole")
    expected, history = left(tmp_path / "whole"), repr(history_of(tmp_path / "whole"))
    for workers in (1, 2, 3):
        run_group(job_of(model, workers=workers, strategy="fsdp", **keys), tmp_path / str(workers))
        assert left(tmp_path / str(workers)) == expected, f"{workers} workers"
        assert repr(history_of(tmp_path / str(workers))) == history
    mixed = tmp_path / "mixed"
    for strategy, workers, step in (("ddp", 1, 3), ("fsdp", 2, 5), ("fsdp", 3, 6), ("ddp", 2, None)):
        control = None if step is None else StopsBefore(step)
        run_group(job_of(model, workers=workers, strategy=strategy, **keys), mixed, control)
    assert left(mixed) == expected and repr(history_of(mixed)) == history


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("is_evaluated", [True, False])
def test_sharded_averages_are_evaluated_and_the_training_goes_on_with_its_own_weights(
    tmp_path: Path, is_evaluated: bool
) -> None:
    keys = {**BLOCKS, "ema": {"decay": 0.8, "evaluate": is_evaluated}, "checkpoint": {"best": "eval_loss"}}
    run_group(job_of("Blocks", "Sentences", workers=2, **keys), tmp_path / "ddp")
    run_group(job_of("Blocks", "Sentences", workers=2, strategy="fsdp", **keys), tmp_path / "fsdp")
    for name in ("weights.safetensors", "ema.safetensors", "best.safetensors"):
        ddp, fsdp = load_file(tmp_path / "ddp" / name), load_file(tmp_path / "fsdp" / name)
        assert ddp.keys() == fsdp.keys()
        assert all(torch.allclose(fsdp[key], value, rtol=1e-3, atol=1e-5) for key, value in ddp.items()), name
    ends = [[row["eval_loss"] for row in history_of(tmp_path / name)] for name in ("ddp", "fsdp")]
    assert ends[0][1::2] == pytest.approx(ends[1][1::2], rel=1e-5)
    model = training.Blocks()
    model.load_state_dict(
        load_file(tmp_path / "fsdp" / ("ema.safetensors" if is_evaluated else "weights.safetensors"))
    )
    data = training.Sentences(11)
    tokens, targets = (torch.stack(list(column)) for column in zip(*(data[at] for at in range(11)), strict=True))
    with torch.no_grad():
        total, weight = training.token_loss(model.eval()(tokens), targets)
    assert ends[1][-1] == pytest.approx(float(total / weight), rel=1e-5)
