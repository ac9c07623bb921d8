"""What the hosts of a job tell each other: who has come, how it ended, and what a signal means. Without Ray."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dp_ray.errors import ClusterLost
from dp_ray.places import node
from dp_ray.places.launchers import HostPlace
from dp_ray.places.node import HostsCommand
from dp_ray.places.own_ray import Machine
from tests.support import stand_in_ray
from tests.support.cluster import ROOT
from tests.support.on_hosts import Hosts, hosts_in, job_in
from tests.support.within import within

pytestmark = pytest.mark.slow
places = pytest.mark.places
SECONDS = 120.0


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv(stand_in_ray.FOLDER, str(tmp_path))
    with hosts_in(tmp_path, stand_in_ray.OWN) as made:
        yield made


def started(hosts: Hosts, count: int = 3) -> None:
    """All hosts of a job whose run has begun."""
    for rank in range(count):
        hosts.start(rank, "run", job_in(hosts.folder), hosts=count)
    runs = hosts.folder / "runs"
    assert within(SECONDS, runs.exists), hosts.all_said()
    for rank in range(1, count):
        hosts.wait_until_said(rank, "is part of the Ray at 10.0.0.1:6379")


@places
@pytest.mark.parametrize("status", [1, 75])
def test_all_hosts_end_with_the_runs_status(status: int, hosts: Hosts, tmp_path: Path) -> None:
    started(hosts)
    assert (tmp_path / "runs").read_text() == f"10.0.0.1:6379 {tmp_path / 'run.json'}"
    (tmp_path / "ends").write_text(str(status))
    assert hosts.statuses() == [status] * 3, hosts.all_said()
    assert (tmp_path / "meet" / "status").read_text() == f"{status}\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "status", "order"),
    [
        ("SIGUSR2", 75, (0, 1, 2)),
        pytest.param("SIGTERM", 75, (2, 1, 0), marks=places),
        pytest.param("SIGINT", 130, (1, 0, 2), marks=places),
    ],
)
def test_if_all_get_a_signal_the_run_is_stopped_once_and_none_is_drained(
    name: str, status: int, order: tuple[int, ...], hosts: Hosts, tmp_path: Path
) -> None:
    started(hosts)
    for rank in order:
        hosts.send(signal.Signals[name], rank)
    assert hosts.statuses() == [status] * 3, hosts.all_said()
    assert (tmp_path / "signals").read_text() == name
    assert not (tmp_path / "drained").exists()


@places
def test_a_second_signal_to_the_first_host_reaches_the_run(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    started(hosts, 2)
    hosts.send(signal.SIGTERM, 0)
    assert within(SECONDS, (tmp_path / "signals").exists)
    hosts.send(signal.SIGTERM, 0)
    assert hosts.statuses() == [130, 130], hosts.all_said()


@pytest.mark.full
def test_a_signal_to_another_host_alone_drains_it(hosts: Hosts, tmp_path: Path) -> None:
    started(hosts, 2)
    hosts.send(signal.SIGTERM, 1)
    assert within(SECONDS, (tmp_path / "drained").exists), hosts.all_said()
    assert hosts.processes[1].poll() is None, "it waits until the run has left it"
    (tmp_path / "left").touch()
    assert hosts.processes[1].wait(SECONDS) == 75, hosts.all_said()
    assert "the run has left this host" in hosts.said(1)
    (tmp_path / "ends").write_text("0")
    assert hosts.statuses() == [0, 75], hosts.all_said()
    assert "host 1" in hosts.said(0) and (tmp_path / "signals").read_text() == ""


@places
def test_a_second_signal_to_another_host_ends_it_at_once(hosts: Hosts, tmp_path: Path) -> None:
    started(hosts)
    hosts.send(signal.SIGTERM, 1)
    hosts.wait_until_said(1, "SIGTERM: this host waits")
    hosts.send(signal.SIGTERM, 1)
    assert hosts.processes[1].wait(SECONDS) == 130, hosts.all_said()
    (tmp_path / "ends").write_text("0")
    assert hosts.statuses() == [0, 130, 0], hosts.all_said()


@places
def test_the_first_host_is_killed(hosts: Hosts) -> None:
    started(hosts)
    hosts.processes[0].kill()
    assert hosts.statuses() == [-signal.SIGKILL, 75, 75], hosts.all_said()
    assert "the first host (host 0) went away; run the same again on all hosts" in hosts.said(2)
    assert within(SECONDS, lambda: not hosts.left()), hosts.left()


@places
def test_another_host_is_killed_and_comes_again(hosts: Hosts, tmp_path: Path) -> None:
    started(hosts, 2)
    hosts.processes[1].kill()
    hosts.wait_until_said(0, "went away")
    hosts.start(1, "run", str(tmp_path / "run.json"))
    assert within(SECONDS, lambda: hosts.said(1).count("is part of the Ray") == 2), hosts.all_said()
    (tmp_path / "ends").write_text("0")
    assert hosts.statuses() == [0, -signal.SIGKILL, 0], hosts.all_said()


@places
def test_if_the_first_ray_does_not_start_all_hosts_end_at_once(hosts: Hosts, tmp_path: Path) -> None:
    """Also one that comes only then."""
    (tmp_path / "broken_head").touch()
    for rank in (0, 1):
        hosts.start(rank, "run", job_in(tmp_path), hosts=3)
    hosts.wait_until_said(0, "waits for host 2, to tell it so")
    hosts.start(2, "run", job_in(tmp_path), hosts=3)
    assert hosts.statuses() == [1, 1, 1], hosts.all_said()
    for rank in range(3):
        assert "Ray cannot be started on" in hosts.said(rank) and "this Ray is broken" in hosts.said(rank)


@places
def test_a_host_whose_ray_does_not_start_is_named(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    for rank in (0, 1):
        hosts.start(rank, "run", job_in(tmp_path))
    assert hosts.statuses() == [1, 1], hosts.all_said()
    for rank in (0, 1):
        assert "this Ray is broken" in hosts.said(rank)
    assert "error: host 1" in hosts.said(0)


@pytest.mark.full
@pytest.mark.parametrize(("times", "status"), [("once", 0), pytest.param("always", 1, marks=places)])
def test_a_ray_that_gives_up_its_start_is_started_once_more(
    times: str, status: int, hosts: Hosts, tmp_path: Path
) -> None:
    (tmp_path / "times_out").write_text(times)
    (tmp_path / "ends").write_text("0")
    for rank in (0, 1):
        hosts.start(rank, "run", job_in(tmp_path))
    assert hosts.statuses() == [status] * 2, hosts.all_said()
    assert hosts.said(1).count("after its own 30 s, and is started once more") == 1
    assert ("error: " in hosts.said(0)) == (times == "always"), hosts.said(0)


def test_a_host_of_another_python_is_refused(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.start(0, "run", job_in(tmp_path))
    monkeypatch.setenv("DP_RAY_STAND_IN_PYTHON", "3.99.0")
    hosts.start(1, "run", job_in(tmp_path))
    assert hosts.statuses() == [1, 2], hosts.all_said()
    for rank in (0, 1):
        assert "python is 3.99.0 there and 3." in hosts.said(rank)


@places
def test_an_elastic_job_goes_on_without_a_host_and_takes_it_when_it_comes(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start(0, "run", job_in(tmp_path, workers={"min": 1, "max": 2}, timeouts={"capacity": 1}))
    hosts.wait_until_said(0, "host 1 did not come within 1 s (timeouts.capacity); the job is elastic")
    assert within(SECONDS, (tmp_path / "runs").exists)
    hosts.start(1, "run", str(tmp_path / "run.json"))
    hosts.wait_until_said(1, "is part of the Ray at 10.0.0.1:6379")
    (tmp_path / "ends").write_text("0")
    assert hosts.statuses() == [0, 0], hosts.all_said()


@places
def test_a_fixed_job_ends_to_be_run_again(hosts: Hosts, tmp_path: Path) -> None:
    for rank in (0, 1):
        hosts.start(rank, "run", job_in(tmp_path, timeouts={"capacity": 3}), hosts=3)
    assert hosts.statuses() == [75, 75], hosts.all_said()
    assert "error: host 2 did not come within 3 s (timeouts.capacity), and the job takes" in hosts.said(0)


def test_a_host_without_a_first_one_ends_to_be_run_again(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start(1, "run", job_in(tmp_path, timeouts={"capacity": 0.5}))
    assert hosts.statuses() == [75], hosts.all_said()


WRONG = "worker: is no key of a job"


@pytest.mark.full
def test_a_wrong_job_ends_all_hosts_at_once(hosts: Hosts, tmp_path: Path) -> None:
    """Who launches them must not take it for a job to run again; a host without the file learns it, too."""
    job = job_in(tmp_path, worker=2)
    for rank, path in enumerate([job, job, str(tmp_path / "not-here.yaml")]):
        hosts.start(rank, "run", path, hosts=3)
    assert hosts.statuses() == [2, 2, 2], hosts.all_said()
    for rank in (0, 1):
        assert hosts.said(rank).count(f"error: {tmp_path / 'run.json'}: {WRONG}") == 1
    assert "the first host (host 0) has ended: " in hosts.said(2) and WRONG in hosts.said(2)
    assert (tmp_path / "meet" / "status").read_text() == "2\n"


@places
def test_a_host_whose_copy_of_the_job_is_wrong_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """By each host that has come or comes."""
    hosts.start(0, "run", job_in(tmp_path), hosts=3)
    hosts.start(1, "run", job_in(tmp_path, "other", worker=2), hosts=3)
    assert hosts.processes[1].wait(SECONDS) == 2
    hosts.wait_until_said(0, "waits for host 2, to tell it so")
    hosts.start(2, "run", job_in(tmp_path), hosts=3)
    assert hosts.statuses() == [1, 2, 1], hosts.all_said()
    for rank in range(3):
        assert WRONG in hosts.said(rank)


@places
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_ends_early_waits_to_tell_it_until_a_signal(rank: int, hosts: Hosts, tmp_path: Path) -> None:
    hosts.start(rank, "run", job_in(tmp_path, worker=2))
    said = tmp_path / f"host-{hosts.mark}-{rank}.log"
    assert within(SECONDS, lambda: "to tell it so, " in said.read_text()), said.read_text()
    assert WRONG in said.read_text()
    hosts.send(signal.SIGINT, 0)
    assert hosts.statuses() == [2]


@places
def test_a_wrong_argument_of_the_command_is_told_too(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start(0, "run", job_in(tmp_path), "--no-such-flag")
    hosts.start(1, "run", job_in(tmp_path))
    assert hosts.statuses() == [2, 2], hosts.all_said()
    for rank in (0, 1):
        assert "dp-ray run: No such option '--no-such-flag'" in hosts.said(rank)


@places
def test_another_host_may_lack_the_job_file(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start(0, "run", job_in(tmp_path))
    hosts.start(1, "run", str(tmp_path / "not-here.yaml"))
    hosts.wait_until_said(1, "is part of the Ray at 10.0.0.1:6379")
    (tmp_path / "ends").write_text("0")
    assert hosts.statuses() == [0, 0], hosts.all_said()


@pytest.mark.full
def test_a_host_says_that_it_waits_for_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "TELL_SECONDS", 0.3)
    said: list[str] = []
    with pytest.raises(ClusterLost, match="the first host"):
        node.run_on_this_host(HostPlace(2, 1, str(tmp_path)), HostsCommand((), capacity=1.5), Machine(), said.append)
    assert said == [f"waiting for the first host (host 0) at {tmp_path}"]


@pytest.mark.parametrize("meet", [pytest.param("", marks=places), None], ids=["nowhere", "folder"])
def test_a_single_host_needs_no_meeting(meet: str | None, hosts: Hosts, tmp_path: Path) -> None:
    """A script that names a folder finds the status there all the same."""
    hosts.start(0, "run", job_in(tmp_path), hosts=1, meet=meet)
    assert within(SECONDS, (tmp_path / "runs").exists), hosts.all_said()
    assert not (tmp_path / "meet").exists()
    (tmp_path / "ends").write_text("1")
    assert hosts.statuses() == [1]
    assert meet == "" or (tmp_path / "meet" / "status").read_text() == "1\n"


@places
def test_the_script_to_copy_starts_all_hosts_and_has_the_runs_status(tmp_path: Path) -> None:
    """With a stand-in for ssh, which runs the command here."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/bash\necho "$1 $2" >> {tmp_path}/called\nexec bash -c "$3"\n')
    ssh.chmod(0o755)
    text = (ROOT / "jobs" / "places" / "hosts.sh").read_text()
    program = shlex.join(stand_in_ray.OWN)
    for name, value in {"meet": str(tmp_path / "meet"), "program": f"'{program}'"}.items():
        text = re.sub(rf"(?m)^{name}=\S+", f"{name}={value}", text)
    (tmp_path / "hosts.sh").write_text(text)
    (tmp_path / "ends").write_text("75")
    job, own = job_in(tmp_path), {"PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    own |= {stand_in_ray.FOLDER: str(tmp_path), "PYTHONPATH": str(ROOT)}
    line = ["bash", "hosts.sh", job, "--set", "epochs=2"]
    done = subprocess.run(line, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 75, done.stderr
    assert sorted((tmp_path / "called").read_text().splitlines()) == ["-tt 10.0.0.1", "-tt 10.0.0.2"]
    assert (tmp_path / "runs").read_text() == f"10.0.0.1:6379 {job} --set epochs=2"
