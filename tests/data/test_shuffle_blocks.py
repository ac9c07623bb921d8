"""Trainings that shuffle blocks: which samples they take, what they read, and what they refuse."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dp_ray.data import Parquet
from dp_ray.data.blocks import Block
from dp_ray.driver.planning import plan_job
from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from dp_ray.plan.order import BlockOrder
from dp_ray.tasks import setup
from tests.support.group import StopsBefore, history_of, run_group, weights_of
from tests.support.training import Pairs, mlp, plain_loop
from tests.support.trainings import assert_close, initial, job_of, mean_loss

BLOCKS = {"window_blocks": 3, "block_rows": 10}
ROWS, GROUP = 90, 6


class Counted(Parquet):
    """Writes down what each process reads."""

    def __init__(self, paths: str, log: str) -> None:
        super().__init__(paths, cache_bytes=1)
        self._log = log

    def _table(self, block: Block[int]) -> pa.Table:
        with open(self._log, "a") as log:
            log.write(f"{os.getpid()}, {block}\n")
        return super()._table(block)


class WithBlocks(Pairs):
    """The pairs, with blocks of these sizes."""

    def __init__(self, block_rows: list[int]) -> None:
        super().__init__()
        self.block_rows = block_rows


def tables(folder: Path) -> Path:
    (folder / "data").mkdir(exist_ok=True)
    pairs = Pairs(ROWS)
    for number in range(2):
        part = slice(number * ROWS // 2, (number + 1) * ROWS // 2)
        columns = {"x": list(pairs.inputs[part].numpy()), "y": pairs.targets[part].numpy()}
        pq.write_table(pa.table(columns), folder / "data" / f"{number}.parquet", row_group_size=GROUP)
    return folder / "data"


def counted_job(folder: Path, log: Path, workers: int, **keys: Any) -> Job:
    args = {"paths": str(tables(folder)), "log": str(log)}
    data = {"target": "tests.data.test_shuffle_blocks:Counted", "args": args}
    given = {"inputs": ["x"], "target": "y", "batch_size": 10, "shards": 6, "bitwise": True, "epochs": 1}
    return job_of("mlp", data, workers=workers, shuffle={"window_blocks": 6}, **{**given, **keys})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_training_takes_the_samples_in_the_order_of_blocks(tmp_path: Path, workers: int) -> None:
    run_group(job_of("mlp", shuffle=BLOCKS, shards=2, workers=workers), tmp_path)
    model = initial(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def order_of(epoch: int) -> BlockOrder:
        return BlockOrder(np.array([10] * 10 + [1]), 3, 7, 2, 0, epoch)

    losses = plain_loop(model, Pairs(), 7, 2, mean_loss, optimizer, shards=2, order_of=order_of)
    assert_close(tmp_path, model, losses)


@pytest.mark.slow
def test_any_workers_and_loaders_train_the_same_bits_and_read_each_block_once(tmp_path: Path) -> None:
    found = []
    for workers, processes in [(3, 2), (1, 0), (2, 0)]:  # the first workers can fork their loaders at once
        folder, log = tmp_path / f"{workers}-{processes}", tmp_path / f"{workers}-{processes}.log"
        run_group(counted_job(tmp_path, log, workers, loader={"processes": processes}), folder)
        found.append((weights_of(folder), history_of(folder)))
        reads = Counter(log.read_text().splitlines())
        assert set(reads.values()) == {1}, "a process reads no block twice"
        blocks, readers = ROWS // GROUP + 1, workers * max(1, processes)
        # Of each of the three windows, a process reads the blocks of its shards, and parts of those at their ends.
        assert len(reads) <= blocks + readers * 3 * 2
        assert len(reads) < blocks * readers or readers == 1
    first, *others = found
    for weights, history in others:
        assert history == first[1]
        assert all(torch.equal(weights[name], first[0][name]) for name in first[0])


@pytest.mark.full
@pytest.mark.ray
def test_workers_on_ray_end_at_the_bits_of_one_process(tmp_path: Path, run_in_session: Any) -> None:
    data = {"target": "dp_ray.data:Parquet", "args": {"paths": str(tables(tmp_path))}}
    keys = {"inputs": ["x"], "target": "y", "batch_size": 10, "shards": 4, "bitwise": True, "shuffle": "blocks"}
    job = job_of("mlp", data, **keys)
    alone, together = (run_in_session(job, workers=workers, name=f"on-{workers}") for workers in (0, 2))
    assert together.weights_sha256 == alone.weights_sha256
    assert [0 < worker["data_wait_seconds"] < worker["loop_seconds"] for worker in together.workers] == [True, True]


@pytest.mark.slow
def test_a_resumed_training_ends_at_the_same_bits_on_other_workers(tmp_path: Path) -> None:
    keys = {"shuffle": BLOCKS, "shards": 3, "bitwise": True, "checkpoint": {"every_steps": 1}}
    run_group(job_of("mlp", workers=1, **keys), tmp_path / "whole")
    run_group(job_of("mlp", workers=2, **keys), tmp_path / "parts", StopsBefore(4))
    run_group(job_of("mlp", workers=1, **keys), tmp_path / "parts", StopsBefore(19))
    run_group(job_of("mlp", workers=3, **keys), tmp_path / "parts")
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_a_resumed_training_refuses_blocks_of_other_sizes(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"task": "train", "model": mlp(), "loss": torch.nn.CrossEntropyLoss(), "batch_size": 7}
    keys |= {"optimizer": torch.optim.SGD, "shuffle": "blocks", "checkpoint": {"every_steps": 1}, "workers": 1}
    for sizes, control in [([50, 51], StopsBefore(5)), ([51, 50], None)]:
        job = Job.make({**keys, "dataset": WithBlocks(sizes)}, "job")
        if control:
            run_group(job, tmp_path, control)
        else:
            with pytest.raises(Exception, match=r"differ from this job's: .*2 blocks with sizes of hash .* here; "):
                run_group(job, tmp_path)


@pytest.mark.parametrize(
    ("dataset", "error", "says"),
    [
        (Pairs(), JobError, r"shuffle: blocks: the dataset, a Pairs, does not say .* shuffle: {block_rows: 1000}"),
        (
            WithBlocks([100]),
            DataError,
            r"dataset: has 1 block of 100 samples in all, and 101 samples; its block_rows",
        ),
        (WithBlocks([102, -1]), DataError, r"dataset: has 2 blocks of 101 samples in all"),
    ],
)
def test_blocks_that_are_not_known_or_do_not_add_up_are_told_before_workers_start(
    dataset: Any, error: type[Exception], says: str
) -> None:
    keys = {"task": "train", "model": mlp, "loss": torch.nn.CrossEntropyLoss, "optimizer": torch.optim.SGD}
    with pytest.raises(error, match=says):
        plan_job(Job.make({**keys, "dataset": dataset, "batch_size": 4, "shuffle": "blocks"}, "job"))


def test_workers_with_blocks_of_other_sizes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "gathered", lambda found: [found, "3 blocks"])
    with pytest.raises(DataError, match=r"blocks are not the same on all workers: 11 blocks .*hash .*; 3 blocks"):
        setup.check_blocks(job_of("mlp", shuffle=BLOCKS), Pairs())


def test_the_keys_say_what_is_wrong_and_old_fingerprints_stay() -> None:
    prints = [job_of("mlp", shuffle=how).fingerprint() for how in (True, False, "blocks", {}, {"window_blocks": 8})]
    assert prints[:2] == [
        "9ca3ce67813e8214a212b104935c06940bb33ad4f7da878dded918e57402d4af",
        "35fa72bc95126d7a7c96b2f4bbce5c1fe4050eec76a7b247e66be7f2f5a05cea",
    ]
    assert prints[2] == prints[3] != prints[4]
    for value, says in [
        ("block", r"shuffle: must be true, false, 'blocks' or {window_blocks: N, block_rows: M}, got 'block'"),
        ({"window": 3}, r"shuffle.window: is no key of a job; did you mean shuffle.window_blocks\?"),
        ({"window_blocks": 0}, "shuffle.window_blocks: must be greater than 0, got 0"),
    ]:
        with pytest.raises(JobError, match=says):
            job_of("mlp", shuffle=value)
    with pytest.raises(JobError, match="order: must be 'dataset' or 'shuffled', got 'blocks'"):
        job_of("mlp", order="blocks")
