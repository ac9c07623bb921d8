"""Sessions on Ray: workers that stay and run one job after another, and leave each as if it ran alone."""

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import dp_ray
from dp_ray.cli import main
from dp_ray.cluster.internals.core import wants_token
from dp_ray.cluster.internals.variables import ADDRESS, AUTH_MODE
from dp_ray.driver.sessions import Session
from dp_ray.engine.world import own_rank
from dp_ray.errors import ClusterError, JobError, ModelError, RunInterrupted, WorkerError
from tests.support import models
from tests.support.cluster import ROOT, Cluster
from tests.support.pages import blocks_of
from tests.support.sessions import share
from tests.support.trainings import keys_of

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

Lines = pytest.CaptureFixture[str]


def pids(result: dp_ray.Result) -> list[int]:
    return [worker["pid"] for worker in result.workers]


def alone(tmp_path: Path, job: str, **keys: Any) -> dp_ray.Result:
    """The job in one process, without Ray."""
    return dp_ray.run(job, workers=0, shards=3, storage=str(tmp_path), name="alone", quiet=True, **keys)


@pytest.mark.full(but=["jobs/digits.yaml"])
@pytest.mark.parametrize("job", ["jobs/tutorial.yaml", "jobs/digits.yaml"])
def test_jobs_on_the_same_workers_give_what_one_process_gives(
    session: Session, tmp_path: Path, in_project: Path, job: str
) -> None:
    task: dict[str, Any] = {"max_steps": 20, "bitwise": True} if "digits" in job else {}
    expected = alone(tmp_path, job, **task)
    results = [
        session.run(job, workers=count, shards=3, storage=str(tmp_path), name=f"on-{count}", **task)
        for count in (2, 3, 1)
    ]
    assert [result.world_sizes for result in results] == [[2], [3], [1]]
    for one in results:
        assert (one.outputs_sha256, one.weights_sha256) == (expected.outputs_sha256, expected.weights_sha256)
    assert pids(results[0]) == pids(results[1])[:2], "the workers stay"
    assert pids(results[2]) == pids(results[1])[:1]


@pytest.mark.full
def test_a_job_starts_from_what_an_earlier_one_trained(session: Session, tmp_path: Path, in_project: Path) -> None:
    keys: dict[str, Any] = {"workers": 2, "storage": str(tmp_path)}
    trained = session.run("jobs/digits.yaml", name="trained", max_steps=5, **keys)
    scored = session.run("jobs/digits_predict.yaml", name="scored", init_from=trained, **keys)
    untrained = session.run("jobs/digits_predict.yaml", name="untrained", **keys)
    assert scored.outputs_sha256 != untrained.outputs_sha256
    assert scored.rows == untrained.rows == 1797


def test_a_job_that_needs_more_is_refused_before_there_is_a_run_directory(
    session: Session, tmp_path: Path, in_project: Path
) -> None:
    with pytest.raises(JobError, match="workers: the job needs 4, the session has 3"):
        session.run("jobs/tutorial.yaml", workers=4, shards=4, storage=str(tmp_path), name="run")
    with pytest.raises(JobError, match="address: belongs to the session"):
        session.run("jobs/tutorial.yaml", address="elsewhere")
    assert not (tmp_path / "run").exists()


def test_a_lost_worker_is_replaced_and_the_session_goes_on(
    session: Session, tmp_path: Path, in_project: Path
) -> None:
    keys: dict[str, Any] = {"workers": 2, "storage": str(tmp_path)}
    expected = alone(tmp_path, "jobs/tutorial.yaml")
    killed = session.run("jobs/tutorial.yaml", name="killed", inject="kill worker 1 at step 2", **keys)
    assert (killed.restarts, killed.interruptions[0]["kind"]) == (1, "worker")
    with pytest.raises(WorkerError, match="workers were lost, more often than retries allows: rank 0"):
        session.run("jobs/tutorial.yaml", name="lost", inject="kill worker 0 at step 1", retries=0, **keys)
    after = session.run("jobs/tutorial.yaml", name="after", **keys)
    assert killed.outputs_sha256 == after.outputs_sha256 == expected.outputs_sha256
    assert after.restarts == 0


