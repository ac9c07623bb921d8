"""`strategy: fsdp` ends where plain torch in one process does, whatever workers come, and holds a part on each."""

import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from dp_ray.engine.forward.recompute import blocks_by_class, choose_blocks
from dp_ray.engine.sharded.state import ShardedParts, casting_anew
from dp_ray.engine.world import World, alone
from dp_ray.errors import JobError
from dp_ray.messages import Note, StepControl
from dp_ray.plan.order import Order
from tests.support import training
from tests.support.cases import OPTIMIZERS, USUAL, compare, job_for
from tests.support.cluster import Run
from tests.support.drivers import told
from tests.support.group import ProcessExit, Stopped, StopsBefore, history_of, measured, run_group, weights_of
from tests.support.merging import merged
from tests.support.training import plain_loop
from tests.support.trainings import assert_as_good_loop, assert_close, initial, job_of, keys_of, mean_loss

SHARDED: dict[str, Any] = {"strategy": "fsdp"}
BLOCKS: dict[str, Any] = {
    "loss": "tests.support.training:token_loss",
    "epochs": 1,
    "batch_size": 14,
    "shards": 6,
    **SHARDED,
}


def notes(messages: list[Any]) -> list[str]:
    return [message.text for message in messages if isinstance(message, Note)]


def check(case: dict[str, Any], folder: Path, first: str = "fsdp", second: str = "fsdp") -> None:
    """A training that is ended before a step, and goes on with other workers, maybe by another strategy."""
    case = {**USUAL, "bitwise": False, "shards": 8, **case}
    run_group(job_for(case, case["workers"][0], first), folder, StopsBefore(case["stops"]))
    run_group(job_for(case, case["workers"][1], second), folder)
    compare(case, folder)


CASES: dict[str, dict[str, Any]] = {
    "unused, frozen, in part used": {
        "has": ["frozen", "sometimes", "unused"],
        "optimizer": "SGD with decay",
        "workers": [4, 2],
        "finds_unused": True,
    },
    "buffers, dropout, clipping, a schedule, AdamW": {
        "has": ["dropout", "noise", "statistics"],
        "optimizer": "AdamW",
        "scheduler": "warm-up",
        "grad_clip": 0.3,
        "eval_rows": 9,
        "workers": [3, 4],
    },
    "what cannot be sharded": {
        "has": ["channels_last", "complex", "double", "scalar", "transposed"],
        "grad_clip": 0.3,
        "workers": [2, 3],
    },
    "sparse gradients, an observer, few rows": {
        "has": ["observer", "sparse", "still"],
        "rows": 13,
        "batch_size": 5,
        "eval_rows": 5,
        "workers": [4, 1],
        "stops": 3,
    },
}


@pytest.mark.full(but=["unused, frozen, in part used"])
@pytest.mark.slow
@pytest.mark.parametrize("what", list(CASES))
def test_a_sharded_training_ends_where_one_plain_process_does(tmp_path: Path, what: str) -> None:
    check(CASES[what], tmp_path)


@pytest.mark.full(but=["fsdp-ddp"])
@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_training_goes_on_by_the_other_strategy(tmp_path: Path, first: str, second: str) -> None:
    case = {"has": ["channels_last", "frozen"], "optimizer": "fused AdamW", "workers": [2, 3]}
    check(case, tmp_path, first, second)


