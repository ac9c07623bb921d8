"""`session.parallel`, and a Ray that a parallel module has started: jobs and parallel modules take turns."""

import copy
import os
import pickle
import re
import signal
import time
from pathlib import Path
from typing import Any, cast

import pytest
import ray
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dp_ray
from dp_ray.cluster.serving import END_SECONDS
from dp_ray.errors import ClusterError, JobError
from dp_ray.monitor import attempts
from tests.support.cluster import Cluster
from tests.support.messy import StartsThread
from tests.support.parallel_models import NotesProcess
from tests.support.within import within

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SECONDS = 300.0  # the machine may be busy


@pytest.mark.full
def test_a_session_serves_a_module_or_runs_a_job(cluster: Cluster, tmp_path: Path, in_project: Path) -> None:
    with dp_ray.session(address=cluster.address, workers=2, quiet=True) as session:
        with session.parallel(nn.Linear(2, 3)) as model:
            model(torch.ones(4, 2)).sum().backward()
            assert [one.rank for one in model.shapes] == [0, 1]
            with pytest.raises(ClusterError, match=r"the session's workers serve a dp_ray.DataParallel; close that"):
                session.run("jobs/tutorial.yaml", workers=2, storage=str(tmp_path))
            with pytest.raises(JobError, match="workers: the module asks for 3, the session has 2"):
                session.parallel(nn.Identity(), 3)
        session.parallel(nn.Linear(2, 3))  # gone at once, without `close`
        result = session.run("jobs/tutorial.yaml", workers=2, storage=str(tmp_path))
        assert result.status == "done"
        left = session.parallel(nn.Linear(2, 3))
        assert left(torch.ones(4, 2)).shape == (4, 3)
    with pytest.raises(ClusterError, match="workers have ended"):
        left(torch.ones(4, 2))


def pids_of(model: dp_ray.DataParallel) -> list[int]:
    return [one.place.pid for one in model._exchange.workers.serving.ready()]


def test_jobs_and_modules_take_turns_on_the_same_processes(
    cluster: Cluster, tmp_path: Path, in_project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(name: str) -> list[int]:
        """The processes of a job's workers."""
        log = tmp_path / name
        keys: dict[str, Any] = {"model": NotesProcess(str(log)), "dataset": TensorDataset(torch.ones(8, 2))}
        session.run(task="predict", batch_size=4, workers=2, name=name, storage=str(tmp_path / "runs"), **keys)
        return sorted({int(one) for one in log.read_text().split()})

    with dp_ray.session(address=cluster.address, workers=2) as session:
        first = run("first")
        assert len(first) == 2
        with session.parallel(nn.Linear(2, 3)) as model:
            model(torch.ones(4, 2)).sum().backward()
            assert sorted(pids_of(model)) == first
        assert run("second") == first
        with session.parallel(nn.Linear(2, 3), 1) as model:
            assert model(torch.ones(4, 2)).shape == (4, 3)
            stays, lost = pids_of(model)
            os.kill(lost, signal.SIGKILL)
            assert within(SECONDS, lambda: model(torch.ones(4, 2)).shape == (4, 3) and len(pids_of(model)) == 2)
            assert pids_of(model)[0] == stays
        third = run("third")
        assert stays in third and lost not in third and len(third) == 2
        assert "anew" not in capfd.readouterr().err
        model = session.parallel(StartsThread())
        model(torch.ones(4, 2))
        began = time.monotonic()
        model.close()
        assert time.monotonic() - began < END_SECONDS, "the workers say that they have finished"
        assert not set(run("fourth")) & set(third)
    assert "anew: the last job left the thread 'endless' behind" in capfd.readouterr().err


@pytest.mark.full
def test_each_session_serves_its_own_modules(cluster: Cluster, in_project: Path) -> None:
    keys: dict[str, Any] = {"address": cluster.address, "quiet": True}
    with dp_ray.session(workers=2, **keys) as second, dp_ray.session(workers=1, **keys) as first:
        one, two = first.parallel(nn.Linear(2, 3)), second.parallel(nn.Linear(2, 3), 1)
        of_first, of_second = pids_of(one), pids_of(two)
        assert (len(of_first), len(of_second)) == (1, 2) and not set(of_first) & set(of_second)
        assert pids_of(copy.deepcopy(two)) == of_second
        assert pids_of(pickle.loads(pickle.dumps(two))) == of_first, "in a pickle it names no session"
        bare = dp_ray.DataParallel(nn.Identity(), 1, quiet=True)
        assert pids_of(bare) == of_first, "it shares what serves already"
        first.close()
        with pytest.raises(ClusterError, match="workers have ended"):
            one(torch.ones(4, 2))
        two(torch.ones(4, 2)).sum().backward()


@pytest.mark.full
def test_a_ray_of_a_modules_own_runs_no_job_and_ends_with_it(tmp_path: Path, in_project: Path) -> None:
    with dp_ray.DataParallel(nn.Linear(2, 3), 2, quiet=True) as model:
        assert model(torch.ones(4, 2)).shape == (4, 3)
        with pytest.raises(ClusterError, match=r"started its Ray for dp_ray.DataParallel, which is open: close that"):
            dp_ray.run("jobs/tutorial.yaml", workers=2, storage=str(tmp_path), quiet=True)
    assert dp_ray.run("jobs/tutorial.yaml", workers=2, storage=str(tmp_path), quiet=True).status == "done"


@pytest.mark.full
def test_ctrl_c_while_a_module_closes_leaves_no_ray(in_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could end it later: the module is closed."""
    model = dp_ray.DataParallel(nn.Linear(2, 3), 2, quiet=True)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cast(Any, model._exchange.workers.serving)._thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.close()
    assert not ray.is_initialized()


@pytest.mark.full
def test_a_module_that_asks_for_more_workers_has_all_start_anew(
    in_project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a cell of a notebook is run again with more workers; what waits for its backward is run again."""
    monkeypatch.setattr(attempts, "SAY_AFTER", (0.0, 60.0))
    module, inputs = nn.Linear(2, 3), torch.ones(4, 2)
    first = dp_ray.DataParallel(module, 1)
    waits = first(inputs)
    with dp_ray.DataParallel(nn.Linear(2, 3), 2) as model:
        said = capfd.readouterr().err
        assert "parallel: 2 workers start in place of 1, since a module asks for more" in said
        assert re.search(
            r"waiting for workers, \d s so far: 0 of 2 are ready \(each needs 1 CPU\); free in the", said
        )
        model(inputs)
        assert [one.rank for one in model.shapes] == [0, 1]
        waits.sum().backward()
        assert module.weight.grad is not None
        assert torch.equal(module.weight.grad, torch.full((3, 2), 4.0))
    first.close()
