"""`dp-ray stop RUN_DIR`: a run ends at a step's border, keeps all, and goes on as if it had never stopped."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dp_ray
from dp_ray.errors import Error, JobError, RunInterrupted
from dp_ray.rundir.files import RUN_JSON
from dp_ray.rundir.lease import LEASE_JSON, REQUEST, leave_request, stop_run, take_request
from dp_ray.storage import Storage
from tests.support.builders import held_by, run_dir_of
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.drivers import SLOW, told
from tests.support.models import SlowPairs
from tests.support.within import within

if TYPE_CHECKING:  # boto3 is slow to import
    from tests.support.s3 import Server

KEYS: dict[str, Any] = {**SLOW, "workers": 0, "name": "run"}
SECONDS = 300.0  # the machine may be busy


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dp_ray.Result:
    return dp_ray.run(**KEYS, storage=str(tmp_path_factory.mktemp("whole")), quiet=True)


class HeldInTheMiddle(SlowPairs):
    """From its sixth step on it gives no sample as long as a file is there, so that the run cannot end too soon."""

    def __init__(self, file: str) -> None:
        super().__init__(seconds=0.0)
        self.file, self.reads = Path(file), 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        while self.reads > 50 and self.file.exists():
            time.sleep(0.02)
        return super().__getitem__(index)


def held(folder: Path) -> dict[str, Any]:
    """The training in a folder, which is held in the middle as long as the file `held` is there."""
    dataset = {"target": "tests.rundir.test_stopping:HeldInTheMiddle", "args": {"file": str(folder / "held")}}
    return {**KEYS, "dataset": dataset, "storage": str(folder)}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The training that is held in the middle, as a process of its own; the file `said` has what it says."""
    (tmp_path / "held").touch()
    (tmp_path / "job.yaml").write_text(json.dumps(held(tmp_path)))
    line = [sys.executable, "-m", "dp_ray", "run", str(tmp_path / "job.yaml")]
    with (tmp_path / "said").open("w") as said, subprocess.Popen(line, cwd=ROOT, stderr=said, text=True) as process:
        yield process
        process.kill()


def trains(run: Path) -> bool:
    return any((run / "checkpoints").glob("step-*"))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [((), 130), (("--run-again",), 75)], ids=["stop", "run_again"])