@pytest.mark.slow
def test_blocks_and_tied_weights_and_the_parts_of_each_worker(tmp_path: Path) -> None:
    """Weights, and the bytes that each worker wrote: its part of the parameters and of the optimizer's state."""
    job = job_of("Blocks", "Sentences", workers=4, grad_clip=0.5, **BLOCKS)
    run_group(job, tmp_path)
    model = initial(training.Blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    losses = plain_loop(model, training.Sentences(), 14, 1, mean_loss, optimizer, after_backward=clip)
    assert_close(tmp_path, model, losses, 1e-5)
    size = 2 * sum(parameter.nbytes for parameter in model.parameters())  # the parameter and its momentum
    pieces = sorted((tmp_path / "checkpoints" / "pieces").glob("step-4.*"))
    assert len(pieces) == 4
    for piece in pieces:
        held = {
            key: value for key, value in load_file(piece).items() if not key.endswith("head.weight")
        }  # the embedding
        assert sum(one.nbytes for one in held.values()) <= 1.1 * size / 4


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
def test_experts_tied_gates_and_frozen_parts(tmp_path: Path, bitwise: bool) -> None:
    """An expert that no row takes keeps its weights, though the optimizer's decay would change them."""
    decays = {"target": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}
    run_group(job_of("Experts", workers=3, shards=5, optimizer=decays, bitwise=bitwise, **SHARDED), tmp_path)
    model = initial(training.Experts)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], 0.1, 0.9, weight_decay=0.1
    )
    losses = plain_loop(model, training.Pairs(), 7, 2, mean_loss, optimizer)
    assert_close(tmp_path, model, losses, 1e-5)
    unused = [name for name in start if "experts.2" in name or name.startswith("layers.1.")]
    assert unused
    assert all(torch.equal(weights_of(tmp_path)[name], start[name]) for name in unused)


