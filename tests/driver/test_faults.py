"""Workers and drivers that are killed, stopped, or hang: the end is the undisturbed run's; each incident is told."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

import dp_ray
from dp_ray.cluster.internals.controller import CONTROLLER_PROCESS
from dp_ray.cluster.internals.train import WORKER_PROCESS
from dp_ray.cluster.internals.variables import VARIABLES
from dp_ray.engine.world import own_rank
from dp_ray.errors import DataError, JobError, WorkerError
from tests.support import models
from tests.support.cluster import ROOT, Cluster, Run, ours
from tests.support.drivers import SLOW, driver, job_file, told, wait_for_checkpoint


def at_random(seed: int, workers: int, faults: int, steps: int) -> str:
    """Kills of random workers, and a short pause, at random steps."""
    chance = random.Random(seed)
    killed = [
        f"kill worker {chance.randrange(workers)} at step {step}" for step in chance.sample(range(1, steps), faults)
    ]
    return "; ".join([*killed, f"pause worker 0 for 1s at step {chance.randrange(1, steps)}"])


@pytest.mark.full
@pytest.mark.ray
def test_a_training_under_ten_faults_ends_as_if_there_were_none(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    """Of the driver too: the first kills itself, the second is killed from outside, each with its workers."""
    job = job_file(tmp_path, checkpoint={"every_steps": 2}, retries=20, epochs=3, on_lost_worker="restart")
    faults = f"{at_random(1, 2, 3, 9)}; kill driver at step 12"
    common = ["run", job, "--storage", str(tmp_path), "--name", "run"]
    with driver(cluster, *common, "--workers", "2", "--inject", faults) as first:
        _, errors = first.communicate(timeout=200)
    assert first.returncode == -signal.SIGKILL, errors
    assert errors.count("fault injection: kill worker") == 3
    assert not (tmp_path / "run" / "result.json").exists()

    assert not lasting(processes, 60), "its workers, which may still write checkpoints, end with it"
    kept = max(int(path.stem[5:]) for path in (tmp_path / "run").glob("checkpoints/step-*.safetensors"))
    with driver(cluster, *common, "--workers", "1", "--quiet", "--inject", "pause worker 0 at step 17") as second:
        wait_for_checkpoint(tmp_path / "run", second, kept)
        second.send_signal(signal.SIGKILL)
        second.communicate()
    assert not (tmp_path / "run" / "weights.safetensors").exists(), "the driver was killed too late"

    result = run(
        job, workers=2, inject="kill worker 1 at step 21; kill worker 0 at step 23; kill worker 1 at step 26"
    )
    undisturbed = run(job, workers=0, name="undisturbed")
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert told(result) == told(undisturbed)
    kinds = [interruption["kind"] for interruption in result.interruptions]
    assert kinds == ["worker"] * 3 + ["driver"] * 2 + ["worker"] * 3
    assert (result.restarts, result.world_sizes) == (8, [2] * 4 + [1] + [2] * 4)
    for one in result.interruptions[:4] + result.interruptions[5:]:
        again = one["step"] - one["resumed_step"]
        assert 0 <= again <= 2, "no more than the steps between two checkpoints are run again"
    killed = [one for one in result.interruptions if one["kind"] == "worker"]
    assert all(one["what"] == "its process was killed, or crashed" for one in killed)
    assert [one["ranks"] for one in killed[3:]] == [[1], [0], [1]]
    assert all(one["seconds"] > 0 and len(one["nodes"]) == 1 for one in killed)


class Passes(models.SlowPairs):
    """Sample 60 raises, or hangs, as long as the file `times` in `folder` counts above 0."""

    def __init__(self, folder: str, hangs: bool = False) -> None:
        super().__init__(0.005)
        self.times = Path(folder) / "times"
        self.hangs = hangs

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 60 and (left := int(self.times.read_text())) > 0:
            self.times.write_text(str(left - 1))
            if self.hangs:
                self.hang_for_ever()
            raise OSError("the file server is away")
        return super().__getitem__(index)

    def hang_for_ever(self) -> None:
        while True:
            time.sleep(0.1)


def passing(folder: Path, times: int, **keys: Any) -> dict[str, Any]:
    (folder / "times").write_text(str(times))
    hangs = keys.pop("hangs", False)
    dataset = {"target": "tests.driver.test_faults:Passes", "args": {"folder": str(folder), "hangs": hangs}}
    return {**SLOW, "dataset": dataset, "workers": 2, "shuffle": False, "epochs": 1, **keys}


@pytest.mark.ray
def test_an_error_that_passes_is_survived(run_in_session: Run, tmp_path: Path) -> None:
    result = run_in_session(**passing(tmp_path, 1))
    (one,) = result.interruptions
    assert one["kind"] == "error"
    assert "sample 60 of the dataset raised OSError: the file server is away" in one["what"]
    assert (
        result.weights_sha256 == run_in_session(**passing(tmp_path, 0, workers=0, name="undisturbed")).weights_sha256
    )


SEEN_AT_IMPORT = os.environ.get("DP_RAY_TESTED")


class Told(models.SlowPairs):
    """Tells each process that has it: its runtime environment by Ray, and what it has seen of `env`."""

    def __init__(self, folder: str) -> None:
        super().__init__(0.0)
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id():  # the driver has one too
            told = {"runtime_env": list(ray.get_runtime_context().runtime_env), "seen": SEEN_AT_IMPORT}
            (Path(folder) / str(os.getpid())).write_text(json.dumps(told))


def telling(folder: Path, **keys: Any) -> str:
    (folder / "told").mkdir()
    dataset = {"target": "tests.driver.test_faults:Told", "args": {"folder": str(folder / "told")}}
    return job_file(folder, dataset=dataset, epochs=1, **keys)


def told_in(folder: Path) -> list[dict[str, Any]]:
    """What the processes have told, in the order of their beginnings."""
    paths = sorted((folder / "told").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.full
@pytest.mark.ray
def test_restarted_workers_need_no_environment_of_their_own_on_a_ray_of_dp_rays_own(tmp_path: Path) -> None:
    """Ray would start its agent for one, which takes longer than all else in a restart."""
    job = telling(tmp_path, on_lost_worker="restart")
    common = ["run", job, "--storage", str(tmp_path), "--quiet", "--json", "--workers", "2"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    line = [sys.executable, "-m", "dp_ray", *common, "--inject", "kill worker 1 at step 4"]
    done = subprocess.run(line, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert told_in(tmp_path) == [{"runtime_env": [], "seen": None}] * 4
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["restarts"] == 1
    undisturbed = dp_ray.run(job, workers=0, storage=str(tmp_path), name="undisturbed")
    assert result["weights_sha256"] == undisturbed.weights_sha256


@pytest.mark.full
@pytest.mark.ray
def test_restarted_workers_have_env_before_they_import_anything(run: Run, tmp_path: Path) -> None:
    job = telling(tmp_path, env={"DP_RAY_TESTED": "7"}, on_lost_worker="restart")
    result = run(job, workers=2, inject="kill worker 1 at step 4")
    assert result.restarts == 1
    *first, third, fourth = told_in(tmp_path)
    assert [one["seen"] for one in (*first, third, fourth)] == ["7"] * 4
    assert [one["runtime_env"].count("env_vars") for one in (*first, third, fourth)] == [0, 0, 1, 1]


class ShortOfMemory(torch.nn.Linear):
    """A model that finds no memory on a GPU in the second attempt, as where a killed worker's is not free yet."""

    def __init__(self, folder: str) -> None:
        super().__init__(6, 3)
        self.attempt = 0
        if own_rank() == 0:
            built = Path(folder) / "built"
            self.attempt = 1 + int(built.read_text() if built.exists() else 0)
            built.write_text(str(self.attempt))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.attempt == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().forward(inputs.flatten(1))


