"""Two hosts with addresses of their own: node ranks, the network interface, storage that is not shared."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dp_ray
from tests.conftest import ROOT
from tests.hosts import PORT, Host, hosts

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


def test_workers_on_two_hosts_find_each_other_and_know_their_ranks(two_hosts: list[Host], tmp_path: Path) -> None:
    head = two_hosts[0]
    flags = ["jobs/tutorial.yaml", "--workers", "4", "--json", "--storage", str(tmp_path)]
    flags += ["--address", f"{head.address}:{PORT}"]
    done = head.run(sys.executable, "-m", "dp_ray", "run", *flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    workers = result["workers"]
    assert {worker["node"] for worker in workers} == {"10.77.0.1", "10.77.0.2"}
    assert [(worker["node_rank"], worker["local_rank"]) for worker in workers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({worker["node"] for worker in workers if worker["node_rank"] == 0}) == 1
    loaded = dp_ray.load(tmp_path / "tutorial")
    assert {report.node for report in loaded.shapes} == {"10.77.0.1", "10.77.0.2"}
    assert loaded.outputs.shape == (100, 2)


def test_more_than_both_hosts_hold_is_refused_with_the_numbers(two_hosts: list[Host], tmp_path: Path) -> None:
    head = two_hosts[0]
    flags = ["jobs/tutorial.yaml", "--workers", "2", "--set", "cpus_per_worker=3", "--storage", str(tmp_path)]
    flags += ["--address", f"{head.address}:{PORT}"]
    done = head.run(sys.executable, "-m", "dp_ray", "run", *flags, cwd=ROOT)
    assert done.returncode == 1
    assert (
        "2 workers need 6 CPU (3 CPU each, PACK); the cluster of 2 nodes has 4 CPU, room for 0 workers" in done.stderr
    )
