"""`session.parallel`, and a Ray that a parallel module has started: jobs and parallel modules take turns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.errors import ClusterError, JobError
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]
MORE_THAN_HALF = 5  # workers of the cluster's 8 CPUs: they find no place beside others
SECONDS = 300.0  # the machine may be busy


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


def test_a_module_gets_the_place_of_workers_that_do_not_leave_in_time(
    cluster: Cluster, tmp_path: Path, in_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, where they still start when they are to leave: Ray keeps the place of what it ends."""
    monkeypatch.setattr("dp_ray.driver.sessions.LEAVE_SECONDS", 0.0)
    monkeypatch.setattr("dp_ray.driver.sessions.CLOSE_SECONDS", 2.0)  # by then they have a place, and do not run yet
    keys: dict[str, Any] = {"workers": MORE_THAN_HALF, "timeouts": {"capacity": SECONDS}}
    with dp_ray.session(address=cluster.address, quiet=True, **keys) as session:
        with session.parallel(nn.Linear(2, 3), workers=2) as model:
            assert model(torch.ones(4, 2)).shape == (4, 3)
        assert session.run("jobs/tutorial.yaml", workers=2, storage=str(tmp_path)).status == "done"


def test_a_ray_of_a_modules_own_runs_no_job_and_ends_with_it(tmp_path: Path, in_project: Path) -> None:
    with dp_ray.DataParallel(nn.Linear(2, 3), 2, quiet=True) as model:
        assert model(torch.ones(4, 2)).shape == (4, 3)
        with pytest.raises(ClusterError, match=r"started its Ray for dp_ray.DataParallel, which is open: close that"):
            dp_ray.run("jobs/tutorial.yaml", workers=2, storage=str(tmp_path), quiet=True)
    assert dp_ray.run("jobs/tutorial.yaml", workers=2, storage=str(tmp_path), quiet=True).status == "done"


def test_workers_that_no_module_uses_make_room_for_more(in_project: Path) -> None:
    """As where a cell of a notebook is run again with more workers, and the first module is gone."""
    first = dp_ray.DataParallel(nn.Linear(2, 3), 1, quiet=True)
    with pytest.raises(JobError, match="workers: this module asks for 2"):
        dp_ray.DataParallel(nn.Linear(2, 3), 2, quiet=True)
    del first
    with dp_ray.DataParallel(nn.Linear(2, 3), 2, quiet=True) as model:
        model(torch.ones(4, 2))
        assert [one.rank for one in model.shapes] == [0, 1]
