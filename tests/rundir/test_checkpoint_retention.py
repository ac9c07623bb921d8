"""Which checkpoints are kept: the newest good ones, and the best by what is asked for now."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import dp_ray
from dp_ray.errors import DataError
from tests.support import training

pytestmark = pytest.mark.usefixtures("in_project")
LOSS, ACCURACY = {"metric": "eval_loss", "mode": "min"}, {"metric": "eval_accuracy", "mode": "max"}


class Breaks(training.Pairs):
    """Pairs, of which no more can be read than the file `broken` says, where it is there."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.broken, self.reads = Path(folder) / "broken", 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.broken.exists() and self.reads > int(self.broken.read_text()):
            raise OSError("sector 7")
        return super().__getitem__(index)


def run(folder: Path, **others: Any) -> dp_ray.Result:
    """A training of 18 steps of 17 rows, the last of the 6 in an epoch 16."""
    keys: dict[str, Any] = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": {"target": "tests.rundir.test_checkpoint_retention:Breaks", "args": {"folder": str(folder)}},
        "loss": "torch.nn:CrossEntropyLoss",
        "metrics": {"accuracy": "tests.support.training:right"},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.5}},
        "eval": {"dataset": "tests.support.training:Pairs", "every_steps": 1},
        "checkpoint": {"every_steps": 2, "keep": 1},
    }
    given = {"batch_size": 17, "epochs": 3, "shuffle": True, "workers": 0, "name": "run", "quiet": True}
    return dp_ray.run(**{**keys, **given, "storage": str(folder), **others})


def break_off(folder: Path, reads: int = 120, **others: Any) -> list[int]:
    """Run until so many rows are read, by default 7 steps; the steps of the checkpoints that are left."""
    (folder / "broken").write_text(str(reads))
    with pytest.raises(DataError, match="sector 7"):
        run(folder, **others)
    (folder / "broken").unlink()
    return steps(folder)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (folder / "run" / "checkpoints").iterdir())


def train_state(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says of the training, read by the safetensors library."""
    with safe_open(folder / "run" / "checkpoints" / f"step-{step}.safetensors", "pt") as file:
        return dict(json.loads(file.metadata()["state"])["running"])


def damage(folder: Path, *damaged: int) -> None:
    for step in damaged:
        path = folder / "run" / "checkpoints" / f"step-{step}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])


def best_file(folder: Path) -> str:
    return str(folder / "run" / "best.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("second", [ACCURACY, {**LOSS, "mode": "max"}])
def test_the_best_begins_anew_under_another_metric_or_mode(tmp_path: Path, second: dict[str, Any]) -> None:
    left = break_off(tmp_path, checkpoint={"every_steps": 2, "keep": 1, "best": LOSS})
    result = run(tmp_path, checkpoint={"every_steps": 2, "keep": 1, "best": second})
    since = [row for row in result.history if row["step"] >= max(left)]
    expected = max(row[second["metric"]] for row in since)
    first = next(row["step"] + 1 for row in since if row[second["metric"]] == expected)
    told = train_state(tmp_path, 18)
    assert (told["best"], told["best_step"]) == (expected, first)
    assert steps(tmp_path) == sorted({first, 18})
    assert result.best == {
        "metric": second["metric"],
        "value": expected,
        "step": first,
        "weights": best_file(tmp_path),
    }


def test_the_same_best_is_continued(tmp_path: Path) -> None:
    best = {"every_steps": 2, "keep": 1, "best": LOSS}
    break_off(tmp_path, checkpoint=best)
    result = run(tmp_path, checkpoint=best)
    lowest = min(row["eval_loss"] for row in result.history)
    step = next(row["step"] + 1 for row in result.history if row["eval_loss"] == lowest)
    assert result.best == {"metric": "eval_loss", "value": lowest, "step": step, "weights": best_file(tmp_path)}
    assert steps(tmp_path) == sorted({step, 18})


def test_a_best_whose_checkpoint_is_gone_is_no_best(tmp_path: Path) -> None:
    best = {"every_steps": 2, "keep": 1, "best": ACCURACY}
    left = break_off(tmp_path, checkpoint=best)
    for step in left[:-1]:
        (tmp_path / "run" / "checkpoints" / f"step-{step}.safetensors").unlink()
    result = run(tmp_path, checkpoint=best)
    assert result.best is not None
    assert result.best["step"] in steps(tmp_path)
    assert train_state(tmp_path, 18)["best_step"] == result.best["step"]


@pytest.mark.slow
def test_damaged_checkpoints_do_not_count_among_those_kept(tmp_path: Path) -> None:
    """With `keep: 1` each new one was removed as soon as it was written."""
    keys: dict[str, Any] = {"checkpoint": {"every_steps": 1, "keep": 3}}
    assert break_off(tmp_path, **keys) == [5, 6, 7]
    damage(tmp_path, 6, 7)
    keys = {"checkpoint": {"every_steps": 4, "keep": 1}}
    assert break_off(tmp_path, reads=40, **keys) == [5, 6, 7], "nothing newer is there yet"
    assert break_off(tmp_path, reads=100, **keys) == [8], "the damaged ones went when a good one was there"
    assert run(tmp_path, **keys).steps == 6
    assert steps(tmp_path) == [18]


@pytest.mark.slow
def test_so_it_is_where_none_was_good(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"checkpoint": {"every_steps": 3, "keep": 1}}
    assert break_off(tmp_path, **keys) == [6]
    damage(tmp_path, 6)
    keys = {"checkpoint": {"every_steps": 5, "keep": 1}}
    assert break_off(tmp_path, **keys) == [5]
    result = run(tmp_path, **keys)
    assert [row["step"] for row in result.history] == list(range(18))
