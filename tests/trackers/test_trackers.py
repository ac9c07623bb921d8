"""MLflow and Trackio against their real local servers, Weights & Biases against its own offline files.

Each is skipped where its package is not installed. MLflow's server needs another pyarrow than dp_ray, so it runs from
an environment of its own: DP_RAY_MLFLOW names its program, by default `mlflow` if there is one.
"""

import importlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.errors import Error, JobError
from dp_ray.rundir.lease import last_alive
from dp_ray.storage import Storage
from dp_ray.trackers.feed import TRACKED_JSON, TRACKERS
from dp_ray.trackers.process import send_late
from tests.support.cluster import free_port, wait_for_port
from tests.support.tracked import SLOW
from tests.support.trackers import wait_until
from tests.support.trainings import keys_of

pytestmark = pytest.mark.slow
MLFLOW = os.environ.get("DP_RAY_MLFLOW") or shutil.which("mlflow")


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs the extra {package}")


@contextmanager
def serving(command: list[str], port: int, **env: str) -> Iterator[None]:
    """A server for as long as the block lasts; it is then killed with all its processes, as by a power cut."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **env},
    ) as process:
        try:
            wait_for_port(port, process)
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def mlflow_server(folder: Path, port: int) -> Any:
    assert MLFLOW is not None
    database = f"sqlite:///{folder}/mlflow.db"
    options = ["--backend-store-uri", database, "--default-artifact-root", str(folder), "--workers", "1"]
    return serving([MLFLOW, "server", "--host", "127.0.0.1", "--port", str(port), *options], port)


@pytest.fixture
def mlflow(tmp_path: Path) -> Any:
    needs("mlflow")
    if MLFLOW is None or not Path(MLFLOW).exists():
        pytest.skip("needs a server of MLflow: set DP_RAY_MLFLOW to its program")
    return tmp_path


def asked(port: int, path: str, **query: str) -> Any:
    """What MLflow's server answers, without its package: that would change this process's environment."""
    url = f"http://127.0.0.1:{port}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def losses_of(run_id: str | None, port: int, name: str = "loss") -> list[tuple[int, float]]:
    """The steps and values of a metric of a run, as the server has them."""
    found = asked(port, "metrics/get-history", run_id=str(run_id), metric_key=name)["metrics"]
    return sorted((int(metric["step"]), metric["value"]) for metric in found)


def history_of(result: dp_ray.Result, name: str = "loss") -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in result.history]


def test_mlflow_gets_each_step_once_though_its_server_was_down(
    mlflow: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server goes down in the middle of a training, and comes back before its end."""
    port, run = free_port(), Storage(str(mlflow / "runs" / "run"))
    url = f"http://127.0.0.1:{port}"
    keys = keys_of(
        storage=str(mlflow / "runs"),
        name="run",
        model=SLOW,
        batch_size=1,
        epochs=2,
        checkpoint={"every_steps": 20},
        trackers=["mlflow"],
        env={"MLFLOW_TRACKING_URI": url, "MLFLOW_EXPERIMENT_NAME": "theirs"},
        quiet=False,
    )
    monkeypatch.setattr("dp_ray.trackers.process.END_SECONDS", 120.0)
    server = mlflow_server(mlflow, port)
    server.__enter__()
    results: list[dp_ray.Result] = []
    training = threading.Thread(target=lambda: results.append(dp_ray.run(**keys)))
    training.start()
    wait_until(lambda: TRACKED_JSON.read(run.child(TRACKERS), "mlflow.json").next_step > 10, 90)
    server.__exit__(None, None, None)
    time.sleep(2)
    with mlflow_server(mlflow, port):
        training.join()
        remembered = TRACKED_JSON.read(run.child(TRACKERS), "mlflow.json")
        (result,) = results
        found = losses_of(remembered.run_id, port)
        rates = losses_of(remembered.run_id, port, "learning_rate")
        there = asked(port, "runs/get", run_id=str(remembered.run_id))["run"]
    assert found == history_of(result)
    assert rates == history_of(result, "learning_rate")
    assert (there["info"]["status"], there["info"]["run_name"]) == ("FINISHED", "run")
    params, tags = ({pair["key"]: pair["value"] for pair in there["data"][key]} for key in ("params", "tags"))
    assert (params["optimizer.args.lr"], params["epochs"]) == ("0.1", "2")
    assert tags["dp_ray.status"] == remembered.status == "done"
    assert "mlflow does not answer, the run goes on" in capsys.readouterr().err


