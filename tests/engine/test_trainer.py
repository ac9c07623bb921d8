"""Training is that of one plain process: the same losses and weights, and with `bitwise` the same bits everywhere."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from benchmarks.calls import calls_of_a_step
from dp_ray.engine.optimizer import total_norm
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from tests.support import training
from tests.support.group import ProcessExit, history_of, run_group, weights_of
from tests.support.training import plain_loop
from tests.support.trainings import ADAMW, SGD, Chunks, assert_close, chunked_statistics, initial, job_of, mean_loss


@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
def test_sizes_that_divide_nothing_end_at_a_plain_loops_weights(tmp_path: Path, bitwise: bool) -> None:
    run_group(job_of("mlp", workers=3, shards=5, bitwise=bitwise), tmp_path)
    model = initial(training.mlp)
    losses = plain_loop(model, training.Pairs(), 7, 2, mean_loss, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    assert len(losses) == 30
    assert_close(tmp_path, model, losses)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["tests.support.training:token_loss", "torch.nn:CrossEntropyLoss"])
def test_ragged_rows_count_by_their_tokens(tmp_path: Path, loss: str) -> None:
    model_of = {"target": "tests.support.training:Transformer", "args": {"dropout": 0.0}}
    job = job_of(model_of, "Sentences", workers=3, shards=5, loss=loss, epochs=1, bitwise=True)
    run_group(job, tmp_path)
    model = initial(training.Transformer, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = plain_loop(model, training.Sentences(), 7, 1, mean_loss, optimizer)
    assert_close(tmp_path, model, losses, 3e-6)  # a batch of attention adds up in another order than its shards


def test_class_weights_and_a_loss_of_elements_are_torchs_means(tmp_path: Path) -> None:
    weight = [0.2, 1.0, 3.0]
    loss = {"target": "torch.nn:CrossEntropyLoss", "args": {"weight": weight, "ignore_index": 1}}
    run_group(job_of("mlp", workers=2, shards=3, loss=loss, epochs=1), tmp_path / "classes")
    model = initial(training.mlp)

    def of_classes(model: nn.Module, chunks: Chunks) -> torch.Tensor:
        inputs, targets = (torch.cat(column) for column in zip(*chunks, strict=True))
        return nn.functional.cross_entropy(model(inputs), targets, torch.tensor(weight), ignore_index=1)

    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    assert_close(tmp_path / "classes", model, plain_loop(model, training.Pairs(), 7, 1, of_classes, optimizer), 2e-6)


@pytest.mark.parametrize("workers", [1, 3])
def test_batchnorm_is_that_of_dataparallel(tmp_path: Path, workers: int) -> None:
    """101 images in batches of 14: a chunk of one row would have no statistics."""
    job = job_of("conv", "Images", workers=workers, shards=5, batch_size=14, epochs=1)
    run_group(job, tmp_path)
    model = initial(training.conv)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = plain_loop(model, training.Images(), 14, 1, chunked_statistics, optimizer, shards=5)
    assert_close(tmp_path, model, losses, 2e-6)


AUGMENTED = {"target": "tests.support.training:Pairs", "args": {"length": 70, "augment": True}}
BITWISE: dict[str, dict[str, Any]] = {
    "an MLP with dropout": {"model": {"target": "tests.support.training:mlp", "args": {"dropout": 0.5}}},
    "a conv net with BatchNorm": {"model": "tests.support.training:conv", "dataset": "tests.support.training:Images"},
    "a transformer with AdamW, clipping and warm-up": {
        "model": "tests.support.training:Transformer",
        "dataset": "tests.support.training:Sentences",
        "optimizer": ADAMW,
        "grad_clip": 0.5,
        "scheduler": "tests.support.training:warm_up",
        "loss": "tests.support.training:token_loss",
        "epochs": 1,
    },
    "random augmentation": {"dataset": AUGMENTED, "metrics": {"right": "tests.support.training:right"}},
}


def ends(job: Job, folder: Path) -> tuple[dict[str, bytes], str]:
    """The bits at which a training ends, and those of its history."""
    run_group(job, folder)
    weights = {name: tensor.numpy().tobytes() for name, tensor in weights_of(folder).items()}
    return weights, repr(history_of(folder))


FIRST, *OTHERS = BITWISE


@pytest.mark.full(but=["an MLP with dropout"])
@pytest.mark.parametrize("what", [FIRST, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_bitwise_is_the_same_bits_on_any_number_of_workers(tmp_path: Path, what: str) -> None:
    keys = {"batch_size": 33, "shards": 8, "bitwise": True, **BITWISE[what]}
    first = ends(job_of("mlp", workers=1, **keys), tmp_path / "1")
    for workers in (2, 3, 4, 5, 8):
        assert ends(job_of("mlp", workers=workers, **keys), tmp_path / str(workers)) == first, f"{workers} workers"
    other = ends(job_of("mlp", workers=2, **{**keys, "seed": 1}), tmp_path / "other seed")
    assert other[0] != first[0]


@pytest.mark.slow
def test_loader_processes_change_no_bit(tmp_path: Path) -> None:
    keys = {"batch_size": 33, "shards": 8, "bitwise": True, "dataset": AUGMENTED, "workers": 2}
    two = ends(job_of("mlp", **keys, loader={"processes": 2}), tmp_path / "2")  # the first job's workers fork them
    assert ends(job_of("mlp", **keys), tmp_path / "0") == two


@pytest.mark.slow
def test_without_augmentation_or_dropout_the_seeds_of_both_say_nothing(tmp_path: Path) -> None:
    """So that the tests above cannot pass because nothing random happened."""
    plain = ends(
        job_of("mlp", workers=1, dataset={"target": "tests.support.training:Pairs", "args": {"length": 70}}), tmp_path
    )
    augmented = ends(job_of("mlp", workers=1, dataset=AUGMENTED), tmp_path / "a")
    dropped = {"target": "tests.support.training:mlp", "args": {"dropout": 0.5}}
    data = {"target": "tests.support.training:Pairs", "args": {"length": 70}}
    dropout = ends(job_of(dropped, data, workers=1), tmp_path / "d")
    assert len({str(one[0]) for one in (plain, augmented, dropout)}) == 3


@pytest.mark.full(but=["33-True", "3-False"])
@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("rows", [33, 3])
def test_workers_without_rows_neither_hang_nor_disturb(tmp_path: Path, rows: int, bitwise: bool) -> None:
    """33 rows in batches of 30 leave 5 of 8 workers without rows in the last step; 3 rows from the first step on."""
    data = {"target": "tests.support.training:Pairs", "args": {"length": rows}}
    keys = {"workers": 8, "batch_size": 30, "find_unused_parameters": False, "bitwise": bitwise}
    run_group(job_of("mlp", data, **keys), tmp_path)
    model = initial(training.mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = plain_loop(model, training.Pairs(rows), 30, 2, mean_loss, optimizer)
    assert_close(tmp_path, model, losses)


@pytest.mark.parametrize("workers", [1, 3])
def test_unused_frozen_and_grouped_parameters_are_as_in_plain_torch(tmp_path: Path, workers: int) -> None:
    groups = [{"match": "bias", "args": {"weight_decay": 0.0}}, {"match": "^1", "args": {"lr": 0.02}}]
    optimizer = {"target": "torch.optim:AdamW", "args": {"lr": 0.01, "weight_decay": 0.1}, "groups": groups}
    job = job_of("partly_used", workers=workers, shards=3, optimizer=optimizer, epochs=1, bitwise=True)
    run_group(job, tmp_path)
    model = initial(training.partly_used)
    named = dict(model.named_parameters())
    decayed: list[Any] = [
        {
            "params": [value for name, value in named.items() if "bias" in name and value.requires_grad],
            "weight_decay": 0.0,
        },
        {"params": [named["1.weight"]], "lr": 0.02},
        {"params": [named["0.weight"], named["unused.weight"]]},
    ]
    before = copy.deepcopy(model.state_dict())
    plain = torch.optim.AdamW(decayed, 0.01, weight_decay=0.1)
    assert_close(tmp_path, model, plain_loop(model, training.Pairs(), 7, 1, mean_loss, plain), 2e-5)
    weights = weights_of(tmp_path)
    assert torch.equal(weights["unused.weight"], before["unused.weight"]), "decayed, though no gradient ever came"
    assert torch.equal(weights["frozen.weight"], before["frozen.weight"])
    assert not torch.equal(weights["0.weight"], before["0.weight"])


def test_an_unused_parameter_that_may_not_be_looked_for_is_named(tmp_path: Path) -> None:
    job = job_of("partly_used", workers=2, find_unused_parameters=False)
    with pytest.raises(
        ProcessExit, match=r"step 0: parameters were not used: unused\.weight; set find_unused_parameters: true"
    ):
        run_group(job, tmp_path)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    job = job_of("Transformer", "Sentences", workers=2, loss="tests.support.training:token_loss", epochs=1)
    run_group(job, tmp_path)
    weights = weights_of(tmp_path)
    assert torch.equal(weights["head.weight"], weights["embedding.weight"])
    assert not torch.equal(weights["head.weight"], initial(training.Transformer).state_dict()["head.weight"])


@pytest.mark.slow
def test_the_whole_batchs_norm_is_clipped_and_the_schedule_goes_by_steps(tmp_path: Path) -> None:
    scheduler = {"target": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 4, "gamma": 0.5}}
    run_group(job_of("mlp", workers=3, shards=5, grad_clip=0.2, scheduler=scheduler), tmp_path)
    model = initial(training.mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    norms: list[float] = []
    rates: list[float] = []

    def clip() -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
        rates.append(optimizer.param_groups[0]["lr"])

    losses = plain_loop(
        model, training.Pairs(), 7, 2, mean_loss, optimizer, after_backward=clip, after_step=schedule.step
    )
    assert_close(tmp_path, model, losses)
    rows = history_of(tmp_path)
    assert [row["learning_rate"] for row in rows] == rates
    assert torch.allclose(torch.tensor([row["gradient_norm"] for row in rows]), torch.tensor(norms), rtol=1e-5)
    assert max(norms) > 0.2, "nothing was clipped"


def test_a_schedule_by_epochs_and_one_that_watches(tmp_path: Path) -> None:
    by_epoch = {"target": "torch.optim.lr_scheduler:ExponentialLR", "args": {"gamma": 0.1}, "per": "epoch"}
    run_group(job_of("mlp", workers=1, scheduler=by_epoch, epochs=3), tmp_path / "epoch")
    rates = [row["learning_rate"] for row in history_of(tmp_path / "epoch")]
    assert rates == pytest.approx([0.1] * 15 + [0.01] * 15 + [0.001] * 15)
    plateau = {
        "target": "torch.optim.lr_scheduler:ReduceLROnPlateau",
        "args": {"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs"},
        "per": "epoch",
    }
    run_group(job_of("mlp", workers=1, scheduler=plateau, epochs=3), tmp_path / "plateau")
    rates = [row["learning_rate"] for row in history_of(tmp_path / "plateau")]
    assert rates == [0.1] * 30 + [0.05] * 15, "no epoch is better by 10 than the one before it"
    for target in (plateau["target"], ReduceLROnPlateau):
        with pytest.raises(JobError, match="set per: epoch"):
            job_of("mlp", workers=1, scheduler={**plateau, "target": target, "per": "step"})
    own = {**plateau, "target": "tests.engine.test_trainer:plateau_of_a_function", "per": "step"}
    with pytest.raises(ProcessExit, match="set per: epoch"):
        run_group(job_of("mlp", workers=1, scheduler=own), tmp_path / "step")


def plateau_of_a_function(optimizer: torch.optim.Optimizer, **args: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, **args)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "step 0, shard 5: model raised"),
        ({"step": "tests.engine.test_trainer:own_step"}, "step 0, shard 5: step raised"),
        ({"loop": "tests.engine.test_trainer:own_loop"}, "step 0, shard 5: own_loop.<lambda> raised"),
        (
            {"shards": 15, "batch_size": 29},
            "29 rows in 15 shards are 2, ..., 1; set shards: 10, or another batch_size",
        ),
        ({"shards": 3, "batch_size": 100, "workers": 2}, "set another batch_size, or drop_last: true"),
    ],
)
def test_batch_norm_on_a_shard_of_one_row_is_told_what_to_change(
    tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    given = {"workers": 1, "shards": 6, "batch_size": 16, "epochs": 1, **keys}
    if "loop" in keys:
        given |= {"loss": None, "optimizer": None}
    elif "step" in keys:
        given["loss"] = None
    with pytest.raises(ProcessExit) as raised:
        run_group(job_of({"target": "tests.engine.test_trainer:norms"}, **given), tmp_path)
    assert says in str(raised.value) and "a BatchNorm needs two rows in each shard: " in str(raised.value)
    if given["batch_size"] == 16:
        assert "16 rows in 6 shards are 3, 3, 3, 3, 3, 1; set shards: 4 or 8, or another" in str(raised.value)


def own_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def own_loop(run: Any) -> None:
    run.optimizer(torch.optim.SGD(run.model.parameters(), lr=0.1))
    for step in run.steps():
        step.backward(lambda batch: own_step(run.model, batch), run.model)


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))


@pytest.mark.full(but=["fp16"])
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_the_same_bits_too(tmp_path: Path, precision: str) -> None:
    keys = {"precision": precision, "bitwise": True, "shards": 4, "epochs": 1}
    one = ends(job_of("mlp", workers=1, **keys), tmp_path / "1")
    assert ends(job_of("mlp", workers=3, **keys), tmp_path / "3") == one
    model = initial(training.mlp)
    losses = plain_loop(model, training.Pairs(), 7, 1, mean_loss, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    got = [row["loss"] for row in history_of(tmp_path / "3")]
    assert got == pytest.approx(losses, rel=0.05)
    assert got != pytest.approx(losses, rel=1e-5), "that was full precision"


@pytest.mark.slow
def test_a_step_of_the_users_own_goes_past_forward(tmp_path: Path) -> None:
    """Items that are mappings, a model without a forward, metrics of what the step names."""
    keys = {"loss": None, "step": "tests.support.training:own_step", "dataset": "tests.support.training:Mappings"}
    job = job_of("Headed", **keys, workers=3, shards=5, metrics={"right": "tests.support.training:right"}, epochs=1)
    run_group(job, tmp_path)
    model: Any = initial(training.Headed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)

    def loss(model: Any, chunks: Chunks) -> torch.Tensor:
        inputs, targets = (torch.cat(column) for column in zip(*chunks, strict=True))
        return nn.functional.cross_entropy(model.encode(inputs), targets)

    assert_close(tmp_path, model, plain_loop(model, training.Pairs(), 7, 1, loss, optimizer))
    shares = [row["right"] for row in history_of(tmp_path)]
    assert all(share * 7 == pytest.approx(round(share * 7)) for share in shares[:-1])


def test_max_steps_and_evaluations_at_their_turns(tmp_path: Path) -> None:
    job = job_of(
        *("mlp",),
        workers=2,
        max_steps=20,
        eval={"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 23}}, "every_steps": 6},
        metrics={"right": "tests.support.training:right"},
    )
    run_group(job, tmp_path)
    rows = history_of(tmp_path)
    assert len(rows) == 20
    assert [row["step"] for row in rows if row["eval_loss"] is not None] == [5, 11, 17, 19]
    assert [row["step"] for row in rows if row["epoch_loss"] is not None] == [14]
    counts = [7] * 14 + [3]
    losses = [row["loss"] * count for row, count in zip(rows[:15], counts, strict=True)]
    assert rows[14]["epoch_loss"] == pytest.approx(sum(losses) / 101, rel=1e-6)
    model = training.mlp()
    model.load_state_dict(weights_of(tmp_path))
    data = training.Pairs(23)
    expected = nn.functional.cross_entropy(model(data.inputs), data.targets).item()
    assert rows[-1]["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert rows[-1]["eval_right"] == pytest.approx((model(data.inputs).argmax(1) == data.targets).double().mean())


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"loss": "tests.support.models:mean_loss"},
            r"step 0, shard 0: the loss returned one number.*reduction='none'",
        ),
        ({"loss": "tests.support.training:constant_loss"}, "does not depend on any parameter"),
        ({"model": "tests.support.models:Doubler"}, "has no parameter that requires a gradient"),
        ({"dataset": "tests.support.models:Rows"}, r"needs items that are \(inputs, target\)"),
        ({"optimizer": {**SGD, "groups": [{"match": "nothing", "args": {}}]}}, "'nothing' matches no trainable"),
        (
            {"optimizer": {**SGD, "groups": [{"match": "bias", "args": {"weight_decy": 0}}]}},
            r"optimizer.groups.0.args: torch.optim:SGD takes no 'weight_decy', but lr, .*did you mean 'weight_decay'",
        ),
        ({"optimizer": "builtins:list"}, "must give a torch.optim.Optimizer, got list"),
        ({"step": "tests.support.training:strange_step", "loss": None}, r"mapping with the keys \['los'\]"),
    ],
)
def test_what_cannot_be_trained_is_told(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ProcessExit, match=says):
        run_group(job_of("mlp", workers=1, **keys), tmp_path)


def test_sync_batchnorm_needs_a_worker_for_each_shard() -> None:
    with pytest.raises(JobError, match=r"sync_batchnorm: needs a worker for each shard.*5 shards on 3 workers"):
        job_of("conv", "Images", workers=3, shards=5, sync_batchnorm=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_in_fp16_whose_sum_fp16_cannot_hold_has_torchs_mean(tmp_path: Path, workers: int) -> None:
    heavy = {"loss": "tests.support.training:heavy", "metrics": {"heavy": "tests.support.training:heavy"}}
    evaluated = {"dataset": "tests.support.training:Pairs"}
    keys = {"batch_size": 101, "epochs": 1, "workers": workers, "shards": 2 if workers > 1 else 1}
    run_group(job_of("HalfMlp", **heavy, **keys, eval=evaluated), tmp_path)
    (row,) = history_of(tmp_path)
    assert [row[name] for name in ("loss", "heavy", "eval_loss", "eval_heavy")] == [1000.0] * 4
    assert all(weight.isfinite().all() for weight in weights_of(tmp_path).values())


@pytest.mark.slow
def test_a_torchscript_module_trains_as_the_module_that_it_was_made_of(tmp_path: Path) -> None:
    keys = {
        "batch_size": 22,
        "shards": 4,
        "bitwise": True,
        "epochs": 2,
        "metrics": {"right": "tests.support.training:right"},
    }
    keys |= {"eval": {"dataset": "tests.support.training:Images"}, "workers": 1}
    first = ends(job_of("conv", "Images", **keys), tmp_path / "eager")
    for workers in (1, 3):
        job = job_of("scripted", "Images", **{**keys, "workers": workers})
        assert ends(job, tmp_path / str(workers)) == first, f"{workers} workers"


def test_a_torchscript_module_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ProcessExit, match="JobError: compile: the model is a TorchScript module"):
        run_group(job_of("scripted", "Images", compile=True), tmp_path)


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float64], [torch.float32, torch.float64], []])
def test_the_norm_of_the_gradients_is_torchs_to_the_bit(dtypes: list[torch.dtype]) -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=draw).to(dtype) for dtype in dtypes for size in (3, 1000, 77)]
    assert torch.equal(total_norm(gradients), nn.utils.get_total_norm(gradients))


@pytest.mark.slow
def test_a_step_makes_few_calls_of_our_own() -> None:
    """More than these are a sign that what most jobs do not use is asked for in each step."""
    found = calls_of_a_step()
    listing = "\n".join(f"{count:.0f} {call.file}: {call.function}" for call, count in found.items())
    assert found.total() <= 120, listing
    assert len(found) <= 87, listing
    assert len({call.file for call in found}) <= 25, listing
