"""Workers on Ray that would compute differently from those that run: a bitwise job does not take them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import dp_ray
from dp_ray.errors import JobError
from dp_ray.parallel.exchange import Workers
from tests.support import ray_forks
from tests.support.cluster import Cluster, end, free_port
from tests.support.kinds import LOWEST, lowest_kind
from tests.support.training import mlp
from tests.support.trainings import keys_of

pytestmark = pytest.mark.ray
SECONDS = 200.0  # for what takes some seconds on a machine that is not busy


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.1)


@contextlib.contextmanager
def node_of_another_kind(cluster: Cluster, log: Path) -> Iterator[None]:
    """Another node of the cluster while the block runs, as large as the first one."""
    line = [sys.executable, ray_forks.__file__, str(cluster.folder), "start", f"--address={cluster.address}"]
    line += ["--num-cpus=8", "--block", "--disable-usage-stats", f"--dashboard-agent-listen-port={free_port()}"]
    line += ["--min-worker-port=0", "--max-worker-port=0", "--include-log-monitor=false"]
    with (
        log.open("wb") as said,
        subprocess.Popen(line, stdout=said, stderr=said, cwd="/", env={**os.environ, **LOWEST}) as process,
    ):
        try:
            yield
        finally:
            end(process)


def test_an_elastic_job_does_not_grow_onto_a_node_of_another_kind(
    cluster: Cluster, tmp_path: Path, in_project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker takes all of a node. The job grows onto the second one, meets what it is, and goes on without it."""
    go, run_dir = tmp_path / "go", tmp_path / "run"
    keys = keys_of(
        storage=str(tmp_path),
        name="run",
        dataset={"target": "tests.support.kinds:SlowUntil", "args": {"path": str(go)}},
        workers={"min": 1, "max": 2},
        cpus_per_worker=8,
        retries=0,
        bitwise=True,
        batch_size=48,
        epochs=60,
        checkpoint={"every_steps": 2},
        quiet=False,
    )

    def told() -> dict[str, Any]:
        story: dict[str, Any] = json.loads((run_dir / "story.json").read_text())
        return {**story, "what": [one["what"] for one in story["interruptions"]]}

    with contextlib.ExitStack() as up:

        def meet() -> None:
            wait_until(lambda: go.exists() or any(run_dir.glob("checkpoints/step-*")))
            if not go.exists():  # as it does where the run has failed
                up.enter_context(node_of_another_kind(cluster, tmp_path / "node.log"))
            wait_until(lambda: go.exists() or any("no workers are taken" in one for one in told()["what"]))
            wait_until(lambda: go.exists() or told()["world_sizes"] == [1, 2, 1])
            go.touch()

        meeting = threading.Thread(target=meet)
        meeting.start()
        try:
            result = dp_ray.run(**keys, address=cluster.address)
        finally:
            go.touch()
            meeting.join()
        assert result.world_sizes == [1, 2, 1]
        assert [one["kind"] for one in result.interruptions] == ["resize", "resize"]
        (line,) = [one for one in capfd.readouterr().err.splitlines() if "no workers are taken on" in one]
        assert "which would change the bits" in line and "COMPATIBLE" in line
        attempts = json.loads((run_dir / "about.json").read_text())["attempts"]
        assert len(attempts) == 2 and attempts[0]["kinds"] == attempts[1]["kinds"]
        with pytest.raises(JobError, match=r"bitwise: the workers would not give the same bits: .*MKL_CBWR"):
            dp_ray.run(**{**keys, "workers": 2, "name": "both"}, address=cluster.address)
    with lowest_kind(False):
        here = dp_ray.run(**{**keys, "workers": 0, "shards": 2, "name": "here"})
    assert result.weights_sha256 == here.weights_sha256


class BrokenOnSecond(nn.Module):
    """A model whose forward meets a broken GPU on the second node, in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = mlp(), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls > 2 and LOWEST.keys() <= os.environ.keys():
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def test_a_job_goes_on_without_a_node_whose_gpu_is_broken(
    cluster: Cluster, tmp_path: Path, in_project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = keys_of(
        model="tests.test_other_kinds:BrokenOnSecond",
        storage=str(tmp_path),
        name="run",
        workers={"min": 1, "max": 2},
        cpus_per_worker=8,
        retries=1,
        shards=2,
        quiet=False,
    )
    with node_of_another_kind(cluster, tmp_path / "node.log"):
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2)
            result = dp_ray.run(**keys)
        finally:
            ray.shutdown()
    assert result.world_sizes == [2, 1]
    (only,) = result.interruptions
    assert only["kind"] == "error" and "uncorrectable ECC error encountered; a GPU of this node is" in only["what"]
    assert "which has a broken GPU" in capfd.readouterr().err


def test_a_parallel_module_takes_no_worker_of_another_kind(
    cluster: Cluster, in_project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    with dp_ray.DataParallel(module, 2, address=cluster.address):
        assert Workers.current is not None
        workers, pool = Workers.current, Workers.current.pool

        def replace_second(env: dict[str, str]) -> None:
            """The worker in the place of the second one gets this environment before it imports torch."""
            pool.keys = pool.keys.model_copy(update={"env": env})
            stays, lost = pool.members
            os.kill(lost.place.pid, signal.SIGKILL)
            pool.call({lost: ("held_bytes", 0)})  # it alone: the other one would wait for it in a collective
            wait_until(lambda: bool(workers.members()) and not pool._coming)
            assert pool.members[0] is stays and lost not in pool.members

        replace_second(LOWEST)
        assert len(pool.members) == 2, "without bitwise it is taken"
        with pytest.raises(JobError, match=r"bitwise: the workers would not give the same bits: .*MKL_CBWR"):
            dp_ray.DataParallel(module, 2, bitwise=True)
        replace_second({})
        with dp_ray.DataParallel(module, 2, bitwise=True) as second:
            assert len(pool.members) == 2
            replace_second(LOWEST)
            assert len(pool.members) == 1
            assert torch.equal(second(inputs), torch.cat([module(inputs[:2]), module(inputs[2:])]))
    assert "no worker is taken on" in capfd.readouterr().err
    assert not ray.is_initialized()