def test_mlflow_gets_what_it_lacks_when_the_run_is_resumed_or_later(
    mlflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server at first; then the training goes on, with the server there; then an evaluation is sent late."""
    port, run = free_port(), Storage(str(mlflow / "runs" / "run"))
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    monkeypatch.setattr("dp_ray.trackers.process.END_SECONDS", 1.0)
    keys = keys_of(storage=str(mlflow / "runs"), name="run", trackers=["mlflow", "tensorboard"])
    first = dp_ray.run(**keys)
    assert TRACKED_JSON.read(run.child(TRACKERS), "mlflow.json").next_step == 0
    monkeypatch.setattr("dp_ray.trackers.process.LATE_SECONDS", 1.0)
    with pytest.raises(Error, match="mlflow did not answer"):
        list(send_late(str(mlflow / "runs" / "run")))
    monkeypatch.setattr("dp_ray.trackers.process.LATE_SECONDS", 120.0)
    with mlflow_server(mlflow, port):
        assert list(send_late(str(mlflow / "runs" / "run"))) == [f"mlflow has all {first.steps} steps"]
        once = TRACKED_JSON.read(run.child(TRACKERS), "mlflow.json")
        monkeypatch.setattr("dp_ray.trackers.process.END_SECONDS", 120.0)
        longer = dp_ray.run(**{**keys, "epochs": 2})
        assert TRACKED_JSON.read(run.child(TRACKERS), "mlflow.json").run_id == once.run_id
        found = losses_of(once.run_id, port)
    assert found == history_of(longer)


def test_what_is_sent_late_must_have_ended_and_have_trackers(tmp_path: Path) -> None:
    dp_ray.run(**keys_of(storage=str(tmp_path), name="run"))
    with pytest.raises(JobError, match="has no trackers"):
        list(send_late(str(tmp_path / "run")))


def test_trackio_gets_each_step_once_though_its_server_was_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("trackio")
    port = free_port()
    theirs = {"TRACKIO_DIR": str(tmp_path / "theirs"), "TRACKIO_WRITE_TOKEN": "token"}
    ours = {"TRACKIO_DIR": str(tmp_path / "ours"), "TRACKIO_SERVER_URL": f"http://127.0.0.1:{port}"}
    command = [sys.executable, "-m", "tests.support.tracked", str(port)]
    keys = keys_of(storage=str(tmp_path), name="run", model=SLOW, batch_size=1, trackers=["trackio"])
    keys |= {"env": {**ours, "TRACKIO_WRITE_TOKEN": "token"}}
    monkeypatch.setattr("dp_ray.trackers.process.END_SECONDS", 120.0)
    server = serving(command, port, **theirs)
    server.__enter__()
    results: list[dp_ray.Result] = []
    training = threading.Thread(target=lambda: results.append(dp_ray.run(**keys)))
    training.start()
    wait_until(
        lambda: TRACKED_JSON.read(Storage(str(tmp_path / "run")).child(TRACKERS), "trackio.json").next_step > 10, 90
    )
    time.sleep(1)
    server.__exit__(None, None, None)
    time.sleep(1)
    with serving(command, port, **theirs):
        training.join()
    logged = _trackio_rows(tmp_path / "theirs")
    assert logged == history_of(results[0])


def test_trackio_goes_on_in_the_same_run(tmp_path: Path) -> None:
    needs("trackio")
    port = free_port()
    theirs = {"TRACKIO_DIR": str(tmp_path / "theirs"), "TRACKIO_WRITE_TOKEN": "token"}
    ours = {"TRACKIO_DIR": str(tmp_path / "ours"), "TRACKIO_SERVER_URL": f"http://127.0.0.1:{port}"}
    keys = keys_of(storage=str(tmp_path), name="run", trackers=["trackio"])
    keys |= {"env": {**ours, "TRACKIO_WRITE_TOKEN": "token"}}
    with serving([sys.executable, "-m", "tests.support.tracked", str(port)], port, **theirs):
        dp_ray.run(**keys)
        once = TRACKED_JSON.read(Storage(str(tmp_path / "run")).child(TRACKERS), "trackio.json")
        longer = dp_ray.run(**{**keys, "epochs": 3})
    again = TRACKED_JSON.read(Storage(str(tmp_path / "run")).child(TRACKERS), "trackio.json")
    assert (again.run_id, again.next_step) == (once.run_id, longer.total_steps)
    assert _trackio_rows(tmp_path / "theirs") == history_of(longer)


def _trackio_rows(folder: Path) -> list[tuple[int, float]]:
    (database,) = folder.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    connection.close()
    return [(step, json.loads(metrics)["loss"]) for step, metrics in rows]


def test_wandb_writes_each_step_to_its_offline_files(tmp_path: Path) -> None:
    needs("wandb")
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    keys = keys_of(storage=str(tmp_path), name="run", trackers=["wandb"], env=env)
    result = dp_ray.run(**keys)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert TRACKED_JSON.read(
        Storage(str(tmp_path / "run")).child(TRACKERS), "wandb.json"
    ).run_id == file.stem.removeprefix("run-")
    history, config, summary = _wandb_records(file)
    assert [(row["_step"], row["loss"]) for row in history] == history_of(result)
    assert (config["optimizer.args.lr"], config["epochs"]) == (0.1, 1)
    assert summary["loss"] == result.metrics["loss"]


def test_wandb_goes_on_in_the_same_run_after_its_driver_was_killed(tmp_path: Path) -> None:
    needs("wandb")
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    keys = keys_of(storage=str(tmp_path), name="run", trackers=["wandb"], env=env, model=SLOW, batch_size=1)
    keys |= {"checkpoint": {"every_steps": 5}, "workers": 0}
    program = f"import dp_ray; dp_ray.run(**{keys!r})"
    run = Storage(str(tmp_path / "run"))
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as driver:
        wait_until(lambda: TRACKED_JSON.read(run.child(TRACKERS), "wandb.json").next_step > 15, 90)
        os.killpg(driver.pid, signal.SIGKILL)
    wait_until(lambda: not last_alive(run)[0], 60)
    remembered = TRACKED_JSON.read(run.child(TRACKERS), "wandb.json")
    result = dp_ray.run(**keys)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert {path.stem for path in files} == {f"run-{remembered.run_id}"} and len(files) == 2
    there = [row["_step"] for path in files for row in _wandb_records(path)[0]]
    assert there == list(range(result.total_steps)), "each step once, in two files of the same run"


def _wandb_records(file: Path) -> Any:
    """The history, the config and the summary in an offline file."""
    wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    history: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for data in _log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            history.append({**_items(record.history.item), "_step": record.history.step.num})
        config |= _items(record.run.config.update)
        summary |= _items(record.summary.update)
    return history, config, summary


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, after its first 7 bytes: pieces within blocks of 32 KiB."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""
