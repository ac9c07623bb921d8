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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import dp_ray
from dp_ray.cluster.own import OF_PROCESS
from dp_ray.errors import JobError
from dp_ray.messages import WorkerReady
from dp_ray.parallel.exchange import SharedWorkers
from dp_ray.serving.wire import HeldBytes
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


@contextlib.contextmanager
def grows_and_goes_back(cluster: Cluster, folder: Path, sign: str) -> Iterator[None]:
    """While the block runs a job of one worker, another node comes; the job ends when it has left that for `sign`.

    A worker takes all of a node. The node stays until the block's end.
    """
    go, run_dir = folder / "go", folder / "run"

    def told() -> dict[str, Any]:
        story: dict[str, Any] = json.loads((run_dir / "story.json").read_text())
        return {**story, "what": [one["what"] for one in story["interruptions"]]}

    with contextlib.ExitStack() as up:

        def meet() -> None:
            wait_until(lambda: go.exists() or any(run_dir.glob("checkpoints/step-*")))
            if not go.exists():  # as it does where the run has failed
                up.enter_context(node_of_another_kind(cluster, folder / "node.log"))
            wait_until(lambda: go.exists() or any(sign in one for one in told()["what"]))
            wait_until(lambda: go.exists() or told()["world_sizes"] == [1, 2, 1])
            go.touch()

        meeting = threading.Thread(target=meet)
        meeting.start()
        try:
            yield
        finally:
            go.touch()
            meeting.join()


def growing(folder: Path, **keys: Any) -> dict[str, Any]:
    """The keys of such a job."""
    return keys_of(
        storage=str(folder),
        name="run",
        dataset={"target": "tests.support.kinds:SlowUntil", "args": {"path": str(folder / "go")}},
        workers={"min": 1, "max": 2},
        cpus_per_worker=8,
        batch_size=48,
        epochs=60,
        checkpoint={"every_steps": 2},
        quiet=False,
        **keys,
    )


@pytest.mark.full
def test_an_elastic_job_does_not_grow_onto_a_node_of_another_kind(
    cluster: Cluster, tmp_path: Path, in_project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job grows onto the second node, meets what it is, and goes on without it."""
    keys = growing(tmp_path, retries=0, bitwise=True)
    go = tmp_path / "go"
    with grows_and_goes_back(cluster, tmp_path, "no workers are taken"):
        result = dp_ray.run(**keys, address=cluster.address)
        assert result.world_sizes == [1, 2, 1] and go.exists()
        assert [one["kind"] for one in result.interruptions] == ["resize"]
        (line,) = [one for one in capfd.readouterr().err.splitlines() if "no workers are taken on" in one]
        assert "which would change the bits" in line and "COMPATIBLE" in line
        attempts = json.loads((tmp_path / "run" / "about.json").read_text())["attempts"]
        assert len(attempts) == 2 and attempts[0]["kinds"] == attempts[1]["kinds"]
        with pytest.raises(JobError, match=r"bitwise: the workers would not give the same bits: .*MKL_CBWR"):
            dp_ray.run(**{**keys, "workers": 2, "name": "both"}, address=cluster.address)
    with lowest_kind(False):
        here = dp_ray.run(**{**keys, "workers": 0, "shards": 2, "name": "here"})
    assert result.weights_sha256 == here.weights_sha256


class BrokenThere(nn.Module):
    """A model whose forward meets a broken GPU on the node of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if LOWEST.keys() <= os.environ.keys():
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


@pytest.mark.full
def test_an_elastic_job_goes_on_without_a_node_whose_gpu_is_broken(
    cluster: Cluster, tmp_path: Path, in_project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = growing(tmp_path, model="tests.cluster.test_other_kinds_of_workers:BrokenThere", retries=1)
    with grows_and_goes_back(cluster, tmp_path, "uncorrectable ECC error"):
        result = dp_ray.run(**keys, address=cluster.address)
    assert result.world_sizes == [1, 2, 1]
    assert [one["kind"] for one in result.interruptions] == ["error"]
    assert "which has a broken GPU" in capfd.readouterr().err


@pytest.mark.full
def test_a_parallel_module_takes_no_worker_of_another_kind(
    cluster: Cluster, in_project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    with dp_ray.DataParallel(module, 2, address=cluster.address):
        pool: Any = SharedWorkers.by_owner[OF_PROCESS].serving

        def replace_second(env: dict[str, str]) -> None:
            """The worker in the place of the second one says that it computes with this in its environment."""

            def take_in(one: Any) -> None:
                if isinstance(one, WorkerReady) and one.name != stays.name:
                    came.append(one)
                    one = replace(one, computes={**one.computes, **env})
                before(one)

            came = list[WorkerReady]()
            stays, lost = pool.members
            monkeypatch.setattr(pool, "_take_in", take_in)
            os.kill(lost.place.pid, signal.SIGKILL)
            pool.ask({lost: HeldBytes(0)})  # it alone: the other one would wait for it in a collective
            wait_until(lambda: bool(pool.ready()) and bool(came))
            assert pool.members[0] is stays and lost not in pool.members

        before = pool._take_in
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
