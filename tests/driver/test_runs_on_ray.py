"""Whole runs on Ray: the tutorial's counts, the ways to launch, and what a user sees when something is wrong."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch.utils.data import default_collate

import dp_ray
from dp_ray.cluster.internals.core import find_users_token, read_variables_anew, wants_token
from dp_ray.cluster.internals.variables import ADDRESS, API_SERVER_ADDRESS, AUTH_MODE, VARIABLES
from dp_ray.engine.world import everyone
from dp_ray.errors import ClusterError, DataError, JobError, ModelError, StorageError, WorkerError
from dp_ray.monitor import attempts
from dp_ray.system.process import OWNER, PREFIX
from dp_ray.system.threads import handlers_kept
from jobs.tutorial import Model, RandomDataset
from tests.support import models
from tests.support.cluster import ROOT, Cluster, Run


def command(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program, as a user starts it in the project's folder."""
    with started_program(*args, **environment) as process:
        return outcome_of(process)


def started_program(*args: str, **environment: str) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    line, pipe = [sys.executable, "-m", "dp_ray", *args], subprocess.PIPE
    return subprocess.Popen(line, cwd=ROOT, env={**kept, **environment}, stdout=pipe, stderr=pipe, text=True)


def outcome_of(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def tutorial_outputs() -> torch.Tensor:
    """The tutorial's model over its whole dataset, in plain torch."""
    torch.manual_seed(0)
    model = Model(5, 2)
    with torch.inference_mode():
        outputs: torch.Tensor = model(RandomDataset(5, 100).data)
    return outputs


def check_counts(result: dp_ray.Result, printed: str, workers: int, full: list[int], last: list[int]) -> None:
    """Of the tutorial with --shapes: its lines on stdout, its outputs, and the shapes that are kept."""
    expected = []
    for rows, shards in [(30, full)] * 3 + [(10, last)]:
        expected += [f"\tIn Model: input size torch.Size([{n}, 5]) output size torch.Size([{n}, 2])" for n in shards]
        expected += [f"Outside: input size torch.Size([{rows}, 5]) output_size torch.Size([{rows}, 2])"]
    assert printed.splitlines() == expected
    assert torch.allclose(result.outputs, tutorial_outputs(), atol=1e-6)
    steps = [hashlib.sha256(batch.numpy().tobytes()).digest() for batch in result.batches()]
    assert result.outputs_sha256 == hashlib.sha256(b"".join(steps)).hexdigest()
    assert result.world_sizes == [workers]
    assert all(0 < worker["data_wait_seconds"] < worker["loop_seconds"] for worker in result.workers)
    assert result.data_wait_share
    shapes = result.shapes
    assert [(one.step, one.rows) for one in shapes] == [
        (step, rows) for step, shards in enumerate([full] * 3 + [last]) for rows in shards
    ]
    assert {shape.rank for shape in shapes} == set(range(workers))
    assert all(one.milliseconds > 0 and one.device == "cpu" and one.node for one in shapes)
    assert [batch.shape for batch in result.batches()] == [torch.Size([n, 2]) for n in (30, 30, 30, 10)]


@pytest.mark.ray
def test_the_tutorial_prints_its_counts(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("jobs/tutorial.yaml", workers=8, shapes=True)
    check_counts(result, capfd.readouterr().out, 8, [4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2])


@pytest.mark.ray
@pytest.mark.parametrize(
    ("workers", "full", "last"), [(1, [30], [10]), (2, [15, 15], [5, 5]), (3, [10, 10, 10], [4, 4, 2])]
)
def test_the_tutorial_prints_its_counts_in_a_session_too(
    run_in_session: Run, capfd: pytest.CaptureFixture[str], workers: int, full: list[int], last: list[int]
) -> None:
    result = run_in_session("jobs/tutorial.yaml", workers=workers, shapes=True)
    check_counts(result, capfd.readouterr().out, workers, full, last)


@pytest.mark.ray
def test_objects_from_python_and_a_shuffled_order(run_in_session: Run) -> None:
    data = models.Rows(101)
    result = run_in_session(
        model=models.Linear(), dataset=data, batch_size=7, workers=3, shards=5, order="shuffled", seed=9, inputs="all"
    )
    from dp_ray.plan.order import Order

    torch.manual_seed(0)
    order = Order(101, 9, 0).indices(0, 101)
    table = result.outputs
    assert table.shape == (101, 2)
    assert result.sample_index.tolist() == order.tolist()
    # Each row is that of the order's sample: the same linear map takes the ordered inputs to the outputs.
    inputs = torch.cat([data.data[torch.from_numpy(order)], torch.ones(101, 1)], 1)
    solution = torch.linalg.lstsq(inputs, table).solution
    assert torch.allclose(inputs @ solution, table, atol=1e-5)
    loaded = dp_ray.load(result.run_dir)
    assert loaded == result
    assert torch.equal(loaded.outputs, table)


class Patience(models.Linear):
    """A model that returns how many seconds a collective of its group waits for peers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        group = everyone()
        assert group is not None
        backend = group._get_backend(torch.device("cpu"))
        return torch.full((len(inputs),), backend.options._timeout.total_seconds())


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize(("step", "seconds"), [(2000, 4000.0), (60, 1800.0), (None, 7 * 86400.0)])
def test_a_workers_group_waits_longer_than_a_step_may_take(
    run_in_session: Run, step: float | None, seconds: float
) -> None:
    keys: dict[str, Any] = {"model": Patience(), "dataset": models.Rows(8), "batch_size": 4, "workers": 2}
    result = run_in_session(**keys, timeouts={"step": step})
    assert result.outputs.tolist() == [seconds] * 8


@pytest.mark.ray
def test_a_users_print_comes_once_with_its_rank(run_in_session: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run_in_session(model=models.Talks(), dataset=models.Rows(20), batch_size=10, workers=2)
    captured = capfd.readouterr()
    assert captured.out == ""
    # Before the first step shard 0 runs, and once more with one row less; then each rank runs two shards.
    ran = [(0, 4), *[(0, 5)] * 3, *[(1, 5)] * 2]
    said = [f"[rank {rank}] forward of {rows} rows" for rank, rows in ran]
    assert sorted(captured.err.splitlines()) == said


@pytest.mark.full
@pytest.mark.ray
def test_what_a_loaders_process_prints_comes_too(run_in_session: Run, capfd: pytest.CaptureFixture[str]) -> None:
    dataset = {"target": "tests.driver.test_runs_on_ray:Chatty", "args": {"length": 4}}
    run_in_session(
        model="tests.support.models:Linear", dataset=dataset, batch_size=4, workers=2, loader={"processes": 1}
    )
    said = sorted(capfd.readouterr().err.splitlines())
    assert said == ["[rank 0] reading 0", "[rank 0] reading 1", "[rank 1] reading 2", "[rank 1] reading 3"]


class Chatty(models.Rows):
    """Says what it reads."""

    def __getitem__(self, index: int) -> torch.Tensor:
        print(f"reading {index}")
        return super().__getitem__(index)


def collate_with_secret(items: list[Any]) -> Any:
    """torch's own, where the environment holds the secret."""
    if not os.environ.get("DP_SECRET", "").startswith("hush-"):
        raise RuntimeError("there is no secret")
    return default_collate(items)


def files_with(secret: str, *folders: Path) -> list[Path]:
    """All files below, Ray's logs among them, in which the secret can be read."""
    found = (path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in found if secret.encode() in path.read_bytes()]


def jobs_of(cluster: Cluster) -> str:
    """What the dashboard tells of all jobs and drivers."""
    token = Path.home() / ".ray" / "auth_token"
    headers = {"Authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}
    with urllib.request.urlopen(urllib.request.Request(f"{cluster.dashboard}/api/jobs/", headers=headers)) as answer:
        return str(answer.read().decode())


SECRET = f"hush-{uuid.uuid4().hex}"
FLAGS = ["jobs/digits_predict.yaml", "--json", "--set", "shards=2", "--set", f"env.DP_SECRET={SECRET}"]
FLAGS += ["--set", "collate=tests.driver.test_runs_on_ray:collate_with_secret"]


@dataclass(frozen=True)
class Embedded:
    """A run on a Ray of its own: how it ended, its storage, and the folders that it left in /tmp.

    `asked_dead` says whether anybody has asked the address of a dead Ray.
    """

    done: subprocess.CompletedProcess[str]
    storage: Path
    left: list[Path]
    asked_dead: bool


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Embedded:
    """The program on a Ray of its own, where a dead one has left its address."""
    storage = tmp_path_factory.mktemp("embedded")
    stale = Path("/tmp/ray/ray_current_cluster")
    stale.parent.mkdir(exist_ok=True)
    before = stale.read_text() if stale.exists() else None
    with socket.create_server(("127.0.0.1", 0)) as dead:
        stale.write_text(f"127.0.0.1:{dead.getsockname()[1]}")
        try:
            with started_program("run", *FLAGS, "--workers", "2", "--storage", str(storage)) as process:
                done = outcome_of(process)
        finally:
            stale.write_text(before) if before is not None else stale.unlink(missing_ok=True)
        asked_dead = bool(wait([dead], 0))
    return Embedded(done, storage, list(left_by(process.pid)), asked_dead)


def left_by(driver: int) -> Iterator[Path]:
    """The folders of a driver; other tests have drivers of their own."""
    for owner in Path("/tmp").glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError):  # its driver ends just now
            if json.loads(owner.read_text())["pid"] == driver:
                yield owner.parent


@pytest.fixture
def another_ray(cluster: Cluster) -> Iterator[None]:
    """The file and the process by which Ray takes 127.0.0.1:1 for the Ray that was started last on this host."""
    address = cluster.folder / "ray_current_cluster"
    before = address.read_text()
    line = ["raylet", "-c", "read forever", "sh", "--gcs-address=127.0.0.1:1"]
    with subprocess.Popen(line, executable=shutil.which("sh"), stdin=subprocess.PIPE) as process:
        address.write_text("127.0.0.1:1")
        try:
            yield
        finally:
            address.write_text(before)
            process.kill()


@pytest.mark.full
@pytest.mark.ray
def test_three_ways_to_launch_give_the_same_outputs_and_keep_a_secret(
    cluster: Cluster, embedded: Embedded, another_ray: None, tmp_path: Path
) -> None:
    flags = [*FLAGS, "--workers", "1"]
    started = command("run", *flags, "--storage", str(tmp_path / "started"), **{ADDRESS: cluster.address})
    submitted = command(
        "submit",
        *flags,
        "--storage",
        str(tmp_path / "submitted"),
        "--address",
        cluster.dashboard,
        **{AUTH_MODE: "token"},
    )
    results = []
    for done in (embedded.done, started, submitted):
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(json.loads(done.stdout.strip().splitlines()[-1]))
    assert len({result["outputs_sha256"] for result in results}) == 1
    assert all(result["rows"] == 1797 and result["status"] == "done" for result in results)
    assert [result["world_sizes"] for result in results] == [[2], [1], [1]]
    assert any(path.name == "gcs_server.out" for path in cluster.folder.rglob("*")), "Ray's logs are somewhere else"
    assert not files_with(SECRET, cluster.folder, tmp_path, embedded.storage)
    assert all(SECRET not in done.stdout + done.stderr for done in (embedded.done, started, submitted))
    listed = jobs_of(cluster)
    assert "dp_ray run jobs/digits_predict.yaml" in listed
    assert SECRET not in listed


@pytest.mark.ray
def test_ray_job_submit_runs_the_program(cluster: Cluster, another_ray: None, tmp_path: Path) -> None:
    line = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--working-dir", ".", "--"]
    line += ["python", "-m", "dp_ray", "run", "jobs/tutorial.yaml", "--storage", str(tmp_path), "--json"]
    environment = {**os.environ, API_SERVER_ADDRESS: cluster.dashboard, AUTH_MODE: "token"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"status": "done"' in done.stdout
    assert torch.allclose(dp_ray.load(tmp_path / "tutorial").outputs, tutorial_outputs(), atol=1e-6)


@pytest.mark.ray
def test_a_sample_that_raises_ends_the_job_with_its_rank_and_traceback(run_in_session: Run, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rank 0 on .*sample 7 of the dataset raised OSError") as caught:
        run_in_session(model=models.Linear(), dataset=models.Breaks(), batch_size=30, workers=2)
    (frames,) = caught.value.__notes__
    assert 'raise OSError("the disk has a hole")' in frames
    assert set(re.findall(r'(\w+)\.py"', frames)) == {"models"}, "of the user's code alone"
    left = dp_ray.load(tmp_path / "run")
    assert (left.status, left.outputs_path, left.restarts) == ("failed", None, 0)
    with pytest.raises(StorageError, match="has no merged outputs"):
        left.outputs  # noqa: B018


@pytest.mark.ray
def test_a_model_that_raises_on_one_rank_is_told_once(run_in_session: Run) -> None:
    with pytest.raises(
        ModelError, match=r"rank 1 on .*step 0, shard 1: model raised ArithmeticError: a number that I"
    ) as caught:
        run_in_session(model=models.RaisesOn(20), dataset=models.Rows(), batch_size=30, workers=2)
    assert len(caught.value.__notes__) == 1


@pytest.mark.ray
def test_more_workers_than_the_cluster_can_ever_hold_fail_at_once(run: Run) -> None:
    started = time.monotonic()
    with pytest.raises(ClusterError, match=r"9 workers need 9 CPU .*has 8 CPU, room for 8 workers"):
        run("jobs/tutorial.yaml", workers=9)
    before = run("jobs/tutorial.yaml", workers=0, name="before")
    no_gpus = r"has none, and no autoscaler that could add some; with gpus_per_worker: auto .* runs anywhere"
    for gpus, workers in ((1, 2), (0.5, 1)):
        asked = rf"^gpus_per_worker: each worker asks for {gpus} GPU, and the cluster {no_gpus}"
        with pytest.raises(JobError, match=asked):
            run("jobs/tutorial.yaml", workers=workers, gpus_per_worker=gpus, name="before", overwrite=True)
        with pytest.raises(JobError, match=asked):
            run("jobs/tutorial.yaml", workers=workers, gpus_per_worker=gpus, name="new")
    with pytest.raises(JobError, match=r"^devices: cuda:0 is named, and torch finds no GPU on this machine"):
        run("jobs/tutorial.yaml", workers=1, devices=["cuda:0"], name="named")
    assert dp_ray.load(before.run_dir) == before
    assert not Path(before.run_dir, "../new").exists()
    assert time.monotonic() - started < 30, "it must not wait for what cannot come"


@pytest.mark.ray
def test_storage_that_the_workers_do_not_share_is_found_out(run_in_session: Run) -> None:
    with pytest.raises(StorageError, match=r"storage is not shared by all nodes: rank \d on .* cannot see") as caught:
        run_in_session("jobs/tutorial.yaml", storage="mock://memory/runs")
    assert "set storage to a folder that every node mounts" in str(caught.value)


class Slow(models.Rows):
    """Takes a while, so that something can happen."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().__getitem__(index)


@pytest.fixture
def killer() -> Iterator[Callable[[Path], threading.Thread]]:
    """Kills one worker of a run, once it has read some rows."""
    threads = []

    def kill_a_worker_of(folder: Path) -> threading.Thread:
        def kill() -> None:
            until = time.monotonic() + 120
            while time.monotonic() < until:
                pids = [int(path.read_text()) for path in folder.glob("*.pid")]
                if pids:
                    time.sleep(1)
                    os.kill(pids[0], signal.SIGKILL)
                    return
                time.sleep(0.1)

        threads.append(threading.Thread(target=kill))
        threads[-1].start()
        return threads[-1]

    yield kill_a_worker_of
    for thread in threads:
        thread.join()


class Marked(Slow):
    """Leaves the process id of the first worker that opens it in `folder`."""

    def __init__(self, folder: str, length: int = 200) -> None:
        super().__init__(length)
        self.folder = folder

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0 and not list(Path(self.folder).glob("*.pid")):
            (Path(self.folder) / "worker.pid").write_text(str(os.getpid()))
        return super().__getitem__(index)


@pytest.mark.full
@pytest.mark.ray
def test_a_worker_that_dies_more_often_than_retries_allow_is_told(
    run: Run, tmp_path: Path, killer: Callable[[Path], threading.Thread]
) -> None:
    killer(tmp_path)
    with pytest.raises(WorkerError, match=r"workers were lost, more often than retries allows: rank \d"):
        run(
            model="tests.support.models:Linear",
            dataset={"target": "tests.driver.test_runs_on_ray:Marked", "args": {"folder": str(tmp_path)}},
            batch_size=10,
            workers=2,
            retries=0,
        )


@pytest.mark.full
@pytest.mark.ray
def test_a_stale_address_of_a_dead_ray_costs_no_time(embedded: Embedded) -> None:
    """An embedded Ray never tries the address that a dead one has left in its own temporary folder."""
    done = embedded.done
    assert done.returncode == 0, done.stderr
    said = [line.removeprefix("digits_predict: ") for line in done.stderr.splitlines()]
    first = ["importing torch and Ray", "starting Ray", "starting Ray Train", "starting 2 workers"]
    order = [said.index(line) for line in (*first, "2 workers importing torch", "2 workers on 1 node (cpu)")]
    assert order == sorted(order), "what goes on in the first seconds is said"
    assert not re.search(r": 0/\d+ steps", done.stderr)
    assert not embedded.asked_dead, "it would be asked for a minute"
    assert not embedded.left, "an embedded Ray leaves its folder behind"


@pytest.mark.full
@pytest.mark.ray
def test_a_run_under_uv_has_the_drivers_python_on_its_workers(tmp_path: Path) -> None:
    """Ray would start the workers by `uv run`, here a uv that is not there, and the run would wait for ever."""
    (tmp_path / "run").write_text('"$@"\nexit $?\n')  # the shell stays, as a parent process with uv's command line
    job = [sys.executable, "-m", "dp_ray", "run", str(ROOT / "jobs/tutorial.yaml"), "--workers", "1"]
    uv = ["uv", "run", *job, "--storage", str(tmp_path / "runs"), "--json"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    process = subprocess.Popen(
        uv,
        executable="/bin/sh",
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            out, errors = process.communicate(timeout=90)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    assert json.loads(out.splitlines()[-1])["status"] == "done"


@pytest.mark.full
@pytest.mark.slow
def test_a_reader_of_shapes_that_has_seen_enough_does_not_end_the_job(tmp_path: Path) -> None:
    job = f"{sys.executable} -m dp_ray run jobs/tutorial.yaml --workers 0 --set dataset.args.length=30000"
    line = f"{job} --shapes --storage {tmp_path} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert dp_ray.load(tmp_path / "tutorial").rows == 30000


@pytest.mark.ray
def test_an_address_where_no_ray_answers(tmp_path: Path) -> None:
    before = dp_ray.run("jobs/tutorial.yaml", workers=0, name="tutorial", storage=str(tmp_path), quiet=True)
    place = "--storage", str(tmp_path), "--address", "127.0.0.1:1"
    done = command("run", "jobs/tutorial.yaml", *place, "--overwrite")
    assert done.returncode == 1
    assert "error: no Ray answers at 127.0.0.1:1" in done.stderr
    assert dp_ray.load(before.run_dir) == before  # a run that cannot begin replaces no other


@pytest.mark.ray
def test_ctrl_c_ends_the_run_with_130(cluster: Cluster, tmp_path: Path) -> None:
    job = tmp_path / "slow.yaml"
    args = f"{{folder: '{tmp_path}', length: 3000}}"
    job.write_text(
        f"{{model: 'tests.support.models:Linear', dataset: {{target: '{__name__}:Marked', args: {args}}}, "
        f"batch_size: 10, workers: 2, storage: '{tmp_path}'}}"
    )
    line = [sys.executable, "-m", "dp_ray", "run", str(job), "--address", cluster.address]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 120
        while not (tmp_path / "worker.pid").exists() and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(2)  # for some steps
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    steps = re.fullmatch(
        r"interrupted after (\d+) of 300 steps; run the same command to resume", errors.splitlines()[-1]
    )
    assert steps, errors
    assert dp_ray.load(tmp_path / "slow").status == "interrupted"
    parts = [path.name for path in (tmp_path / "slow" / "parts").iterdir()]
    last: dict[str, int] = {}  # by the shards that a worker has
    for name in parts:
        _, _, end, _, first, *_ = name.split("-")
        last[first] = max(last.get(first, 0), int(end))
    assert len(last) == 2, "each of the two workers committed what it had"
    ends = [*last.values()]
    assert min(ends) == int(steps[1]) > 0


@contextlib.contextmanager
def users_own_ray(cluster: Cluster) -> Iterator[None]:
    """A Ray that the caller has connected to, as it wants: another test may have made the first token."""
    before = dict(os.environ)
    if wants_token(cluster.address):
        find_users_token()
    with handlers_kept():
        try:
            runtime_env = {"working_dir": str(ROOT)}
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env=runtime_env)
            yield
        finally:
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)
            read_variables_anew()


@pytest.mark.full
@pytest.mark.ray
def test_a_callers_own_ray_is_used_and_left_alone_and_what_other_jobs_hold_is_waited_for(
    cluster: Cluster,
    tmp_path: Path,
    in_project: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "SAY_AFTER", (1.5, 60.0))
    with users_own_ray(cluster):
        holder = ray.remote(num_cpus=7)(Holder).remote()
        ray.get(holder.hold.remote())
        until = time.monotonic() + 30
        while ray.available_resources().get("CPU", 0) > 1 and time.monotonic() < until:
            time.sleep(0.1)
        release = threading.Timer(5, ray.kill, [holder])
        release.start()
        result = dp_ray.run("jobs/tutorial.yaml", storage=str(tmp_path), workers=2)
        release.join()
        assert ray.is_initialized()
    told = capfd.readouterr().err
    assert "2 workers need 2 CPU; free are 1 CPU: waiting for other jobs to end" in told
    lines = re.findall(r"waiting for workers, .*", told)
    says = r"waiting for workers, [23] s so far: 0 of 2 are ready \(each needs 1 CPU\); "
    assert len(lines) == 1
    assert re.match(f"{says}free in the cluster are 1 of 8 CPU; now: starting Ray Train", lines[0]), lines
    assert result.rows == 100
    assert torch.allclose(result.outputs, tutorial_outputs(), atol=1e-6)


class Holder:
    """An actor that holds CPUs as long as it lives."""

    def hold(self) -> None:
        pass


def test_a_run_of_the_same_name_is_not_lost(in_project: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"workers": 0, "storage": str(tmp_path), "name": "run", "quiet": True}
    first = dp_ray.run("jobs/tutorial.yaml", **keys)
    with pytest.raises(
        JobError, match=r"holds this run, finished; load its result \(dp_ray.load\(.*give it another name"
    ):
        dp_ray.run("jobs/tutorial.yaml", **keys)
    with pytest.raises(JobError, match="holds a run of a different job"):
        dp_ray.run("jobs/tutorial.yaml", **keys, batch_size=20)
    assert dp_ray.load(first.run_dir) == first