def test_a_stopped_run_keeps_its_steps_and_goes_on_to_the_same_end(
    how: tuple[str, ...],
    status: int,
    tmp_path: Path,
    running: subprocess.Popen[str],
    undisturbed: dp_ray.Result,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, told_in = tmp_path / "run", tmp_path / "said"

    def let_go_on() -> None:
        within(SECONDS, lambda: "stopping after this step" in told_in.read_text())
        (tmp_path / "held").unlink()

    assert within(SECONDS, lambda: trains(run))
    lets_go_on = threading.Thread(target=let_go_on)
    lets_go_on.start()
    assert status_of(monkeypatch, "stop", str(run), *how) == 0
    lets_go_on.join()
    out, said = capsys.readouterr()
    assert f"asked process {running.pid} on " in said
    assert re.fullmatch(r"interrupted after \d+ of 20 steps; run the same command to resume\n", out)
    assert running.wait(SECONDS) == status
    told_there = told_in.read_text()
    assert "asks to stop" in told_there
    assert told_there.splitlines()[-1] == out.rstrip()
    num_kept = int(out.split()[2])
    assert 0 < num_kept < 20, "it stopped in the middle"
    assert not (run / REQUEST).exists()
    result = dp_ray.run(**held(tmp_path), quiet=True)
    assert [interruption["what"] for interruption in result.interruptions] == [
        f"stopped by {' '.join(['dp-ray stop', *how])} after {num_kept} steps"
    ]
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert told(result) == told(undisturbed)


@pytest.mark.slow
def test_a_run_that_does_not_run_cannot_be_stopped(
    tmp_path: Path, undisturbed: dp_ray.Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status_of(monkeypatch, "stop", undisturbed.run_dir) == 2
    assert capsys.readouterr().err == f"error: {undisturbed.run_dir} is not running: it is done\n"
    with pytest.raises(JobError, match="is not running: there is no run"):
        stop_run(str(tmp_path / "none"), True, print)
    assert not (tmp_path / "none").exists()


def test_a_run_that_ends_before_it_could_stop_is_told_so(tmp_path: Path) -> None:
    made = run_dir_of(tmp_path)
    said: list[str] = []
    told: list[str] = []
    stopping = threading.Thread(target=lambda: told.append(stop_run(made.storage.location, True, said.append)))
    with held_by(made):
        stopping.start()
        assert within(SECONDS, lambda: (tmp_path / "run" / REQUEST).exists())
        (tmp_path / "run" / "result.json").write_text('{"status": "done"}')
    stopping.join(SECONDS)
    assert "to stop after its current step" in said[0]
    assert told == ["it came to its end before it could stop, and is done"]


@pytest.mark.full
@pytest.mark.slow
def test_a_run_whose_driver_was_killed_is_not_running(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    assert within(SECONDS, lambda: trains(tmp_path / "run"))
    running.kill()
    running.wait()
    with pytest.raises(JobError, match="is not running: it is unfinished; dp-ray report tells"):
        stop_run(str(tmp_path / "run"), True, print)


@pytest.mark.full
@pytest.mark.slow
def test_a_driver_that_is_killed_while_it_is_waited_for_is_told(
    tmp_path: Path, running: subprocess.Popen[str]
) -> None:
    assert within(SECONDS, lambda: trains(tmp_path / "run"))
    running.send_signal(19)  # SIGSTOP: it will not heed the request
    said: list[str] = []
    told_later: list[str] = []

    def wait() -> None:
        with pytest.raises(Error) as raised:
            stop_run(str(tmp_path / "run"), True, said.append)
        told_later.append(str(raised.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert within(SECONDS, lambda: bool(said))
    running.kill()
    running.wait()
    waiting.join(SECONDS)
    assert told_later
    assert told_later[0].startswith(f"process {running.pid} on ")
    assert "has ended without a word, it is unfinished; dp-ray report tells" in told_later[0]


class HeldBack(SlowPairs):
    """Says in a folder that it is read, and gives no sample as long as `held` is there."""

    def __init__(self, folder: str) -> None:
        super().__init__(seconds=0.0)
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        (self.folder / "reads").touch()
        while (self.folder / "held").exists():
            time.sleep(0.05)
        return super().__getitem__(index)


@pytest.mark.full
@pytest.mark.slow
def test_a_run_that_is_asked_twice_keeps_its_step_all_the_same(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    dataset = {"target": "tests.rundir.test_stopping:HeldBack", "args": {"folder": str(tmp_path)}}
    job, run = tmp_path / "job.yaml", Storage(str(tmp_path / "run"))
    job.write_text(json.dumps({**KEYS, "dataset": dataset, "storage": str(tmp_path)}))
    line = [sys.executable, "-m", "dp_ray", "run", str(job)]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert within(SECONDS, (tmp_path / "reads").exists)
            for _ in range(2):
                assert stop_run(str(tmp_path / "run"), False, print) == "it was asked to stop"
                assert within(SECONDS, lambda: not run.exists(REQUEST))
            held.unlink()
            _, said = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert said.count("asks to stop") == 2
    assert said.splitlines()[-1].startswith("interrupted after ")


@pytest.mark.full
@pytest.mark.slow
def test_a_sweep_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """By its folder; one that has ended says how far it came."""
    dataset = {"target": "tests.support.models:SlowPairs", "args": {"seconds": 0.02}}  # 0.2 s a step
    job, sweep = tmp_path / "job.yaml", Storage(str(tmp_path / "run-sweep"))
    job.write_text(json.dumps({**KEYS, "dataset": dataset, "storage": str(tmp_path)}))
    line = [sys.executable, "-m", "dp_ray", "sweep", str(job), "--over", "seed=1,2,3"]
    said: list[str] = []
    for waits in (True, False):
        with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert within(
                    SECONDS, lambda: (lease := LEASE_JSON.read(sweep)) is not None and lease.driver.pid == process.pid
                )
                told = stop_run(sweep.location, waits, said.append)
                _, errors = process.communicate(timeout=SECONDS)
            finally:
                process.kill()
        assert process.returncode == 130, errors
        assert told == ("0 of its 3 trials are done; the same command goes on" if waits else "it was asked to stop")
        assert "run the same command to go on" in errors.splitlines()[-1]
    assert all(re.fullmatch(r"asked process .* to stop .*run-sweep-\d after its current step", line) for line in said)
    with pytest.raises(JobError, match="is not running: 0 of its 3 trials are done; the same command goes on"):
        stop_run(sweep.location, True, said.append)


class AsksAtItsEnd(SlowPairs):
    """Has its own run asked to stop when its last sample is read, which is sooner than its driver looks."""

    def __init__(self, run_dir: str) -> None:
        super().__init__(seconds=0.0)
        self.run = Storage(run_dir)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == len(self) - 1:
            lease = LEASE_JSON.read(self.run)
            assert lease is not None
            leave_request(self.run, lease.token)
        return super().__getitem__(index)


def test_a_request_that_comes_too_late_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_ray.driver.run.TELL_SECONDS", 60.0)
    dataset = {"target": AsksAtItsEnd, "args": {"run_dir": str(tmp_path / "run")}}
    result = dp_ray.run(**{**KEYS, "dataset": dataset, "epochs": 1, "shuffle": False}, storage=str(tmp_path))
    assert result.status == "done"
    assert not (tmp_path / "run" / REQUEST).exists()


def test_a_request_for_an_earlier_driver_stops_nobody(tmp_path: Path, undisturbed: dp_ray.Result) -> None:
    storage = Storage(str(tmp_path / "run"))
    storage.create()
    leave_request(storage, "token of another driver")
    assert take_request(storage, "mine") is None
    assert not storage.exists(REQUEST)
    leave_request(storage, "mine")
    request = take_request(storage, "mine")
    assert request is not None and request.by.startswith("process ")
    (tmp_path / "run" / REQUEST).write_text("{ damaged")
    assert take_request(storage, "mine") is None


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("foreground")
def test_a_run_on_an_object_store_is_stopped_too(
    server: "Server", monkeypatch: pytest.MonkeyPatch, undisturbed: dp_ray.Result
) -> None:
    monkeypatch.setattr("dp_ray.driver.run.RENEW_SECONDS", 0.1)
    url = server.url("stopped")
    run = Storage(url).child("run")

    def stop() -> None:
        assert within(
            SECONDS, lambda: LEASE_JSON.read(run) is not None and bool(server.objects("stopped/run/checkpoints"))
        )
        states.append(stop_run(run.location, True, said.append))

    said: list[str] = []
    states: list[str] = []
    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(RunInterrupted, match="interrupted after "):
        dp_ray.run(**KEYS, storage=url, quiet=True)
    stopping.join(90)
    assert states
    assert states[0].startswith("interrupted after ")
    assert RUN_JSON.read(run)
    result = dp_ray.run(**KEYS, storage=url, quiet=True)
    assert result.weights_sha256 == undisturbed.weights_sha256