@pytest.mark.full
@pytest.mark.slow
def test_each_block_is_compiled(tmp_path: Path) -> None:
    keys = {**BLOCKS, "batch_size": 12, "max_steps": 3}  # shards of one size: each size is compiled anew
    run_group(job_of("Blocks", "Sentences", workers=2, compile=True, **keys), tmp_path / "compiled")
    run_group(job_of("Blocks", "Sentences", workers=2, **keys), tmp_path / "eager")
    got, expected = weights_of(tmp_path / "compiled"), weights_of(tmp_path / "eager")
    assert got.keys() == expected.keys()
    assert all(torch.allclose(got[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)


@pytest.mark.slow
def test_initial_weights_are_the_bits_of_one_process(tmp_path: Path) -> None:
    still = {"target": "torch.optim:SGD", "args": {"lr": 0.0}}
    run_group(job_of("Blocks", "Sentences", workers=3, optimizer=still, **BLOCKS, max_steps=1), tmp_path)
    weights = weights_of(tmp_path)
    expected = initial(training.Blocks).state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_a_model_that_reads_its_weights_is_built_whole_and_told(tmp_path: Path) -> None:
    told = notes(run_group(job_of("ReadsItsWeights", workers=2, flops=True, **SHARDED), tmp_path))
    assert sum(one.startswith("flops: not counted: ") for one in told) == 1, "rank 0 alone says so"
    model = initial(training.ReadsItsWeights)
    losses = plain_loop(model, training.Pairs(), 7, 2, mean_loss, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    assert_close(tmp_path, model, losses)
    assert any(
        "ReadsItsWeights cannot be built shard by shard, so each worker builds it whole, in 84 bytes" in one
        for one in told
    ), told


@pytest.mark.full
@pytest.mark.slow
def test_a_start_from_pieces_from_weights_and_evaluations(tmp_path: Path) -> None:
    run_group(job_of("mlp", workers=3, epochs=1, **SHARDED), tmp_path / "first")
    for location, workers in ((tmp_path / "first", 2), (tmp_path / "first" / "weights.safetensors", 3)):
        folder = tmp_path / str(workers)
        run_group(job_of("mlp", workers=workers, epochs=2, init_from=str(location), **SHARDED), folder)
    straight = tmp_path / "straight"
    run_group(job_of("mlp", workers=1, epochs=2), straight)
    for name, tensor in weights_of(straight).items():
        assert torch.allclose(weights_of(tmp_path / "2")[name], tensor, rtol=1e-5, atol=1e-6)
    assert len(history_of(tmp_path / "3")) == 30, "weights alone begin at step 0"
    losses = []
    for strategy in ("ddp", "fsdp"):
        job = job_of("mlp", workers=3, shards=5, task="evaluate", strategy=strategy, init_from=str(straight))
        losses.append(measured(run_group(job, tmp_path / strategy))["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-7)


@pytest.mark.slow
def test_outputs_of_a_prediction_are_those_of_one_process(tmp_path: Path) -> None:
    """23 rows in batches of 7 on 3 workers: the last batch has rows for two of them. None tries a shard alone."""
    data = {"target": "tests.support.training:Pairs", "args": {"length": 23}}
    keys = {"task": "predict", "shards": 4, "inputs": "first"}
    outputs = []
    for workers, strategy in ((1, "ddp"), (3, "fsdp")):
        job = job_of("mlp", data, workers=workers, strategy=strategy, **keys)
        told = [message.text for message in run_group(job, tmp_path / strategy) if isinstance(message, Note)]
        says = [text for text in told if "since with strategy: fsdp no worker can run a shard by itself" in text]
        assert len(says) == (strategy == "fsdp")
        outputs.append(merged(job, tmp_path / strategy, 23).read())
    assert len(outputs[0]) == 23
    assert torch.allclose(outputs[1], outputs[0], rtol=1e-6, atol=1e-7)


class StopsAfter(StepControl):
    """Asks for a stop in a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before(self, step: int) -> None:
        self.wants_stop = step == self._step

    def leave(self) -> None:
        raise Stopped


@pytest.mark.slow
def test_a_stop_that_is_asked_for_keeps_the_step_and_goes_on_on_other_workers(tmp_path: Path) -> None:
    keys = {"shards": 4, "checkpoint": {"every_seconds": None}, **SHARDED}
    run_group(job_of("mlp", workers=3, **keys), tmp_path, StopsAfter(4))
    assert (tmp_path / "checkpoints" / "step-5.safetensors").exists()
    run_group(job_of("mlp", workers=4, **keys), tmp_path)
    model = initial(training.mlp)
    losses = plain_loop(model, training.Pairs(), 7, 2, mean_loss, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    assert_close(tmp_path, model, losses)


@pytest.mark.full
@pytest.mark.slow
def test_a_worker_whose_rows_are_set_aside_and_a_step_without_any(tmp_path: Path) -> None:
    """All rows of the first step and of the fourth, and all of worker 0's in the second."""
    order = Order(101, 0, 0, shuffle=True)
    bad = [order[at] for at in (*range(10), 13, *range(21, 28), 100)]
    data = {"target": "tests.support.bad_data:Broken", "args": {"raises": bad}}
    on_error = {"quarantine": len(bad)}
    run_group(job_of("mlp", data, workers=3, shards=5, on_error=on_error, **SHARDED), tmp_path)
    assert_as_good_loop(tmp_path, bad)


class Growing(nn.Module):
    """The exponential of numbers times a weight, which is infinite for large ones once the weight has grown."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(1, 1, bias=False), nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.body.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.body(inputs) + self.scale * inputs)


class LargeAtFirst(Dataset[Any]):
    """Rows whose number is large in the first batch of 6."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([40.0 if index < 6 else 0.1]), torch.tensor([100.0])


def absolute(model: nn.Module, chunks: Any) -> torch.Tensor:
    return nn.functional.l1_loss(model(chunks[0][0]), chunks[0][1])


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_dummy_batch_whose_gradient_is_not_finite_counts_nothing(tmp_path: Path, bitwise: bool) -> None:
    """Rank 0 runs its first batch again beside a shard of each step, rank 1 in the last step, without rows."""
    here = "tests.engine.sharded.test_fsdp"
    keys = {"loss": "torch.nn:L1Loss", "batch_size": 6, "shards": 3, "workers": 2, "epochs": 1, "shuffle": False}
    data = {"target": f"{here}:LargeAtFirst"}
    run_group(job_of({"target": f"{here}:Growing"}, data, bitwise=bitwise, **keys, **SHARDED), tmp_path)
    model = initial(Growing)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = plain_loop(model, LargeAtFirst(), 6, 1, absolute, optimizer, order_of=lambda _: range(13))
    assert model(torch.full((1, 1), 40.0)).isinf().all()
    assert_close(tmp_path, model, losses)


@pytest.mark.full
@pytest.mark.slow
def test_a_damaged_piece_is_told_and_the_checkpoint_before_it_goes_on(tmp_path: Path) -> None:
    keys = {"shards": 3, "checkpoint": {"every_steps": 4, "keep": 2}, **SHARDED}
    run_group(job_of("mlp", workers=3, **keys), tmp_path, StopsBefore(10))
    pieces = tmp_path / "checkpoints" / "pieces"
    assert sorted(path.name for path in pieces.iterdir()) == [
        f"step-{step}.{rank}-of-3.safetensors" for step in (4, 8) for rank in range(3)
    ]
    damaged = pieces / "step-8.2-of-3.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    told = notes(run_group(job_of("mlp", workers=2, **keys), tmp_path))
    assert any(
        "checkpoint step-8.safetensors is ignored" in one and "2-of-3.safetensors: is damaged" in one for one in told
    )
    model = initial(training.mlp)
    losses = plain_loop(model, training.Pairs(), 7, 2, mean_loss, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    assert_close(tmp_path, model, losses)
    assert {path.name.split(".")[0] for path in pieces.iterdir()} == {"step-28", "step-30"}, "others are removed"


@pytest.mark.full(but=["1"])
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_mixed_precision_is_near_full_precision(tmp_path: Path, workers: int) -> None:
    fsdp = {"mixed_precision": {"param": "bf16", "reduce": "fp32"}}
    run_group(job_of("mlp", workers=workers, shards=2, fsdp=fsdp, epochs=1, **SHARDED), tmp_path)
    model = initial(training.mlp)
    losses = plain_loop(model, training.Pairs(), 7, 1, mean_loss, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    got = [row["loss"] for row in history_of(tmp_path)]
    assert got == pytest.approx(losses, rel=0.05)
    assert got != pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"compile": True, "bitwise": True}, "compile: cannot be bitwise with strategy: fsdp"),
        ({"devices": ["cpu", "cpu"]}, "each with one device; got 2 devices each"),
    ],
)
def test_what_fsdp_contradicts(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        job_of("mlp", **{**SHARDED, **keys})


def test_an_unknown_block_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        ProcessExit, match=r"fsdp\.blocks: the model has no module of class Layer; it has Dropout, Linear"
    ):
        run_group(job_of("mlp", workers=2, fsdp={"blocks": ["Layer"]}, **SHARDED), tmp_path)


class Nested(nn.Module):
    """Layers in a list of lists, in which the layers alone are called."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), nn.Linear(6, 3)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.stages[0]:  # type: ignore[attr-defined]
            inputs = layer(inputs).tanh()
        outputs: torch.Tensor = self.stages[1](inputs)
        return outputs


def test_a_container_that_is_never_called_is_no_block() -> None:
    model, keys = Nested(), {"fsdp": {"blocks": ["ModuleList"]}, **SHARDED}
    says = r"fsdp\.blocks: a ModuleList is never called, so it cannot be a block; name the class of its items, Linear"
    with pytest.raises(JobError, match=says):
        choose_blocks(job_of("mlp", **keys), model)
    assert choose_blocks(job_of("mlp", **SHARDED), model) == [*model.stages[0], model.stages[1]]  # type: ignore[misc]
    with pytest.raises(
        JobError, match="a ParameterList is never called, so it cannot be a block; name a class whose"
    ):
        blocks_by_class("fsdp.blocks", ["ParameterList"], nn.Sequential(nn.ParameterList([torch.ones(2)])))


def test_workers_that_run_different_blocks_are_told(tmp_path: Path) -> None:
    """Each gathers a block of the same size, so nothing else would notice: the numbers would be wrong."""
    with pytest.raises(ProcessExit, match="the workers did not run the same blocks in the same order"):
        run_group(job_of("EitherBlock", workers=2, **SHARDED), tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Adafactor", "Adafactor cannot update the parts of parameters"),
        ("Rprop", "Rprop cannot update the parts of parameters"),
    ],
)
def test_an_optimizer_that_takes_no_shards_is_refused_by_name(tmp_path: Path, name: str, says: str) -> None:
    keys = {"optimizer": {"target": f"torch.optim:{name}"}, **SHARDED}
    with pytest.raises(ProcessExit, match=f"JobError: optimizer: {says}"):
        run_group(job_of("mlp", workers=2, **keys), tmp_path)


def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
    """A step whose loss adds a penalty on all parameters, after the model has run."""
    losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses + 0.01 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def penalised_sum(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """The same, of which torch makes a tensor of shards without an error."""
    losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.sum() + sum(parameter.square().sum() for parameter in model.parameters()), len(losses)


class InnerWeights(training.Blocks):
    """A model whose own forward uses the weights of a block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.get_parameter("layers.0.linear1.weight")
        outputs: torch.Tensor = super().forward(tokens) + (self.embedding(tokens) @ weight.t()).sum()
        return outputs


@pytest.mark.full(but=["model"])
@pytest.mark.parametrize("name", ["penalised", "penalised_sum", "model"])
def test_code_that_meets_shards_is_told_of_them(tmp_path: Path, name: str) -> None:
    what = "model" if name == "model" else "step"
    penalty = {"step": f"tests.engine.sharded.test_fsdp:{name}", "loss": None}
    model = {"target": "tests.engine.sharded.test_fsdp:InnerWeights"}
    job = (
        job_of(model, "Sentences", workers=2, **BLOCKS)
        if what == "model"
        else job_of("mlp", workers=2, **penalty, **SHARDED)
    )
    says = (
        rf"step 0, shard \d: ({what} raised .*|the loss returned .*); with strategy: fsdp the parameters of a block"
    )
    with pytest.raises(ProcessExit, match=says):
        run_group(job, tmp_path)


def test_a_jobs_fingerprint_does_not_know_the_strategy() -> None:
    ddp, fsdp = job_of("mlp"), job_of("mlp", **SHARDED)
    assert ddp.fingerprint() == fsdp.fingerprint()
    mixed = job_of("mlp", fsdp={"mixed_precision": {"param": "bf16"}}, **SHARDED)
    assert mixed.fingerprint() != ddp.fingerprint()


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize("bitwise", [False, True])
def test_workers_of_ray_train_it(run_in_session: Run, bitwise: bool) -> None:
    """On 3 of them, then 2, then 3; some are killed in a step, and the others go on with what all had kept."""
    keys = {**keys_of(), "shards": 4, "shuffle": True, "bitwise": bitwise, "checkpoint": {"every_steps": 5}}
    for epochs, workers, at in ((1, 3, 12), (2, 2, 33), (3, 3, None)):  # 26 steps an epoch
        inject = "" if at is None else f"kill worker 1 at step {at}"
        result = run_in_session(**{**keys, "workers": workers, "epochs": epochs, "inject": inject, **SHARDED})
    assert [interruption["ranks"] for interruption in result.interruptions] == [[1], [1]]
    model = initial(training.mlp)
    plain_loop(model, training.Pairs(), 4, 3, mean_loss, torch.optim.SGD(model.parameters(), 0.1))
    for name, tensor in model.state_dict().items():
        assert torch.allclose(result.weights[name], tensor, rtol=1e-5, atol=1e-6), name
    if bitwise:
        undisturbed = run_in_session(**{**keys, "workers": 0, "epochs": 3, "name": "undisturbed"})
        assert result.weights_sha256 == undisturbed.weights_sha256
        assert told(result) == told(undisturbed)


class Overflows(nn.Module):
    """Two layers; where a row begins with a large number, gradients of the second one's last rows are infinite.

    With `scalar`, also parameters that every worker holds whole: a scalar, and one of another dtype.
    """

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.loud = nn.Linear(6, 3)
        if scalar:
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.offset = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        added = self.loud(inputs)
        if self.training and bool((inputs[:, 0] > 1.5).any()):
            added.register_hook(lambda gradient: gradient * torch.tensor([1.0, 1.0, torch.inf]).to(gradient))
        outputs: torch.Tensor = self.body(inputs) + added
        return outputs * self.scale + self.offset if hasattr(self, "scale") else outputs


def scaled_loop(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> list[dict[str, float]]:
    """Plain torch in one process with the loss scaler, in the shards of the jobs here; the steps' loss and rate."""
    scheduler, scaler = training.warm_up(optimizer), torch.amp.GradScaler("cpu")
    data, told = training.Pairs(), []
    for epoch in range(2):
        order = Order(len(data), 0, epoch, shuffle=True)
        for start in range(0, len(data), 7):
            rows = [order[at] for at in range(start, min(start + 7, len(data)))]
            total = 0.0
            told.append({"learning_rate": optimizer.param_groups[0]["lr"]})
            for x, y in zip(data.inputs[rows].chunk(4), data.targets[rows].chunk(4), strict=True):
                with torch.autocast("cpu", torch.float16):
                    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                scaler.scale(loss / len(rows)).backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= before:
                scheduler.step()
            told[-1]["loss"] = total / len(rows)
    return told


@pytest.mark.full(but=["1-True-SGD"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "scalar", "name"), [(1, True, "SGD"), (2, True, "SGD"), (2, True, "fused AdamW"), (2, False, "SGD")]
)
def test_workers_skip_the_updates_that_fp16_overflowed_in_one_workers_part(
    tmp_path: Path, workers: int, scalar: bool, name: str
) -> None:
    """Of the loud layer's three rows, the second of two workers holds the one whose gradients are infinite."""
    cls, args = OPTIMIZERS[name]
    keys = {"optimizer": {"target": f"torch.optim:{cls.__name__}", "args": args}, "precision": "fp16", "shards": 4}
    keys |= {"scheduler": "tests.support.training:warm_up", "grad_clip": 0.3, "checkpoint": {"every_steps": 4}}
    # As one worker alone, FSDP runs where it computes in other dtypes: here in the same.
    keys |= {"fsdp": {"mixed_precision": {"param": None, "reduce": "fp32"}, "offload": True}, **SHARDED}
    job = job_of(
        {"target": "tests.engine.sharded.test_fsdp:Overflows", "args": {"scalar": scalar}}, workers=workers, **keys
    )
    run_group(job, tmp_path, StopsBefore(10))
    run_group(job, tmp_path)
    model = initial(Overflows, scalar)
    steps = scaled_loop(model, cls(model.parameters(), **args), 0.3)
    rates = [row["learning_rate"] for row in history_of(tmp_path)]
    assert rates == [step["learning_rate"] for step in steps]
    assert len(set(rates)) < len(rates) - 3 and len(set(rates)) > 3, "some steps are skipped, and some are not"
    assert_close(tmp_path, model, [step["loss"] for step in steps], 1e-5)


@pytest.mark.parametrize(("number", "skips"), [(1e20, False), (torch.inf, True), (torch.nan, True)])
def test_fp16_skips_an_update_by_its_numbers_and_not_by_their_norm(number: float, skips: bool) -> None:
    """The norm of four of 1e20 is no number of float32, and each worker has a norm of its own."""
    parts: Any = ShardedParts.__new__(ShardedParts)
    parts.sharded = SimpleNamespace(world=World())
    with alone(needs_group=True):
        *_, last = parts.to_unscale([torch.full((4,), number), torch.ones(2)])
    assert bool(last.grad.isinf()) == skips


class Casts(nn.Sequential):
    """Layers in blocks; it counts the casts of their weights that live when its forward ends."""

    found = 0

    def __init__(self, layers: int) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)),
            nn.Linear(8, 3),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with LiveCasts() as live:
            outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
            Casts.found = live.count()
            assert live.seen > len(self) - 3, "nothing was cast"
        return outputs if self.training else outputs.float() * 0 + Casts.found


class LiveCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the half-precision copies that are made of matrices of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies: list[weakref.ref[Any]] = []

    @property
    def seen(self) -> int:
        return len(self._copies)

    def count(self) -> int:
        return sum(copy() is not None for copy in self._copies)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        is_cast = function in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)
        if is_cast and made.dtype == torch.bfloat16 and made.shape == (8, 8):
            self._copies.append(weakref.ref(made.untyped_storage()))
        return made


def casts(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric: what the model has counted."""
    return torch.full((len(target),), float(Casts.found))


@pytest.mark.full(but=["evaluate-fsdp"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "strategy"), [("train", "fsdp"), ("evaluate", "fsdp"), ("predict", "fsdp"), ("predict", "ddp")]
)
def test_no_copies_of_the_weights_stay_with_half_precision(tmp_path: Path, task: str, strategy: str) -> None:
    """One more may live, of the layer that runs. A prediction's is so with ddp too."""
    most = []
    for layers in (3, 9):
        keys: dict[str, Any] = {"task": task, "precision": "bf16", "strategy": strategy}
        keys |= {"max_steps": 2} if task == "train" else {}
        keys |= (
            {"inputs": "first"}
            if task == "predict"
            else {"metrics": {"casts": "tests.engine.sharded.test_fsdp:casts"}}
        )
        job = job_of(
            {"target": "tests.engine.sharded.test_fsdp:Casts", "args": {"layers": layers}}, workers=2, **keys
        )
        told = run_group(job, tmp_path / str(layers))
        if task == "train":
            most.append(max(row["casts"] for row in history_of(tmp_path / str(layers))))
        elif task == "evaluate":
            most.append(measured(told)["casts"])
        else:
            most.append(merged(job, tmp_path / str(layers), 101).read().max().item())
    assert max(most) <= 1


class Siblings(nn.Module):
    """What casts weights as they are, as views and in part: a convolution, an encoder layer, an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 16, 3, padding=1)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.conv(inputs).transpose(1, 2))
        mixed = torch.utils.checkpoint.checkpoint(self.head, hidden, use_reentrant=False)
        attended = self.attention(hidden, hidden.flip(1), hidden)[0].mean(1)
        outputs: torch.Tensor = (self.head.weight @ attended.t()).t() + mixed.mean(1)
        return outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_anew_gives_the_same_numbers(dtype: torch.dtype) -> None:
    """But for the head, which is used twice: its gradients are added in another dtype."""
    torch.manual_seed(0)
    model, inputs = Siblings(), torch.randn(5, 6, 7)

    def gradients(context: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with context(), torch.autocast("cpu", dtype):
            loss = model(inputs).square().sum()
        loss.backward()
        return {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    kept, anew = gradients(nullcontext), gradients(casting_anew)
    assert len(kept) == len(anew) == len(list(model.parameters()))
    assert [name for name, value in anew.items() if not torch.equal(value, kept[name])] == ["head.weight"]
    assert (anew["head.weight"] - kept["head.weight"]).norm() <= 0.01 * kept["head.weight"].norm()


def test_casting_anew_of_second_derivatives_and_of_a_weight_that_changed() -> None:
    layer, inputs = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)

    def penalty(context: Any) -> torch.Tensor:
        layer.zero_grad()
        with context(), torch.autocast("cpu", torch.bfloat16):
            (slope,) = torch.autograd.grad(layer(inputs).tanh().float().sum(), inputs, create_graph=True)
            slope.square().sum().backward()  # type: ignore[no-untyped-call]
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    assert torch.allclose(penalty(casting_anew), penalty(nullcontext), rtol=1e-2)
    with casting_anew(), torch.autocast("cpu", torch.bfloat16):
        loss = layer(inputs).float().sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \[8, 8\] was changed in place after the forward"):
        loss.backward()
    assert torch.is_autocast_cache_enabled()
