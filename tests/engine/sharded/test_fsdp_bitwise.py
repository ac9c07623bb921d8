"""`bitwise` with `strategy: fsdp`: the bits of one process, on any number of workers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.engine.sharded.state import FsdpRound, TreeScatter
from dp_ray.engine.update import declared_step
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.plan.order import Order
from tests.support.cases import USUAL, job_for
from tests.support.group import ProcessExit, StopsBefore, history_of, run_group, weights_of
from tests.support.trainings import ADAMW, job_of

BLOCKS: dict[str, Any] = {
    "model": {"target": "tests.support.training:Blocks", "args": {"dropout": 0.2}},
    "loss": "tests.support.training:token_loss",
    "optimizer": ADAMW,
    "epochs": 1,
    "batch_size": 14,
    "shards": 6,
    "grad_clip": 0.5,
    "bitwise": True,
    "eval": {"dataset": {"target": "tests.support.training:Sentences"}},
}


def ends(job: Job, folder: Path, stops: int | None = None) -> tuple[dict[str, bytes], str]:
    """The bits at which a training ends, and those of its history."""
    run_group(job, folder, None if stops is None else StopsBefore(stops))
    if stops is not None:
        return {}, ""
    weights = {name: tensor.contiguous().numpy().tobytes() for name, tensor in weights_of(folder).items()}
    return weights, repr(history_of(folder))


@pytest.mark.slow
def test_blocks_dropout_adamw_and_clipping_are_the_bits_of_one_process(tmp_path: Path) -> None:
    expected = ends(job_of("Blocks", "Sentences", workers=1, **BLOCKS), tmp_path / "ddp")
    for workers in (1, 2, 3, 4):
        job = job_of("Blocks", "Sentences", workers=workers, strategy="fsdp", **BLOCKS)
        assert ends(job, tmp_path / str(workers)) == expected, f"{workers} workers"


CASES: dict[str, dict[str, Any]] = {
    "unused, frozen, in part used": {
        "has": ["frozen", "sometimes", "unused", "wide"],
        "optimizer": "SGD with decay",
        "finds_unused": True,
        "shards": 5,
    },
    "buffers, dropout, clipping, a schedule, AdamW, few rows": {
        "has": ["dropout", "noise", "statistics"],
        "optimizer": "AdamW",
        "scheduler": "warm-up",
        "grad_clip": 0.3,
        "eval_rows": 9,
        "batch_size": 5,
        "rows": 13,
        "shards": 6,
    },
    "what cannot be sharded": {
        "has": ["channels_last", "complex", "double", "scalar", "transposed", "sparse"],
        "grad_clip": 0.3,
        "shards": 7,
    },
    "a part that steps after the first leave unused": {
        "has": ["sometimes"],
        "optimizer": "SGD with decay",
        "batch_size": 4,
        "shards": 4,
    },
    "fused AdamW": {"has": ["sometimes"], "optimizer": "fused AdamW", "shards": 4, "finds_unused": True},
}


@pytest.mark.full
@pytest.mark.slow
def test_pieced_models_are_the_bits_of_one_process(tmp_path: Path) -> None:
    """All cases in one test, whose processes import torch's FSDP once."""
    for number, (what, given) in enumerate(CASES.items()):
        case = {**USUAL, **given}
        expected = ends(job_for(case, 1), tmp_path / str(number))
        for workers in (2, 3, 4):
            got = ends(job_for(case, workers, "fsdp"), tmp_path / f"{number} on {workers}")
            assert got == expected, f"{what}: {workers} workers"


