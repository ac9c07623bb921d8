"""Shape reports outlive a killed driver: of every step that was committed there is each shard's report, once."""

import signal
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.engine.world import World
from dp_ray.plan.split import Done, Range, Shard
from dp_ray.steps.reports import Collector, Journal, ReportColumns, read_journal, table_of
from dp_ray.steps.shapes import Recorder, Sizes
from dp_ray.storage import Storage
from tests.support import forked

pytestmark = pytest.mark.usefixtures("in_project")


def training(folder: Path, **keys: Any) -> dict[str, Any]:
    dataset = {"target": "tests.test_s3:Kills", "args": {"folder": str(folder)}}
    given = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": dataset,
        "loss": "torch.nn:CrossEntropyLoss",
    }
    optimizer = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
    values = {**given, "optimizer": optimizer, "batch_size": 10, "shards": 3, "workers": 0, "quiet": True}
    return {**values, "checkpoint": {"every_steps": 2}, "name": "run", "storage": str(folder), **keys}


@pytest.mark.slow
def test_a_training_whose_driver_was_killed_tells_each_step_once(tmp_path: Path) -> None:
    (tmp_path / "deadly").touch()
    killed = forked.ended(forked.run_job, training(tmp_path))
    assert killed.returncode == -signal.SIGKILL
    (tmp_path / "deadly").unlink()
    result = dp_ray.run(**training(tmp_path))
    assert result.interruptions[0]["resumed_step"] > 0
    undisturbed = dp_ray.run(**training(tmp_path, name="undisturbed"))
    seen = [(one.step, one.shard, one.rows, one.input_size, one.output_size) for one in result.shapes]
    assert seen == [(one.step, one.shard, one.rows, one.input_size, one.output_size) for one in undisturbed.shapes]
    assert not (tmp_path / "run" / "reports").exists()


def test_reports_of_a_worker_that_is_ahead_are_kept_too(tmp_path: Path) -> None:
    folder = Storage(str(tmp_path / "reports"))
    journal = Journal(folder)
    blocks: list[ReportColumns] = []
    collector = Collector(lambda collector, rows: blocks.append(rows))
    worlds = [World(rank, 2) for rank in range(2)]
    collector.begin(worlds)
    for world, steps in zip(worlds, (3, 9), strict=True):
        with Recorder(world, collector.take, interval=60) as recorder:
            for step in range(steps):
                recorder.on_shard(Shard(step, world.rank, 0, 5), Sizes("[5, 5]", "[5, 2]", 5), 1.0)
                recorder.on_step(step)
    collector.emit()
    for rows in blocks:
        journal.add(table_of(collector, rows))
    journal.save(collector)
    journal.save(collector)
    done = Done([Range(0, 2, 0, 2), Range(2, 7, 1, 2)])
    found = [(step, run.shard) for _, _, run in read_journal(folder, done) for step in _steps(run)]
    assert sorted(found) == sorted([*((step, 0) for step in range(2)), *((step, 1) for step in range(7))])


def _steps(run: Any) -> range:
    return range(run.first_step, run.first_step + run.num_steps)
