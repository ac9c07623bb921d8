"""Samples that a job skips count with weight 0: training is that of one process without them, on any workers."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import dp_ray
from dp_ray.engine.loads.loading import Skipping
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.plan import plan_of
from dp_ray.plan.order import Order
from tests.support import training
from tests.support.bad_data import Broken, good_loop
from tests.support.group import history_of, run_group, weights_of
from tests.support.trainings import assert_as_good_loop, job_of, keys_of

HERE = "tests.engine.loads.test_skip"
FINGERPRINT = "70614b8d5f9b41aefba58d21b6c6b86ad7e27843d0109194b9c113091a8602ed"  # of before there was the key
ORDER = Order(101, 0, 0, shuffle=True)
# Of 7 rows in 5 shards: all of step 1's shard 0, one row of its shard 1, a whole last shard, and all of step 3.
SKIP = [ORDER[at] for at in (7, 8, 9, 13, *range(21, 28), 100)]


def job(model: str = "mlp", **keys: Any) -> Job:
    """The samples that it skips cannot be read."""
    data = {"target": "tests.support.bad_data:Broken", "args": {"raises": SKIP, "image": model == "conv"}}
    return job_of(model, data, **{"workers": 1, "shards": 5, "bitwise": True, "skip": SKIP, **keys})


def test_it_is_in_the_fingerprint_of_a_training_alone() -> None:
    without = job(skip=None)
    assert without.fingerprint() == FINGERPRINT
    assert job().fingerprint() != without.fingerprint()
    assert job(skip=[*SKIP[::-1], SKIP[0]]).fingerprint() == job().fingerprint(), (
        "the order of the samples is nothing"
    )
    assert job(task="predict").fingerprint() == job(task="predict", skip=None).fingerprint()
    assert without.model_copy(update={"stop_on_nan": True}).fingerprint() == FINGERPRINT


def test_what_cannot_be_skipped_is_refused() -> None:
    with pytest.raises(JobError, match="skip: there is no sample 101: the dataset has 101, counted from 0"):
        plan_of(job(skip=[3, 101]), {"dataset": 101})
    with pytest.raises(JobError, match="skip: leaves out all 101 samples"):
        plan_of(job(skip=list(range(101))), {"dataset": 101})
    with pytest.raises(JobError, match="skip: sync_batchnorm would wait"):
        job(sync_batchnorm=True, bitwise=False, shards=1)
    with pytest.raises(JobError, match=r"skip"):
        job(skip=[-1])
    (told,) = [remark for remark in plan_of(job(), {"dataset": 101}).remarks if remark.startswith("skip")]
    assert told == "skip: 12 samples of the dataset left out, in each epoch"
    assert not plan_of(job(task="predict"), {"dataset": 101}).remarks, "a prediction gives each sample's output"


def test_shards_without_what_is_skipped() -> None:
    skipping, split = Skipping(job(), training.Pairs()), plan_of(job(), {"dataset": 101}).split
    for epoch in (0, 1, 0):
        order = Order(101, 0, epoch, shuffle=True)
        for step in range(epoch * 15, epoch * 15 + 15):
            whole = skipping(split.whole(step))
            shards = [skipping(one) for one in split.worker(1, 0, step)]
            assert [order[at] for at in whole.missing] == [order[at] for shard in shards for at in shard.missing]
            kept = [order[at] for shard in shards for at in shard.positions]
            assert kept == [order[at] for at in range(whole.start, whole.stop) if order[at] not in SKIP]


@pytest.mark.full(but=["3-True", "1-False"])
@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_training_is_that_of_one_process_without_them(tmp_path: Path, workers: int, bitwise: bool) -> None:
    run_group(job(workers=workers, bitwise=bitwise), tmp_path)
    assert_as_good_loop(tmp_path, SKIP)


def test_the_metrics_of_a_run_are_of_its_last_batch_with_rows(tmp_path: Path) -> None:
    """The last of three batches of the dataset has none."""
    keys = keys_of(storage=str(tmp_path), name="run", batch_size=40, skip=[*range(80, 101)], epochs=2)
    result = dp_ray.run(**keys)
    losses = pq.read_table(tmp_path / "run" / "metrics.parquet").column("loss").to_pylist()
    assert [loss == loss for loss in losses] == [True, True, False] * 2
    assert result.metrics == {"loss": losses[4], "epoch_loss": pytest.approx((losses[3] + losses[4]) / 2)}


@pytest.mark.full
@pytest.mark.slow
def test_its_bits_do_not_depend_on_workers_loaders_or_bad_samples(tmp_path: Path) -> None:
    """With BatchNorm, whose statistics are shard 0's, and a decay, which a step without rows must not do."""
    decays: dict[str, Any] = {"target": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}}
    ways: dict[str, Any] = {
        "1": {},
        "2": {"workers": 2},
        "3": {"workers": 3, "loader": {"processes": 2}},
        "fsdp": {"workers": 2, "strategy": "fsdp"},
        # The same samples are lost, some to `skip` and some to `on_error`.
        "half": {"workers": 2, "skip": SKIP[::2], "on_error": {"quarantine": 12}},
    }
    found = {}
    for name, keys in ways.items():
        run_group(job("conv", optimizer=decays, **keys), tmp_path / name)
        weights = {key: tensor.numpy().tobytes() for key, tensor in weights_of(tmp_path / name).items()}
        found[name] = weights, repr(history_of(tmp_path / name))
    assert all(one == found["1"] for one in found.values()), [one == found["1"] for one in found.values()]
    torch.manual_seed(0)
    model = training.conv()
    good_loop(model, Broken(image=True), SKIP, torch.optim.SGD(model.parameters(), **decays["args"]), 5)
    for name, expected in model.state_dict().items():
        assert torch.allclose(weights_of(tmp_path / "3")[name], expected, rtol=1e-4, atol=1e-6), name


