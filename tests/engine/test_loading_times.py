"""Where the time of a worker's steps goes, against datasets and models that sleep for a known time."""

import multiprocessing
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.driver.finish import share_of_wait
from dp_ray.engine.loads.items import SampleReader
from dp_ray.engine.loads.loader import Collate, Samples, StepTimes, TimedLoader, started_loader
from dp_ray.job.samples import ReadRequest
from tests.support.training import Pairs, mlp

STEPS, SECONDS = 8, 0.02


class SlowReads(Pairs):
    """Reads a batch in SECONDS."""

    def __init__(self) -> None:
        super().__init__(STEPS * 4)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(SECONDS)
        return [self[index] for index in indices]


class SlowForward(nn.Module):
    """Takes SECONDS times 3 for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(3 * SECONDS)
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def ran(folder: Path, task: str, **keys: Any) -> dp_ray.Result:
    given = {"model": SlowForward, "dataset": SlowReads, "loss": nn.CrossEntropyLoss, "optimizer": torch.optim.SGD}
    common = {"task": task, "batch_size": 4, "workers": 0, "quiet": True, "storage": str(folder), "inputs": "first"}
    return dp_ray.run(**{**given, **common, **keys}, name=f"{task}{len(keys)}")


@pytest.mark.full(but=["predict"])
@pytest.mark.slow
@pytest.mark.parametrize("task", ["predict", "evaluate", "train"])
def test_a_result_tells_how_long_a_worker_waited_for_data(tmp_path: Path, task: str) -> None:
    result = ran(tmp_path, task)
    (worker,) = result.workers
    assert worker["load_seconds"] >= STEPS * SECONDS
    assert worker["data_wait_seconds"] >= worker["load_seconds"], "a worker without loader processes reads itself"
    assert worker["loop_seconds"] >= worker["data_wait_seconds"] + STEPS * 3 * SECONDS
    assert result.data_wait_share == round(worker["data_wait_seconds"] / worker["loop_seconds"], 4)
    assert dp_ray.load(result.run_dir) == result


@pytest.mark.full
@pytest.mark.slow
def test_a_long_wait_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dp_ray.telemetry.times.DATA", 0.2)
    ran(tmp_path / "short", "predict", quiet=False)
    assert "the limit" not in capsys.readouterr().err, "a short run has nothing to gain"
    monkeypatch.setattr("dp_ray.telemetry.times.JUDGED_FROM", 0.0)
    result = ran(tmp_path, "predict", quiet=False)
    assert result.verdict is not None
    assert result.verdict.startswith("loaders are the limit: ")
    says = capsys.readouterr().err.splitlines()
    assert f"predict1: {result.verdict}" in says
    assert any(line.startswith("predict1: time of the steps: ") and " forward, " in line for line in says)


@pytest.mark.slow
def test_the_history_has_the_wait_of_each_step(tmp_path: Path) -> None:
    result = ran(tmp_path, "train")
    waits = [row["data_wait_seconds"] for row in result.history]
    assert len(waits) == STEPS
    assert all(wait >= SECONDS for wait in waits)
    assert sum(waits) == pytest.approx(result.workers[0]["data_wait_seconds"], abs=0.01)
    assert "data_wait_seconds" not in result.metrics


@pytest.mark.slow
def test_a_loader_process_reads_while_the_model_runs(tmp_path: Path) -> None:
    worker = ran(tmp_path, "predict", loader={"processes": 1}).workers[0]
    assert worker["load_seconds"] >= STEPS * SECONDS
    result = [worker["load_seconds"], worker["loop_seconds"]]
    assert result[1] >= STEPS * 3 * SECONDS
    # The first wait is for the process's start; of the others nearly nothing is left.
    assert worker["data_wait_seconds"] < worker["loop_seconds"] - STEPS * 3 * SECONDS + 0.01


class Masked(list[Any]):
    """In place of a DataLoader: which signals are held back while its processes start."""

    num_workers = 1
    multiprocessing_context = multiprocessing.get_context("spawn")

    def __iter__(self) -> Iterator[Any]:
        return iter([signal.pthread_sigmask(signal.SIG_BLOCK, ())])


def test_signals_are_held_back_while_processes_start_and_not_after() -> None:
    """Else one that still imports torch would end by a Ctrl-C, and the run by an error."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert next(started_loader(Masked())) >= {signal.SIGINT, signal.SIGTERM}  # type: ignore[arg-type]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


class Failing:
    """Batches of which the second fails once, as those of a DataLoader whose process is late."""

    num_workers = 0
    multiprocessing_context = None

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.given += 1
        if self.given == 2:
            raise RuntimeError("late")
        return 0.5, self.given


def test_the_next_batch_can_be_asked_for_after_an_error() -> None:
    times = StepTimes()
    batches: Iterator[Any] = TimedLoader(Failing(), times)  # type: ignore[arg-type]
    assert next(batches) == 1
    with pytest.raises(RuntimeError, match="late"):
        next(batches)
    assert next(batches) == 3
    assert times.load == 1.0


def test_measuring_costs_microseconds() -> None:
    reads, collate, times = (
        Samples(SampleReader(SlowReads()), 0),
        Collate(len, None, None, SampleReader([])),
        StepTimes(),
    )
    assert len(reads) == STEPS * 4
    seconds, (indices, batch) = collate(reads.__getitems__(ReadRequest(0, 0, 0, [1, 2])))
    assert seconds >= SECONDS
    assert (indices.tolist(), batch) == ([1, 2], 2)
    batches = times.waiting(iter(range(10_000)))
    began = time.process_time()
    for _ in batches:
        assert times.data_wait >= 0
    assert time.process_time() - began < 10_000 * 20e-6


def test_the_share_is_over_all_workers() -> None:
    times = [{"loop_seconds": 3.0, "data_wait_seconds": 1.0}, {"loop_seconds": 5.0, "data_wait_seconds": 3.0}]
    assert share_of_wait(times) == 0.5
    assert share_of_wait([]) is None