def test_an_error_of_user_code_ends_its_job_only(session: Session, tmp_path: Path, in_project: Path) -> None:
    keys: dict[str, Any] = {"dataset": models.Rows(9), "batch_size": 4, "workers": 2, "storage": str(tmp_path)}
    with pytest.raises(ModelError, match=r"rank 0 on .*: step 0.*no rows today"):
        session.run(None, model="tests.driver.test_sessions:Raising", name="failed", **keys)
    result = session.run(None, model="tests.support.models:Linear", name="after", **keys)
    assert (result.status, result.rows) == ("done", 9)
    assert dp_ray.load(tmp_path / "failed").status == "failed"


class Raising(models.Linear):
    """A model that raises on rank 0."""

    def forward(self, inputs: Any) -> Any:
        if own_rank() == 0:
            raise LookupError("no rows today")
        return super().forward(inputs)


def printed_settings(lines: Lines) -> list[dict[str, Any]]:
    return [ast.literal_eval(found) for found in re.findall(r"settings (\{.*\})", lines.readouterr().err)]


def test_a_job_finds_nothing_of_the_one_before_it(
    session: Session, tmp_path: Path, in_project: Path, capfd: Lines
) -> None:
    keys: dict[str, Any] = {"batch_size": 2, "workers": 2, "storage": str(tmp_path)}
    look = {"model": "torch.nn:Identity", "dataset": "tests.support.messy:Settings", **keys}
    clean = session.run(None, name="clean", **look)
    before = printed_settings(capfd)
    messy = {"target": "tests.support.messy:Messy", "args": {"folder": str(tmp_path)}}
    with contextlib.suppress(dp_ray.Error):  # such settings may well break the job itself
        session.run(None, model=messy, dataset="tests.support.models:Rows", name="messy", env={"SET": "1"}, **keys)
    capfd.readouterr()
    after = session.run(None, name="after", **look)
    assert printed_settings(capfd) == before
    assert len(before) >= 2
    assert after.outputs_sha256 == clean.outputs_sha256


@pytest.mark.full
def test_workers_with_remains_are_started_anew_with_the_reason(
    session: Session, tmp_path: Path, in_project: Path, capfd: Lines
) -> None:
    keys: dict[str, Any] = {"dataset": models.Rows(4), "batch_size": 2, "workers": 2, "storage": str(tmp_path)}
    left = session.run(None, model="tests.support.messy:Threaded", name="left", **keys)
    after = session.run(None, model="torch.nn:Identity", name="after", **keys)
    told = "after: the workers are started anew: the last job left the thread 'endless' behind\n"
    assert told in capfd.readouterr().err
    assert not set(pids(left)) & set(pids(after))


@pytest.mark.full
def test_fifty_jobs_leave_workers_as_they_were(session: Session, tmp_path: Path, in_project: Path) -> None:
    def run(number: int) -> list[psutil.Process]:
        keys: dict[str, Any] = {"storage": str(tmp_path), "name": f"run-{number}", "quiet": True}
        if number % 2:
            result = session.run(**keys_of(**keys, workers=2, bitwise=number % 4 == 1))
        else:
            loader = {"processes": 1} if number % 10 == 0 else {}
            result = session.run("jobs/tutorial.yaml", workers=2, loader=loader, **keys)
        return [psutil.Process(pid) for pid in pids(result)]

    def measured(workers: list[psutil.Process]) -> list[tuple[int, int, int]]:
        return [(worker.num_fds(), worker.num_threads(), len(worker.children(recursive=True))) for worker in workers]

    for number in range(5):
        workers = run(number)
    before, memory = measured(workers), [worker.memory_info().rss for worker in workers]
    for number in range(5, 50):
        workers = run(number)
    for (fds, threads, children), (fds_before, threads_before, children_before) in zip(
        measured(workers), before, strict=True
    ):
        assert (fds - fds_before, threads - threads_before, children - children_before) <= (4, 2, 0)
    for one, was in zip(workers, memory, strict=True):
        assert one.memory_info().rss < 1.1 * was


