"""Three hosts with addresses of their own: ranks, the network interface, and what happens when one goes or comes."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from tests.support.cluster import ROOT
from tests.support.drivers import SLOW, told
from tests.support.hosts import ENVIRONMENT, PORT, Host, hosts

pytestmark = [pytest.mark.ray, pytest.mark.root]
ONE_EACH: dict[str, Any] = {"resources_per_worker": {"slot": 1}}
TRAINING = {**SLOW, **ONE_EACH, "dataset": {"target": "tests.support.models:SlowPairs", "args": {"seconds": 0.03}}}


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def up(three_hosts: list[Host]) -> list[Host]:
    """All three, also after a test that took one away."""
    for host in three_hosts[1:]:
        host.heal()
        if not host.is_up:
            host.kill()
            host.join()
            host.wait_until_up()
    return three_hosts


class Driver:
    """The program on the first host, whose lines can be waited for."""

    def __init__(self, head: Host, *args: str) -> None:
        line = head.command(sys.executable, "-m", "dp_ray", "run", *args, "--address", f"{head.address}:{PORT}")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(line, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(iter(self.process.stderr.readline, ""))

    def wait_for(self, what: str, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while not any(what in line for line in list(self.said)):
            assert self.process.poll() is None, "".join(self.said)
            assert time.monotonic() < until, "".join(self.said)
            time.sleep(0.05)

    def end(self) -> int:
        """The exit status."""
        status = self.process.wait(240)
        self._reader.join()
        return status

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self._reader.join()
        self.process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., list[str]]:
    """The arguments that run a job of these keys, in a folder of the test's own."""

    def write(**keys: Any) -> list[str]:
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(keys))
        return [str(path), "--storage", str(tmp_path), "--name", "run"]

    return write


