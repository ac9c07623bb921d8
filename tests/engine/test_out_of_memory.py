"""A device without memory left: the error says where, with how many rows, and what to change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.engine.forward.model import build_model
from dp_ray.engine.loads import loading
from dp_ray.engine.world import World
from dp_ray.errors import JobError, ModelError
from dp_ray.messages import Failed, error_of
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support import training
from tests.support.group import run_group
from tests.support.training import plain_loop
from tests.support.trainings import assert_close, job_of, mean_loss

FULL = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB."


class Small(nn.Module):
    """A model on a device whose memory holds `most` rows."""

    def __init__(self, most: int, says: str = "") -> None:
        super().__init__()
        self.layers = training.mlp()
        self.most = most
        self.says = says

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > self.most:
            raise RuntimeError(self.says) if self.says else torch.OutOfMemoryError(FULL)
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


class NeedsMemory(torch.autograd.Function):
    """Passes its input on; its backward finds no memory."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(FULL)


class SmallInBackward(Small):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = NeedsMemory.apply(super().forward(inputs))  # type: ignore[no-untyped-call]
        return outputs


class Heavy(torch.optim.SGD):
    """An optimizer whose state finds no memory."""

    def step(self, closure: Any = None) -> Any:
        raise torch.OutOfMemoryError(FULL)


def own_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def small(kind: str = "Small", **args: Any) -> dict[str, Any]:
    return {"target": f"tests.engine.test_out_of_memory:{kind}", "args": {"most": 3, **args}}


def error_of_run(folder: Path, **keys: Any) -> str:
    run = Storage(str(folder))
    run.child("parts").create()
    with pytest.raises(ModelError) as raised:
        run_task(job_of(keys.pop("model", small()), **keys), World(), run, lambda _: None)
    return str(raised.value)


GPUS = "more GPUs for each worker (gpus_per_worker, device_map: auto)"


def test_a_training_is_told_to_cut_its_batches_into_more_shards(tmp_path: Path) -> None:
    says = error_of_run(tmp_path, shards=1)
    assert says.startswith(f"step 0, shard 0: model raised OutOfMemoryError: {FULL.rstrip('.')}")
    assert says.endswith(
        "; this worker's shards have 7 rows; set one of: shards: 2 instead of 1 (at most 4 rows each, the same "
        f"gradient but for BatchNorm), a smaller batch_size, precision: bf16, {GPUS}"
    )


def test_with_what_it_is_told_the_training_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    run_group(job_of(small(), shards=4), tmp_path)
    torch.manual_seed(0)
    model = Small(10**6)
    losses = plain_loop(model, training.Pairs(), 7, 2, mean_loss, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    assert_close(tmp_path, model, losses)


@pytest.mark.parametrize(
    ("keys", "begins", "holds"),
    [
        ({"model": small("SmallInBackward", most=9)}, "step 0, shard 0: backward raised", "shards have 7 rows"),
        (
            {"model": small("SmallInBackward", most=9), "shards": 3},
            "step 0, shard 0: backward raised",
            "; it got (float32 [3, 6], int64 [3]); this worker's shards have 3 rows; set one of: shards: 6 instead "
            "of 3 (at most 2 rows each,",
        ),
        (
            {"step": "tests.engine.test_out_of_memory:own_step", "loss": None, "shards": 2},
            "step 0, shard 0: step raised OutOfMemoryError",
            "; it got (float32 [4, 6], int64 [4]); this worker's shards have 4 rows; set one of: shards: 4 instead "
            "of 2",
        ),
        ({"model": small(most=0), "batch_size": 1}, "step 0, shard 0: model raised", "1 row; set one of: precision"),
        ({"precision": "bf16"}, "step 0, shard 0: model raised", f"a smaller batch_size, {GPUS}"),
        (
            {"model": small(says="CUDA error: out of memory")},
            "step 0, shard 0: model raised",
            "set one of: shards: 2",
        ),
        (
            {"optimizer": {"target": "tests.engine.test_out_of_memory:Heavy"}, "model": small(most=9)},
            "step 0: optimizer raised",
            f"GiB; set one of: an optimizer with less state, {GPUS}",
        ),
        (
            {
                "model": small(most=7),
                "eval": {"dataset": "tests.support.training:Pairs", "every_steps": 1, "batch_size": 8},
            },
            "evaluation step 0, shard 0: model raised",
            "8 rows; set one of: shards: 2 instead of 1 (at most 4 rows each, the same gradient but for BatchNorm), "
            "a smaller eval.batch_size",
        ),
        (
            {"task": "evaluate", "optimizer": None},
            "evaluation step 0, shard 0: model raised",
            "(at most 4 rows each, the same outputs)",
        ),
        (
            {"task": "predict", "optimizer": None},
            "step 0, shard 0: model raised",
            "(at most 4 rows each, the same outputs)",
        ),
    ],
)
def test_each_loop_says_what_to_change(tmp_path: Path, keys: dict[str, Any], begins: str, holds: str) -> None:
    says = error_of_run(tmp_path, **keys)
    assert says.startswith(begins)
    assert "out of memory" in says
    assert holds in says
    assert says.count("set one of") == 1


@pytest.mark.parametrize("task", ["train", "evaluate", "predict"])
def test_a_batch_that_does_not_fit_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(loading, "on_device", lambda loaded, *_: (full(one) for one in loaded))
    optimizer = {} if task == "train" else {"optimizer": None}
    says = error_of_run(tmp_path, model=small(most=9), task=task, **optimizer)
    assert "step 0" in says.partition(": ")[0]
    assert "OutOfMemoryError: CUDA out of memory" in says and "7 rows; set one of: shards: 2" in says


def test_a_model_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(nn.Module, "to", full)
    with pytest.raises(JobError, match=r"cannot be moved to cpu: CUDA out of memory.*; set one of: .*device_map"):
        build_model(job_of("mlp"), [torch.device("cpu")])


def test_other_errors_get_no_advice_about_memory(tmp_path: Path) -> None:
    assert "set one of" not in error_of_run(tmp_path, model=small(says="out of ideas"))


def test_the_user_is_told_which_rank_it_was() -> None:
    told = error_of(
        Failed("a", World(1, 2, node="10.0.0.2"), ModelError, "step 3, shard 1: model raised ...", "", "")
    )
    assert str(told).startswith("rank 1 on 10.0.0.2: step 3, shard 1: model raised")