@pytest.mark.full
def test_a_session_runs_one_job_at_a_time(session: Session, tmp_path: Path, in_project: Path) -> None:
    keys: dict[str, Any] = {"model": "tests.support.models:Linear", "batch_size": 1, "workers": 1}
    keys |= {"storage": str(tmp_path), "dataset": models.Rows(4)}
    results: list[dp_ray.Result] = []
    slow = {"inject": "pause worker 0 for 2s at step 1"}
    thread = threading.Thread(target=lambda: results.append(session.run(None, name="slow", **slow, **keys)))
    thread.start()
    time.sleep(1)
    with pytest.raises(ClusterError, match="the session runs another job"):
        session.run(None, name="second", **keys)
    thread.join()
    assert results[0].status == "done"


def interrupt_once_begun(journal: Path) -> None:
    while not journal.is_dir() or not list(journal.iterdir()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_the_job_and_the_session_stays(
    session: Session, tmp_path: Path, in_project: Path, foreground: None
) -> None:
    expected = alone(tmp_path, "jobs/digits.yaml", bitwise=True, epochs=2)
    keys: dict[str, Any] = {"workers": 2, "shards": 3, "bitwise": True, "epochs": 2, "checkpoint": {"every_steps": 5}}
    keys |= {"name": "stopped", "storage": str(tmp_path)}
    thread = threading.Thread(target=interrupt_once_begun, args=(tmp_path / "stopped" / "history",))
    thread.start()
    with pytest.raises(RunInterrupted, match="interrupted after "):
        session.run("jobs/digits.yaml", **keys)
    thread.join()
    before = pids(dp_ray.load(tmp_path / "stopped"))
    result = session.run("jobs/digits.yaml", **keys)
    assert (result.status, result.world_sizes) == ("done", [2, 2])
    assert result.weights_sha256 == expected.weights_sha256
    assert pids(result) == before, "the workers stay"


@pytest.mark.full
def test_a_session_that_is_idle_for_long_ends_and_says_so(
    session: Session, cluster: Cluster, in_project: Path
) -> None:
    with dp_ray.session(address=cluster.address, workers=1, idle_seconds=0.5) as idle:
        until = time.monotonic() + 60
        while time.monotonic() < until and not idle.has_ended:
            time.sleep(0.2)
        with pytest.raises(ClusterError, match=r"the session has ended: it ran no job for 0\.5 s"):
            idle.run("jobs/tutorial.yaml")


WRITTEN = {
    "edited_layer.py": "import torch\nclass Layer(torch.nn.Module):\n    def forward(self, x): return x + 1\n",
    # imports when it is called, so only on a worker
    "edited_model.py": "def model():\n    from edited_layer import Layer\n    return Layer()\n",
    "edited_rows.py": "import torch\nrows = lambda: torch.utils.data.TensorDataset(torch.arange(4.0)[:, None])\n",
}
EDITED = """
    import pathlib
    import dp_ray

    layer = pathlib.Path("edited_layer.py")
    keys = dict(model="edited_model:model", dataset="edited_rows:rows", batch_size=2, workers=1)
    with dp_ray.session(workers=1) as session:
        first = session.run(None, name="first", **keys)
        layer.write_text(layer.read_text().replace("x + 1", "x + 2000"))
        second = session.run(None, name="second", **keys)
        third = session.run(None, name="third", **keys)
    print((second.outputs - first.outputs).round().unique().tolist())
    pids = [one.workers[0]["pid"] for one in (first, second, third)]
    print(pids[0] != pids[1] == pids[2])
"""


@pytest.mark.full
@pytest.mark.parametrize("is_embedded", [True, False], ids=["embedded", "cluster"])
def test_code_that_was_edited_between_two_jobs_is_what_runs(
    cluster: Cluster, tmp_path: Path, is_embedded: bool
) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(EDITED))
    for name, text in WRITTEN.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({} if is_embedded else {ADDRESS: cluster.address})
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "[1999.0]\nTrue\n", done.stderr
    assert "second: the workers are started anew: edited_layer.py was edited\n" in done.stderr