def test_with_a_loss_over_the_batch_a_step_without_shard_0_leaves_buffers_as_they_are(tmp_path: Path) -> None:
    """On one worker too, which then runs the other shard's forward once."""
    lost = [ORDER[at] for at in range(14, 21)]  # of step 1's two shards of 7 rows the first one
    keys: dict[str, Any] = {"skip": lost, "shards": 2, "batch_size": 14, "max_steps": 3, "bitwise": True}
    keys["loss"] = {"target": "torch.nn:CrossEntropyLoss", "over": "batch"}
    found = []
    for workers in (1, 2):
        run_group(job_of("conv", "Images", workers=workers, **keys), tmp_path / str(workers))
        found.append({key: tensor.numpy().tobytes() for key, tensor in weights_of(tmp_path / str(workers)).items()})
    assert int(weights_of(tmp_path / "1")["1.num_batches_tracked"]) == 2
    assert found[0] == found[1]


@pytest.mark.slow
def test_an_evaluation_during_the_training_reads_all_of_its_own_dataset(tmp_path: Path) -> None:
    evaluates: Any = {"eval": {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 101}}}}
    run_group(job(skip=SKIP, epochs=1, metrics={"right": "tests.support.training:right"}, **evaluates), tmp_path)
    model, data = training.mlp().eval(), training.Pairs(101)
    model.load_state_dict(weights_of(tmp_path))
    right = training.right(model(data.inputs), data.targets).mean().item()
    assert history_of(tmp_path)[-1]["eval_right"] == pytest.approx(right)


@pytest.mark.slow
def test_a_run_goes_on_without_a_sample_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"shards": 5, "bitwise": True, "epochs": 1}
    run_group(
        job_of("mlp", "Pairs", **keys, max_steps=3, checkpoint={"every_steps": 1, "keep": 3}), tmp_path / "first"
    )
    start = str(tmp_path / "first" / "checkpoints" / "step-1.safetensors")
    run_group(job_of("mlp", "Pairs", **keys, skip=SKIP, workers=2, init_from=start), tmp_path / "second")
    run_group(job_of("mlp", "Pairs", **keys, skip=SKIP), tmp_path / "whole")
    told = [(row["step"], row["rows"]) for row in history_of(tmp_path / "second")]
    assert told == [(row["step"], row["rows"]) for row in history_of(tmp_path / "whole")][1:]
    first, whole = (weights_of(tmp_path / name) for name in ("second", "whole"))
    assert all(torch.equal(first[name], whole[name]) for name in whole), "step 0 has none of what is skipped"
