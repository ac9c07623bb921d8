"""The history's rows since the last checkpoint: kept on the driver, joined with the pieces, never twice."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from dp_ray.rundir.history import HISTORY, METRICS, RecentHistory, history_so_far
from dp_ray.storage import Storage
from dp_ray.tables import write_table
from tests.support.reported import history


def rows(start: int, stop: int, loss: float) -> list[dict[str, Any]]:
    return [
        {"step": step, "epoch": 0, "loss": loss, "eval_loss": 1.0 if step == 5 else None}
        for step in range(start, stop)
    ]


def losses(run: Storage) -> list[tuple[int, float]]:
    table = history_so_far(run)
    assert table is not None
    return list(zip(table.column("step").to_pylist(), table.column("loss").to_pylist(), strict=True))


def test_only_what_no_piece_holds_is_kept(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    assert history_so_far(run) is None
    run.child(HISTORY).create()
    write_table(run.child(HISTORY), "steps-0-4.parquet", history(4).select(["step", "epoch", "loss"]))
    recent = RecentHistory(run)
    recent.add(rows(0, 6, 1.0))
    recent.save()
    assert [step for step, _ in losses(run)] == list(range(6)) and losses(run)[4:] == [(4, 1.0), (5, 1.0)]


def test_a_number_that_is_whole_at_first_keeps_its_fraction_later(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.child(HISTORY).create()
    recent = RecentHistory(run)
    recent.add([{"step": 0, "loss": 1}, {"step": 1, "loss": 0.5, "eval_rows": 3}])
    recent.save()
    table = history_so_far(run)
    assert table is not None and table.column_names == ["step", "loss", "eval_rows"]
    assert table.to_pylist() == [
        {"step": 0, "loss": 1.0, "eval_rows": None},
        {"step": 1, "loss": 0.5, "eval_rows": 3},
    ]


def test_a_step_that_runs_again_replaces_what_was_there(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    first, second = RecentHistory(run), RecentHistory(run)
    first.add(rows(0, 6, 1.0))
    first.add(rows(3, 5, 2.0))
    first.save()
    assert losses(run) == [(step, 1.0 if step < 3 else 2.0) for step in range(5)]
    write_table(run.child(""), "recent.parquet", history(2))
    second.save()
    assert len(losses(run)) == 2, "nothing is written where there is nothing"


def test_of_a_step_that_a_longer_training_runs_again_the_newest_row_counts(tmp_path: Path) -> None:
    """It goes on from a checkpoint before the end that it had; its merged history is there still."""
    run = Storage(str(tmp_path))
    write_table(run, METRICS, pa.Table.from_pylist(rows(0, 6, 1.0)))
    recent = RecentHistory(run)
    recent.add(rows(4, 8, 2.0))
    recent.save()
    assert losses(run) == [(step, 1.0 if step < 4 else 2.0) for step in range(8)]