def test_workers_on_three_hosts_find_each_other_and_know_their_ranks(up: list[Host], tmp_path: Path) -> None:
    head = up[0]
    flags = ["jobs/tutorial.yaml", "--workers", "6", "--json", "--storage", str(tmp_path)]
    flags += ["--address", f"{head.address}:{PORT}"]
    done = head.run(sys.executable, "-m", "dp_ray", "run", *flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    workers = result["workers"]
    assert {worker["node"] for worker in workers} == {f"10.77.0.{number}" for number in (1, 2, 3)}
    places = [(worker["node_rank"], worker["local_rank"]) for worker in workers]
    assert places == [(node, local) for node in range(3) for local in range(2)]
    for node in range(3):
        assert len({worker["node"] for worker in workers if worker["node_rank"] == node}) == 1
    loaded = dp_ray.load(tmp_path / "tutorial")
    assert {report.node for report in loaded.shapes} == {worker["node"] for worker in workers}
    assert loaded.outputs.shape == (100, 2)


@pytest.mark.full
def test_more_than_all_hosts_hold_is_refused_with_the_numbers(up: list[Host], tmp_path: Path) -> None:
    head = up[0]
    flags = ["jobs/tutorial.yaml", "--workers", "2", "--set", "cpus_per_worker=3", "--storage", str(tmp_path)]
    flags += ["--address", f"{head.address}:{PORT}"]
    done = head.run(sys.executable, "-m", "dp_ray", "run", *flags, cwd=ROOT)
    assert done.returncode == 1
    assert "2 workers need 6 CPU (3 CPU each); the cluster of 3 nodes has 6 CPU, room for 0 workers" in done.stderr


@pytest.mark.full
def test_a_training_lives_through_a_host_killed_a_host_added_and_a_host_drained(
    up: list[Host], tmp_path: Path, job: Callable[..., list[str]], in_project: Path
) -> None:
    keys = {**TRAINING, "epochs": 9, "workers": {"min": 1, "max": 3}, "retries": 2, "on_lost_worker": "restart"}
    inject = ["--inject", "kill worker 2 at step 4; drain node 10.77.0.2 for 60s at step 70"]
    with Driver(up[0], *job(**keys), *inject) as driver:
        driver.wait_for("interrupted, worker")
        driver.wait_for("resumed from step 3")
        driver.wait_for("epoch 0, step 9")
        up[2].kill()
        driver.wait_for("interrupted, node")
        up[2].join()
        driver.wait_for("interrupted, resize: there is room for 3 workers")
        assert driver.end() == 0, "".join(driver.said)
    result = dp_ray.load(tmp_path / "run")
    here = dp_ray.run(str(tmp_path / "job.yaml"), workers=0, storage=str(tmp_path), name="here", quiet=True)
    assert result.weights_sha256 == here.weights_sha256
    seen = result.interruptions
    assert [one["kind"] for one in seen] == ["worker", "node", "resize", "preemption"]
    assert result.world_sizes == [3, 3, 2, 3, 2]
    assert seen[1]["nodes"] == ["10.77.0.3"]
    assert [one["step"] - one["resumed_step"] for one in seen[2:]] == [0, 0], "nothing is lost between two steps"
    assert seen[3]["what"] == "Ray drains 10.77.0.2"
    assert "10.77.0.2" not in {worker["node"] for worker in result.workers}
    up[1].kill()  # a node that was drained takes no more work


@pytest.mark.full
def test_survivors_go_on_without_a_host_until_it_comes_back_and_without_one_that_is_drained(
    up: list[Host], tmp_path: Path, job: Callable[..., list[str]], in_project: Path
) -> None:
    keys = {**TRAINING, "epochs": 14, "workers": 3, "retries": 1}
    inject = ["--inject", "drain node 10.77.0.2 for 60s at step 100"]
    with Driver(up[0], *job(**keys, timeouts={"capacity": 4}), *inject) as driver:
        driver.wait_for("epoch 0, step 9")
        up[2].kill()
        driver.wait_for("no node has room for another worker now: the others go on without it")
        up[2].join()
        driver.wait_for("interrupted, preemption: Ray drains 10.77.0.2", 200)
        assert driver.end() == 0, "".join(driver.said)
    result = dp_ray.load(tmp_path / "run")
    here = dp_ray.run(str(tmp_path / "job.yaml"), workers=0, storage=str(tmp_path), name="here", quiet=True)
    assert result.weights_sha256 == here.weights_sha256
    assert told(result) == told(here)
    assert result.world_sizes == [3, 2, 3, 2]
    seen = [(one["kind"], one["nodes"], one["level"]) for one in result.interruptions]
    assert seen == [("node", ["10.77.0.3"], "memory"), ("preemption", ["10.77.0.2"], "memory")]
    assert all(one["step"] == one["resumed_step"] for one in result.interruptions)
    up[1].kill()  # a node that was drained takes no more work


@pytest.mark.full
def test_a_host_that_is_cut_off_costs_time_and_no_sample(
    up: list[Host], tmp_path: Path, job: Callable[..., list[str]], in_project: Path
) -> None:
    dataset = {"target": "tests.driver.test_runs_on_ray:Slow", "args": {"length": 900}}
    keys = {"model": "tests.support.models:Linear", "dataset": dataset, "batch_size": 9, "shards": 3, **ONE_EACH}
    with Driver(up[0], *job(**keys, workers={"min": 1, "max": 3}, on_lost_worker="restart")) as driver:
        driver.wait_for("3 workers on 3 nodes")
        time.sleep(2)
        up[2].cut()
        driver.wait_for("interrupted")
        driver.wait_for("2 workers on 2 nodes")
        up[2].heal()
        assert driver.end() == 0, "".join(driver.said)
    result = dp_ray.load(tmp_path / "run")
    here = dp_ray.run(str(tmp_path / "job.yaml"), workers=0, storage=str(tmp_path), name="here", quiet=True)
    assert result.outputs_sha256 == here.outputs_sha256
    assert result.interruptions[0]["kind"] == "node"
    assert result.interruptions[0]["nodes"] == ["10.77.0.3"]
    assert result.world_sizes[:2] == [3, 2]


@pytest.mark.full
@pytest.mark.parametrize("task", ["train", "predict"])
def test_survivors_go_on_without_a_host_that_is_cut_off_and_what_it_writes_does_not_count(
    up: list[Host], tmp_path: Path, job: Callable[..., list[str]], in_project: Path, task: str
) -> None:
    """The host that is cut off reaches the storage all the time."""
    if task == "train":
        keys = {**TRAINING, "epochs": 8, "checkpoint": {"every_steps": 1}}
    else:
        dataset = {"target": "tests.driver.test_runs_on_ray:Slow", "args": {"length": 900}}
        keys = {"model": "tests.support.models:Linear", "dataset": dataset, "batch_size": 9, "shards": 3, **ONE_EACH}
    with Driver(up[0], *job(**keys, workers=3)) as driver:
        driver.wait_for("3 workers on 3 nodes")
        if task == "train":
            driver.wait_for("epoch 0, step 9")  # so that there is a state
        time.sleep(2)
        up[2].cut()
        driver.wait_for("interrupted, node: its node does not answer")
        driver.wait_for("2 workers on 2 nodes")
        driver.wait_for("from memory")
        up[2].heal()
        assert driver.end() == 0, "".join(driver.said)
    result = dp_ray.load(tmp_path / "run")
    here = dp_ray.run(str(tmp_path / "job.yaml"), workers=0, storage=str(tmp_path), name="here", quiet=True)
    assert (result.weights_sha256, result.outputs_sha256) == (here.weights_sha256, here.outputs_sha256)
    assert task != "train" or told(result) == told(here)
    lost = result.interruptions[0]
    assert (lost["kind"], lost["nodes"], lost["level"]) == ("node", ["10.77.0.3"], "memory")
    assert result.world_sizes[:2] == [3, 2]


@pytest.mark.full
def test_a_job_that_finds_no_room_any_more_says_so_and_can_be_run_again_with_less(
    up: list[Host], tmp_path: Path, job: Callable[..., list[str]], in_project: Path
) -> None:
    keys = {**TRAINING, "epochs": 2, "timeouts": {"capacity": 4}, "on_lost_worker": "restart"}
    with Driver(up[0], *job(**keys, workers=3)) as driver:
        driver.wait_for("3 workers on 3 nodes")
        time.sleep(3)
        up[2].kill()
        assert driver.end() == 75
    said = "".join(driver.said)
    assert (
        "error: 3 workers need 3 CPU, 3 slot (1 CPU, 1 slot each); 2 nodes have room for 2, and no more came" in said
    )
    assert "in 4 s (timeouts.capacity)" in said
    result = dp_ray.run(str(tmp_path / "job.yaml"), workers=0, storage=str(tmp_path), name="run", quiet=True)
    here = dp_ray.run(str(tmp_path / "job.yaml"), workers=0, storage=str(tmp_path), name="here", quiet=True)
    assert result.weights_sha256 == here.weights_sha256
    assert [one["kind"] for one in result.interruptions] == ["node", "driver"]
