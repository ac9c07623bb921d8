"""Who runs a prepared job: this process, workers of its own, or a session's. Each is asked by the same protocol."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.cluster.kinds import Workers
from dp_ray.cluster.own import OwnWorkers
from dp_ray.driver.run import Options, execute
from dp_ray.driver.sessions import Session
from dp_ray.errors import ClusterError, JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import WorkerKeys
from dp_ray.monitor.console import Console
from dp_ray.monitor.in_process import InProcess
from dp_ray.serving.wire import HeldBytes
from tests.support import training
from tests.support.cluster import Cluster
from tests.support.trainings import job_of, mean_loss

QUIET = Options(quiet=True)


def job_on(folder: Path, workers: int, model: nn.Module, name: str = "run") -> Job:
    keys = {"workers": workers, "shards": 2, "bitwise": True, "storage": str(folder), "name": name}
    return job_of("mlp", "Pairs", **keys).model_copy(update={"model": model})


def own_workers(address: str | None) -> OwnWorkers:
    return OwnWorkers(address, False, Console("run", quiet=True))


def check_trained(result: dp_ray.Result, given: nn.Module) -> None:
    """The weights of a plain loop in this process, which began with a copy of what the job was given."""
    model = copy.deepcopy(given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = training.plain_loop(model, training.Pairs(), 7, 2, mean_loss, optimizer)
    torch.testing.assert_close(dict(result.weights), model.state_dict(), rtol=1e-5, atol=1e-6)
    assert [row["loss"] for row in result.history] == pytest.approx(losses, rel=1e-5)


def test_this_process_trains_a_copy_as_often_as_it_is_asked(tmp_path: Path, in_project: Path) -> None:
    here, given = InProcess(), training.mlp()
    before = copy.deepcopy(given.state_dict())
    results = [execute(job_on(tmp_path, 0, given, name), QUIET, here) for name in ("one", "two")]
    check_trained(results[0], given)
    assert results[0].weights_sha256 == results[1].weights_sha256
    for name, tensor in given.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.ray
def test_own_workers_and_those_of_a_session_give_the_bits_of_this_process(
    session: Session, cluster: Cluster, tmp_path: Path, in_project: Path
) -> None:
    given = training.mlp()
    here = execute(job_on(tmp_path, 0, given, "here"), QUIET)
    check_trained(here, given)
    with contextlib.closing(own_workers(cluster.address)) as own:
        alone = execute(job_on(tmp_path, 2, given, "own"), QUIET, own)
    shared = session.execute(job_on(tmp_path, 2, given, "session"), QUIET)
    assert {one.weights_sha256 for one in (alone, shared)} == {here.weights_sha256}
    assert [one.world_sizes for one in (here, alone, shared)] == [[1], [2], [2]]


@pytest.mark.full
@pytest.mark.ray
def test_each_kind_serves_modules_and_then_runs_a_job(
    session: Session, cluster: Cluster, tmp_path: Path, in_project: Path
) -> None:
    given, weights = training.mlp(), set[str | None]()
    kinds: list[tuple[int, Workers]] = [(0, InProcess()), (2, own_workers(cluster.address)), (2, session._workers)]
    for at, (workers, kind) in enumerate(kinds):
        serving = kind.serve(WorkerKeys(workers=workers))
        members = serving.ready()
        assert len(members) >= max(1, workers)
        assert set(serving.ask(dict.fromkeys(members, HeldBytes(1))).values()) == {0}
        serving.close()
        weights.add(execute(job_on(tmp_path, workers, given, f"run-{at}"), QUIET, kind).weights_sha256)
    assert len(weights) == 1 and None not in weights


class NotCopied(nn.Linear):
    """A model that cannot be copied, nor be pickled."""

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("never copied")


@pytest.mark.full(but=["own workers"])
@pytest.mark.parametrize(
    ("count", "workers"), [(0, InProcess()), (2, own_workers("127.0.0.1:1"))], ids=["this process", "own workers"]
)
def test_a_model_that_they_cannot_take_leaves_the_run_that_is_there(
    tmp_path: Path, in_project: Path, count: int, workers: Workers
) -> None:
    before = execute(job_on(tmp_path, 0, training.mlp()), QUIET)
    with pytest.raises(JobError, match=r"model: .*never copied"):
        execute(job_on(tmp_path, count, NotCopied(2, 2)), Options(quiet=True, overwrite=True), workers)
    assert dp_ray.load(before.run_dir).weights_sha256 == before.weights_sha256


def test_own_workers_without_a_ray_leave_the_run_that_is_there(tmp_path: Path, in_project: Path) -> None:
    before = execute(job_on(tmp_path, 0, training.mlp()), QUIET)
    with (
        contextlib.closing(own_workers("127.0.0.1:1")) as own,
        pytest.raises(ClusterError, match=r"no Ray answers at 127\.0\.0\.1:1"),
    ):
        execute(job_on(tmp_path, 2, training.mlp()), Options(quiet=True, overwrite=True), own)
    assert dp_ray.load(before.run_dir).weights_sha256 == before.weights_sha256