@pytest.mark.full
@pytest.mark.ray
def test_memory_that_is_not_free_right_after_a_restart_is_waited_for(run_in_session: Run, tmp_path: Path) -> None:
    model = {"target": "tests.driver.test_faults:ShortOfMemory", "args": {"folder": str(tmp_path)}}
    keys = passing(tmp_path, 0, model=model, on_lost_worker="restart")
    result = run_in_session(**keys, inject="kill worker 1 at step 3")
    assert [interruption["kind"] for interruption in result.interruptions] == ["worker", "error"]
    assert "out of memory" in result.interruptions[1]["what"]
    assert (result.status, result.world_sizes) == ("done", [2, 2, 2])


@pytest.mark.full
@pytest.mark.ray
def test_an_error_that_comes_back_ends_the_job_at_once(run: Run, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sample 60 of the dataset raised OSError"):
        run(**passing(tmp_path, 99, retries=50, workers=1))
    left = dp_ray.load(tmp_path / "run")
    assert (left.status, left.restarts, left.world_sizes) == ("failed", 1, [1, 1])
    assert int((tmp_path / "times").read_text()) == 97


@pytest.mark.ray
def test_a_worker_that_hangs_is_named_with_its_stack_and_replaced_and_so_is_a_stopped_one(
    run_in_session: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = passing(tmp_path, 1, hangs=True, timeouts={"step": 4}, quiet=False, on_lost_worker="restart")
    result = run_in_session(**keys, inject="pause worker 1 at step 8")
    hung, stopped = result.interruptions
    # Sample 60 is of step 6, which rank 0 reads while the gradients of step 5 are summed.
    assert (hung["kind"], hung["ranks"], hung["step"]) == ("hang", [0], 5)
    assert (stopped["kind"], stopped["ranks"]) == ("hang", [1])
    assert stopped["step"] in (6, 7, 8), "what a process had not reported when it was stopped is not known"
    assert "it does not answer: its process is stopped, or its node is cut off" in stopped["what"]
    said = capfd.readouterr().err
    assert "hangs, and is replaced: rank 0 on " in said
    assert "has been in step 5 for " in said
    assert "in hang_for_ever" in said
    # Rank 0 has not come to the sum of the gradients of step 6, or 5, in which rank 1 waits.
    behind = r"; in the collectives of gloo \S+ all rank 0 is behind: rank 0: \w+ \d+ of .*, over, rank 1: "
    assert re.search(behind, hung["what"])
    assert "(more in flight_recorder/)" in hung["what"]
    kept = (Path(result.run_dir) / "flight_recorder").iterdir()
    dumps = {path.name.partition("-rank-")[2]: path for path in kept}
    assert {"0.json", "1.json"} <= dumps.keys()
    (dump,) = json.loads(dumps["1.json"].read_text())
    assert any(entry["profiling_name"].startswith("gloo:") for entry in dump["entries"])
    assert result.rows == 96


@pytest.mark.full
@pytest.mark.ray
def test_a_worker_that_hangs_again_in_the_same_step_ends_the_job(run: Run, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"(?s)hangs again: rank 0 on .* in step 6 for .*in hang_for_ever"):
        run(**passing(tmp_path, 99, hangs=True, timeouts={"step": 2}, workers=1))


def test_faults_that_cannot_be_are_refused_before_anything_starts(in_project: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"storage": str(tmp_path), "name": "run"}
    with pytest.raises(JobError, match="--inject 'kill everything': must be faults"):
        dp_ray.run("jobs/tutorial.yaml", **keys, inject="kill everything")
    with pytest.raises(JobError, match="--inject: workers is 0"):
        dp_ray.run("jobs/tutorial.yaml", **keys, workers=0, inject="kill worker 0 at step 1")
    assert not (tmp_path / "run").exists()


def listening() -> set[int]:
    """The ports on which this process or one of the cluster's listens."""
    pids = {os.getpid(), *(process.pid for process in psutil.process_iter() if is_ours(process))}
    found = psutil.net_connections("inet")
    return {one.laddr[1] for one in found if one.pid in pids and one.status == psutil.CONN_LISTEN and one.laddr}


def is_ours(process: psutil.Process) -> bool:
    """Whether the cluster of this session started it: another session's tests may run beside these."""
    with contextlib.suppress(psutil.Error):
        return ours() in process.environ()
    return False


def shared_memory() -> set[str]:
    """What is there, but for the semaphores of libraries that the tests themselves import."""
    found = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in found if not name.startswith("sem.loky-")}


def processes() -> set[int]:
    """The workers and controllers of this session's cluster."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if (WORKER_PROCESS in line or CONTROLLER_PROCESS in line) and is_ours(process):
            found.add(process.pid)
    return found


@pytest.mark.full
@pytest.mark.ray
def test_workers_killed_while_they_start_on_a_full_cluster_leave_its_room_free(run: Run) -> None:
    """What a start that failed held on to would be missing for ever: two workers take all that there is."""
    killed: list[int] = []
    ended = threading.Event()

    def kill_as_they_start() -> None:
        delays = [0.5, 2.0, 3.0]
        while delays and not ended.wait(0.05):
            new = [pid for pid in sorted(processes()) if is_worker(pid) and pid not in killed]
            if new:
                ended.wait(delays.pop(0))
                killed.extend(new)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(new[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_as_they_start)
    killer.start()
    try:
        result = run("jobs/tutorial.yaml", workers=2, shards=2, cpus_per_worker=4, retries=9)
    finally:
        ended.set()
        killer.join()
    assert result.rows == 100
    assert killed
    assert run("jobs/tutorial.yaml", workers=0, shards=2, name="undisturbed").outputs_sha256 == result.outputs_sha256


def is_worker(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return WORKER_PROCESS in " ".join(psutil.Process(pid).cmdline())
    return False


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize("then", ["go_on", "restart"])
def test_soak_kills_every_few_seconds_lose_and_leave_nothing(run: Run, then: str) -> None:
    """The steps of 200 tutorials, 800, while workers are killed at random times from outside."""
    keys: dict[str, Any] = {"model": "tests.support.models:Linear", "batch_size": 10, "shards": 4}
    keys["on_lost_worker"] = then
    target = "tests.driver.test_faults:Slowly"
    undisturbed = run(**keys, workers=0, name="undisturbed", dataset={"target": target, "args": {"seconds": 0.0}})
    ports, memory = listening(), shared_memory()
    kills: list[int] = []
    ended = threading.Event()

    def kill_now_and_then() -> None:
        chance = random.Random(7)
        while not ended.wait(chance.uniform(3, 6)):
            for pid in sorted(processes()):
                if is_worker(pid) and len(kills) < 2:
                    os.kill(pid, signal.SIGKILL)
                    kills.append(pid)
                    break

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    started = time.monotonic()
    try:
        result = run(**keys, workers=2, retries=100, dataset={"target": target, "args": {"seconds": 0.008}})
    finally:
        ended.set()
        killer.join()
    assert time.monotonic() - started < 900  # a busy machine takes minutes
    assert len(kills) >= 2
    assert 1 <= result.restarts <= len(kills)
    assert result.outputs_sha256 == undisturbed.outputs_sha256
    seen = [(report.step, report.shard) for report in result.iter_shapes()]
    there = [(step, shard) for step in range(800) for shard in range(4)]
    assert seen == there if then == "restart" else set(seen) <= set(there), "a lost worker's last ones may be missing"
    left = lasting(lambda: {*processes(), *(listening() - ports), *(shared_memory() - memory)}, 30)
    assert not left
    assert not processes()
    assert not listening() - ports


def lasting(found: Callable[[], set[Any]], seconds: float) -> set[Any]:
    """What is found all the time, for so many seconds; other tests on this machine come and go."""
    until = time.monotonic() + seconds
    left = found()
    while left and time.monotonic() < until:
        time.sleep(0.2)
        left &= found()
    return left


class Slowly(models.Rows):
    """8,000 rows; so many seconds for a shard of them, whatever its size."""

    def __init__(self, seconds: float) -> None:
        super().__init__(8000)
        self.seconds = seconds

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self.seconds)
        return [self[index] for index in indices]
