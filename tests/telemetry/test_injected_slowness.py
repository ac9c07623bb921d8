"""Slowness that is put into real workers, drawn with seeds: the verdict names it, each time."""

import random
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from dp_ray.job.job import Job
from dp_ray.messages import Report
from dp_ray.storage import Storage
from dp_ray.telemetry.times import (
    Verdict,
    read_step_times,
    step_time_parts,
    time_split,
    times_table,
    verdict_of,
)
from tests.support.group import run_group
from tests.support.slowness import Slow
from tests.support.training import Pairs

STEPS = 12


class SlowPairs(Pairs):
    """Reads its samples, all of a shard at once, in `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(STEPS * 8)
        self.seconds = seconds

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(self.seconds)
        return [self[index] for index in indices]


def verdict_on(folder: Path, data: float, control: Slow, **keys: Any) -> Verdict:
    """Train on two workers whose model, data and storage are fast but for what slows them."""
    given = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": {"target": "tests.telemetry.test_injected_slowness:SlowPairs", "args": {"seconds": data}},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
    }
    job = Job.make({**given, "batch_size": 8, "workers": 2, **keys}, "job")
    messages = run_group(job, folder, control)
    run = Storage(str(folder))
    parts = step_time_parts(run)
    for report in messages:
        if isinstance(report, Report) and report.times is not None:
            parts.add(times_table(0, report.world, report.times))
    parts.write()
    table = read_step_times(run)
    assert sorted(zip(table["step"].to_pylist(), table["rank"].to_pylist(), strict=True)) == [
        (step, rank) for step in range(STEPS) for rank in range(2)
    ]
    split = time_split(table)
    assert split is not None
    assert all(abs(sum(worker["shares"].values()) - 1) < 0.002 for worker in split["workers"])
    verdict = verdict_of(table, job.describe())
    assert verdict is not None
    return verdict


@pytest.fixture(autouse=True)
def short_runs_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_ray.telemetry.times.JUDGED_FROM", 0.0)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_slowness_is_named_five_times_of_five(tmp_path: Path, seed: int) -> None:
    for number in range(5):
        folder, chance = tmp_path / str(number), random.Random(f"{seed}-{number}")
        what, keys = chance.choice(["worker", "data", "storage"]), {"bitwise": chance.random() < 0.5}
        seconds = chance.uniform(0.03, 0.08)
        if what == "worker":
            rank = chance.randrange(2)
            verdict = verdict_on(folder, 0.0, Slow(rank, seconds, chance.randrange(4)), **keys)
            assert verdict.kind == "slow worker", verdict
            assert verdict.text.startswith(f"worker {rank} on localhost is "), verdict
            assert "slower in forward than the others for each row" in verdict.text, verdict
        elif what == "data":
            verdict = verdict_on(folder, seconds, Slow(), **keys)
            assert verdict.kind == "loaders", verdict
        else:
            verdict = verdict_on(folder, 0.0, Slow(commit=seconds), checkpoint={"every_steps": 1}, **keys)
            assert verdict.kind == "checkpoint", verdict


@pytest.mark.full
@pytest.mark.ray
def test_a_worker_that_is_slowed_on_ray_is_named_in_the_result(run_in_session: Any) -> None:
    given = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": {"target": "tests.support.training:Pairs", "args": {"length": 2 * STEPS * 8}},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
    }
    slow = "slow worker 1 by 200ms from step 4"
    result = run_in_session(**given, batch_size=8, workers=2, inject=slow, profile="slowest")
    assert sorted(path.name for path in Path(result.run_dir, "profile").iterdir()) == ["rank-1.json.gz"]
    table = read_step_times(result.storage())
    assert table.num_rows == 2 * STEPS * 2
    forward = {rank: table.filter(pc.equal(table["rank"], rank))["forward"].to_pylist() for rank in range(2)}
    assert [seconds >= 0.2 for seconds in forward[1][:8]] == [False] * 4 + [True] * 4
    assert max(forward[0][4:]) < 0.2
    verdict, split = verdict_of(table, {}), result.time_split
    assert verdict is not None
    assert verdict.kind == "slow worker"
    assert verdict.text.startswith("worker 1 on ")
    assert result.verdict is not None, "of so short a run it may be that its start took most of the time"
    assert split is not None
    assert split["workers"][0]["shares"]["waiting"] > 0.5 > split["workers"][1]["shares"]["waiting"]