@pytest.mark.full
@pytest.mark.slow
def test_vectors_of_a_fused_optimizer_end_where_they_do_in_one_process(tmp_path: Path) -> None:
    """Its kernel rounds the last numbers of a tensor otherwise, and these are others where a tensor is cut."""
    fused = {"target": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "fused": True}}
    keys = {"shards": 3, "bitwise": True, "optimizer": fused}
    expected = ends(job_of("mlp", workers=1, **keys), tmp_path / "ddp")
    assert ends(job_of("mlp", workers=3, strategy="fsdp", **keys), tmp_path / "fsdp") == expected


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"precision": "fp16"}, "precision: fp16 cannot be bitwise with strategy: fsdp"),
        ({"fsdp": {"offload": True}}, "fsdp.offload: cannot be bitwise"),
    ],
)
def test_what_cannot_be_bitwise(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        job_of("mlp", bitwise=True, strategy="fsdp", **keys)


@pytest.mark.parametrize("bitwise", [True, False])
def test_a_worker_alone_updates_in_one_thread_if_others_must_get_its_bits(
    bitwise: bool,
) -> None:
    """Where several threads cut a tensor, its last numbers are rounded otherwise."""
    model, threads = nn.Linear(2, 2), []
    step = declared_step(job_of("mlp", workers=1, strategy="fsdp", bitwise=bitwise), model, torch.device("cpu"))
    step.optimizers[0].register_step_pre_hook(lambda *_: threads.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        step.step()
        assert (threads, torch.get_num_threads()) == ([1 if bitwise else 2], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_optimizer_that_may_look_at_whole_parameters_is_refused_by_name(tmp_path: Path, workers: int) -> None:
    keys = {"bitwise": True, "strategy": "fsdp", "optimizer": {"target": "torch.optim:Adafactor"}}
    with pytest.raises(ProcessExit, match="Adafactor may use all of a parameter to update a part of it"):
        run_group(job_of("mlp", workers=workers, **keys), tmp_path)


@pytest.mark.full
@pytest.mark.slow
def test_mixed_precision_is_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    """Sums are in the dtype of `reduce`, on a worker that is alone too."""
    fsdp = {"mixed_precision": {"param": "bf16", "reduce": "bf16"}}
    keys = {"shards": 4, "bitwise": True, "strategy": "fsdp", "fsdp": fsdp, "epochs": 1}
    expected = ends(job_of("mlp", workers=1, **keys), tmp_path / "1")
    assert ends(job_of("mlp", workers=3, **keys), tmp_path / "3") == expected


class Gated(nn.Module):
    """Two blocks with a gate of their own each, and one that they share."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), shared) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        outputs: torch.Tensor = self.head(inputs)
        return outputs


@pytest.mark.slow
def test_half_precision_is_the_same_bits_where_blocks_share_a_weight(tmp_path: Path) -> None:
    """As in one process, the gradients of both are added in the dtype of the weight's cast."""
    keys = {"shards": 4, "bitwise": True, "precision": "bf16", "epochs": 1}
    model = {"target": "tests.engine.sharded.test_fsdp_bitwise:Gated"}
    expected = ends(job_of(model, workers=1, **keys), tmp_path / "ddp")
    for workers in (1, 3):
        job = job_of(model, workers=workers, strategy="fsdp", **keys)
        assert ends(job, tmp_path / str(workers)) == expected, f"{workers} workers"


def test_a_block_that_runs_twice_in_a_forward_is_refused_by_name(tmp_path: Path) -> None:
    model = {"target": "tests.support.training:RunsTwice"}
    with pytest.raises(ProcessExit, match=r"bitwise: blocks\.0 runs twice in a forward"):
        run_group(job_of(model, workers=2, bitwise=True, strategy="fsdp"), tmp_path)


@pytest.mark.full
@pytest.mark.slow
def test_samples_that_are_set_aside_change_no_bit_between_workers(tmp_path: Path) -> None:
    """All rows of two steps, all of worker 0's in one, and in another the first shard of worker 1, which has two."""
    order = Order(101, 0, 0, shuffle=True)
    bad = [order[at] for at in (*range(10), 13, 16, 17, *range(21, 28), 100)]
    data = {"target": "tests.support.bad_data:Broken", "args": {"raises": bad}}
    keys = {"shards": 5, "on_error": {"quarantine": len(bad)}, "bitwise": True, "grad_clip": 0.5, "optimizer": ADAMW}
    expected = ends(job_of("mlp", data, workers=1, **keys), tmp_path / "ddp")
    assert ends(job_of("mlp", data, workers=3, strategy="fsdp", **keys), tmp_path / "fsdp") == expected


def test_a_shard_that_leaves_a_parameter_unused_changes_no_sign() -> None:
    """FSDP fills in +0, and -0 + 0 is 0."""
    parameter = torch.zeros(2)
    current = FsdpRound(number=1, is_last=False, shards=[0], used={id(parameter)})
    unit = SimpleNamespace(sharded_param=parameter, padded_sharded_param_size=parameter.shape)
    scatter = TreeScatter(current, "block", [unit], shards=2)
    scatter.alone(-torch.zeros(2))
    current.number, current.is_last, current.shards, current.used = 2, True, [1], set()
    gradient = torch.zeros(2)
    scatter.alone(gradient)
    assert torch.signbit(gradient).all()


@pytest.mark.slow
def test_3_2_and_3_workers_end_as_if_undisturbed(tmp_path: Path) -> None:
    keys = {**BLOCKS, "checkpoint": {"every_steps": 1}, "epochs": 2}
    expected = ends(job_of("Blocks", "Sentences", workers=1, **keys), tmp_path / "ddp")
    for workers, stops in ((3, 2), (2, 5), (3, None)):
        job = job_of("Blocks", "Sentences", workers=workers, strategy="fsdp", **keys)
        got = ends(job, tmp_path / "fsdp", stops)
    assert got == expected
