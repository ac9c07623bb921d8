"""The page of a first day: each of its commands does what it says, in an empty folder."""

import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from dp_ray.cli import main
from tests.support import forked
from tests.support.cluster import ROOT

PAGE = (ROOT / "docs" / "first-day.md").read_text()
COMMANDS = re.findall(r"^(dp-ray .*)$", PAGE, re.M)


def done_in_a_fork(folder: Path, function: Callable[..., Any], *args: str) -> str:
    """Call the function in a process of its own, and see that it ends well: what it printed."""
    ended = forked.ended(function, *args, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's own files, in the folder to stand in."""
    for name in ("mine.py", "train.yaml", "day.py"):
        (code,) = re.findall(rf"```\w+\n# {re.escape(name)}\n(.*?)```", PAGE, re.S)
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def result_of(folder: Path, name: str) -> dict[str, object]:
    values = json.loads((folder / "runs" / name / "result.json").read_text())
    assert isinstance(values, dict)
    return values


def stopped_at_its_first_checkpoint(
    folder: Path, name: str, status: int, function: Callable[..., Any], *args: str
) -> str:
    """Start a training, and send it SIGINT once it has kept a checkpoint: the last line says how to resume."""
    quick = (folder / "mine.py").read_text()
    # Slow enough that it cannot end before it is stopped, however busy the machine is.
    slow = quick.replace("return self.points[index]", "__import__('time').sleep(0.003); return self.points[index]")
    assert slow != quick
    (folder / "mine.py").write_text(slow)
    with forked.started(function, *args, cwd=folder) as running:
        kept = folder / "runs" / name / "checkpoints"
        until = time.monotonic() + 60
        while not (kept.exists() and list(kept.glob("step-*"))) and time.monotonic() < until:
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        ended = running.end(60)
    (folder / "mine.py").write_text(quick)
    assert ended.returncode == status, ended.stderr
    last = re.search(r"interrupted after \d+ of 120 steps; (.*) to resume$", ended.stderr.rstrip().splitlines()[-1])
    assert last, ended.stderr
    return last[1]


@pytest.mark.slow
def test_the_first_day(folder: Path) -> None:
    train, stopped, again, *others = COMMANDS
    done_in_a_fork(folder, forked.dp_ray_program, *shlex.split(train)[1:])
    trained = result_of(folder, "train")
    metrics = trained["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["eval_accuracy"] > 0.8

    stop: list[Any] = [forked.dp_ray_program, *shlex.split(stopped)[1:]]
    assert stopped_at_its_first_checkpoint(folder, "stopped", 130, *stop) == "run the same command"
    done_in_a_fork(folder, forked.dp_ray_program, *shlex.split(again)[1:])
    assert result_of(folder, "stopped")["weights_sha256"] == trained["weights_sha256"]

    for command in others:  # in this process, which has torch imported
        main.cli(shlex.split(command)[1:], standalone_mode=False)
    assert [result_of(folder, "stopped")[key] for key in ("epochs", "total_steps")] == [11, 132]
    outputs = pq.read_table(folder / "runs" / "train-predict" / "outputs" / "00000-of-00001.parquet")
    assert outputs.column("sample_index").to_pylist() == list(range(600))
    scored = result_of(folder, "train-evaluate")["metrics"]
    best = trained["best"]
    assert isinstance(scored, dict) and isinstance(best, dict)
    assert scored["accuracy"] == pytest.approx(best["value"])
    losses = [
        torch.tensor(pq.read_table(folder / "runs" / name / "metrics.parquet").column("loss").to_pylist())
        for name in ("train", "accumulated", "bf16")
    ]
    assert torch.allclose(losses[0][:30], losses[1][:30], rtol=1e-3)
    assert not torch.allclose(losses[0][:30], losses[2][:30], rtol=1e-6)
    rates = pq.read_table(folder / "runs" / "warm" / "metrics.parquet").column("learning_rate").to_pylist()
    assert rates[0] == pytest.approx(0.01 / 30) and rates[60] == pytest.approx(0.01)
    code = re.findall(r"```python\n(from safetensors.*?)```", PAGE, re.S)[0]
    (folder / "code.py").write_text(code)
    done_in_a_fork(folder, forked.python_script, "code.py")

    day: list[Any] = [forked.python_script, "day.py"]
    assert stopped_at_its_first_checkpoint(folder, "python", 1, *day) == "run the same command"
    printed = done_in_a_fork(folder, *day)
    assert result_of(folder, "python")["weights_sha256"] == result_of(folder, "stopped")["weights_sha256"]
    best, accuracy, size = printed.splitlines()[0].split(" ", 2)
    assert float(best) == pytest.approx(float(accuracy))
    assert size == "torch.Size([600, 2])"