@pytest.mark.full
def test_an_edit_of_code_that_the_callers_own_ray_has_sent_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    sent = f"dict(working_dir='.', py_modules=[{str(ROOT / 'dp_ray')!r}], excludes=['runs'])"
    connects = f"import ray\nray.init({cluster.address!r}, runtime_env={sent}, log_to_driver=False)\n"
    (tmp_path / "script.py").write_text(connects + textwrap.dedent(EDITED))
    # A Ray that was started before this machine had any token demands none, and refuses who shows one later.
    mode = "token" if wants_token(cluster.address) else "disabled"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), AUTH_MODE: mode}
    for name, text in WRITTEN.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert "ClusterError: edited_layer.py was edited, and the workers would still import what" in done.stderr


@pytest.mark.full
def test_the_page_on_sessions_works(
    session: Session, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Lines
) -> None:
    monkeypatch.setenv(ADDRESS, cluster.address)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("jobs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    blocks = {block.language: block.text for block in blocks_of(ROOT / "docs" / "sessions.md")}
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(blocks["python"], names)
    assert (names["trained"].world_sizes, names["scored"].world_sizes) == ([2], [3])
    share(session, monkeypatch)
    line = [*blocks["sh"].split()[1:], "--set", "batch_size=64", "--json", "--overwrite"]
    main.cli(line, standalone_mode=False)
    printed = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [one["name"] for one in printed] == ["digits", "digits_predict"]
    assert {one["status"] for one in printed} == {"done"}


@pytest.mark.full
def test_of_several_jobs_the_first_failure_ends_them_or_not(
    session: Session,
    cluster: Cluster,
    tmp_path: Path,
    in_project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Lines,
) -> None:
    for name, model in [("bad", "tests.driver.test_sessions:Raising"), ("good", "tests.support.models:Linear")]:
        keys = f"{{model: '{model}', dataset: 'tests.support.models:Rows', batch_size: 50, workers: 1}}"
        (tmp_path / f"{name}.yaml").write_text(keys)
    line = ["run", str(tmp_path / "bad.yaml"), str(tmp_path / "good.yaml"), "--json"]
    line += ["--address", cluster.address, "--storage", str(tmp_path)]
    with pytest.raises(ModelError, match="no rows today"):
        main.cli(line, standalone_mode=False)
    assert not (tmp_path / "good").exists()
    share(session, monkeypatch)
    with pytest.raises(SystemExit) as left:
        main.cli([*line, "--keep-going", "--overwrite"], standalone_mode=False)
    assert left.value.code == 1
    shown = capfd.readouterr()
    assert [json.loads(one)["status"] for one in shown.out.splitlines()] == ["done"]
    assert "error: rank 0" in shown.err


@pytest.mark.full
def test_the_death_of_the_driver_ends_its_session(cluster: Cluster, tmp_path: Path, in_project: Path) -> None:
    code = f"""
        import dp_ray, os, time
        with dp_ray.session(address={cluster.address!r}, workers=2) as session:
            result = session.run("jobs/tutorial.yaml", workers=2, storage={str(tmp_path)!r}, name="run")
            print("PIDS", *(worker["pid"] for worker in result.workers), flush=True)
            time.sleep(600)
    """
    line = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        found = re.search(r"PIDS (\d+) (\d+)", driver.stdout.readline())
        assert found is not None
        workers = [psutil.Process(int(pid)) for pid in found.groups()]
        driver.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
