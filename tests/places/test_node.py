"""A job on two hosts, by `dp-ray node` on each: done, stopped, drained, with a host that dies or does not come.

Both hosts are this machine, each with a Ray node of its own.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from tests.support.cluster import free_port
from tests.support.on_hosts import bits, hosts_in, job_in, undisturbed
from tests.support.within import within

pytestmark = [pytest.mark.ray]
places = pytest.mark.places
SLOWLY: dict[str, Any] = {"dataset": {"target": "tests.support.models:SlowPairs", "args": {"seconds": 0.05}}}


def owned_by(pids: set[int]) -> list[str]:
    """The temporary folders of these processes."""
    found = []
    for owner in Path("/tmp").glob("dp_ray-*/dp_ray-owner.json"):
        if json.loads(owner.read_text())["pid"] in pids:
            found.append(str(owner.parent))
    return found


@pytest.mark.full
def test_two_hosts_run_a_job_and_leave_nothing(tmp_path: Path) -> None:
    """The bits of one process; the token is on no command line."""
    with hosts_in(tmp_path) as hosts:
        for rank in (1, 0):
            hosts.start(rank, "run", job_in(tmp_path))
        hosts.processes.reverse()
        hosts.wait_until_said(0, "Ray is up on 2 hosts")
        token = json.loads((tmp_path / "meet" / "dp-ray-meeting.json").read_text())["token"]
        assert len(token) == 64 and not [line for line in hosts.left().values() if token in line]
        assert hosts.statuses() == [0, 0], hosts.all_said()
        assert not hosts.left()
        assert not owned_by({process.pid for process in hosts.processes})
    assert [path.name for path in (tmp_path / "meet").iterdir()] == ["status"]
    assert (tmp_path / "meet" / "status").read_text() == "0\n"
    assert bits(tmp_path / "run") == undisturbed(tmp_path)


@places
def test_two_jobs_on_the_same_hosts_do_not_meet(tmp_path: Path) -> None:
    with hosts_in(tmp_path) as one, hosts_in(tmp_path) as other:
        for rank in (0, 1):
            one.start(rank, "run", job_in(tmp_path, "one"), meet=str(tmp_path / "meet-one"))
            other.start(rank, "run", job_in(tmp_path, "other"), meet=str(tmp_path / "meet-other"))
        assert one.statuses() == [0, 0], one.all_said()
        assert other.statuses() == [0, 0], other.all_said()
    assert bits(tmp_path / "one") == bits(tmp_path / "other") == undisturbed(tmp_path)


@places
def test_a_signal_to_all_stops_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """At a port, with a token that all were given."""
    for attempt in ("stopped", "done"):
        meet, token = f"127.0.0.1:{free_port()}", os.urandom(32).hex()
        with hosts_in(tmp_path) as hosts:
            for rank in (0, 1):
                hosts.start(rank, "run", job_in(tmp_path, **SLOWLY), meet=meet, token=token)
            if attempt == "stopped":
                hosts.wait_for_steps(tmp_path / "run")
                hosts.send(signal.SIGUSR2, 1)
                hosts.send(signal.SIGUSR2, 0)
                assert hosts.statuses() == [75, 75], hosts.all_said()
                assert "Ray drains" not in hosts.said(0), "the stop wins"
            else:
                assert hosts.statuses() == [0, 0], hosts.all_said()
    assert dp_ray.load(tmp_path / "run").interruptions, "it was stopped"
    assert bits(tmp_path / "run") == undisturbed(tmp_path, **SLOWLY)


@places
def test_a_signal_to_another_host_drains_it_and_the_run_goes_on(tmp_path: Path) -> None:
    with hosts_in(tmp_path) as hosts:
        for rank in (0, 1):
            hosts.start(rank, "run", job_in(tmp_path, workers={"min": 1, "max": 2}, **SLOWLY))
        hosts.wait_for_steps(tmp_path / "run")
        hosts.send(signal.SIGTERM, 1)
        assert hosts.statuses() == [0, 75], hosts.all_said()
        assert "the run has left this host" in hosts.said(1)
    result = dp_ray.load(tmp_path / "run")
    assert [one["kind"] for one in result.interruptions] == ["preemption"]
    assert bits(tmp_path / "run") == undisturbed(tmp_path, **SLOWLY)


@places
def test_a_killed_host_is_told_and_an_elastic_job_goes_on_without_it(tmp_path: Path) -> None:
    with hosts_in(tmp_path) as hosts:
        for rank in (0, 1):
            hosts.start(rank, "run", job_in(tmp_path, workers={"min": 1, "max": 2}, **SLOWLY))
        hosts.wait_for_steps(tmp_path / "run")
        hosts.processes[1].kill()
        assert hosts.statuses() == [0, -signal.SIGKILL], hosts.all_said()
        assert "host 1" in hosts.said(0) and "went away" in hosts.said(0)
    assert bits(tmp_path / "run") == undisturbed(tmp_path, **SLOWLY)


@places
def test_a_killed_host_comes_again_while_the_run_waits_for_it(tmp_path: Path) -> None:
    waits = {**SLOWLY, "on_lost_worker": "restart"}
    with hosts_in(tmp_path) as hosts:
        for rank in (0, 1):
            hosts.start(rank, "run", job_in(tmp_path, **waits))
        hosts.wait_for_steps(tmp_path / "run")
        hosts.processes[1].kill()
        hosts.wait_until_said(0, "went away")
        hosts.start(1, "run", job_in(tmp_path, **waits))
        assert hosts.statuses() == [0, -signal.SIGKILL, 0], hosts.all_said()
    assert dp_ray.load(tmp_path / "run").restarts
    assert bits(tmp_path / "run") == undisturbed(tmp_path, **SLOWLY)


@places
def test_if_the_first_host_is_killed_the_others_end_to_be_run_again(tmp_path: Path) -> None:
    with hosts_in(tmp_path) as hosts:
        for rank in (0, 1):
            hosts.start(rank, "run", job_in(tmp_path, **SLOWLY))
        hosts.wait_for_steps(tmp_path / "run")
        hosts.processes[0].kill()
        assert hosts.statuses() == [-signal.SIGKILL, 75], hosts.all_said()
        assert "the first host (host 0) went away" in hosts.said(1)
        assert within(60, lambda: not hosts.left()), hosts.left()
    with hosts_in(tmp_path) as hosts:  # in the same folder, where the killed one has left its own
        for rank in (1, 0):
            hosts.start(rank, "run", job_in(tmp_path, **SLOWLY))
        assert hosts.statuses() == [0, 0], hosts.all_said()
    assert bits(tmp_path / "run") == undisturbed(tmp_path, **SLOWLY)


@places
@pytest.mark.parametrize("workers", [2, {"min": 1, "max": 2}], ids=["fixed", "elastic"])
def test_a_host_that_does_not_come_is_named(workers: object, tmp_path: Path) -> None:
    with hosts_in(tmp_path) as hosts:
        hosts.start(0, "run", job_in(tmp_path, workers=workers, timeouts={"capacity": 2}))
        says = "host 1 did not come within 2 s (timeouts.capacity)"
        if workers == 2:
            assert hosts.statuses() == [75], hosts.all_said()
            assert f"error: {says}, and the job takes no fewer workers" in hosts.said(0)
        else:
            assert hosts.statuses() == [0], hosts.all_said()
            assert f"{says}; the job is elastic, and goes on without" in hosts.said(0)


@places
def test_a_signal_before_the_run_begins_ends_all_hosts(tmp_path: Path) -> None:
    with hosts_in(tmp_path) as hosts:
        hosts.start(0, "run", job_in(tmp_path), hosts=3)
        hosts.start(1, "run", job_in(tmp_path), hosts=3)
        hosts.wait_until_said(0, "waiting for host 2")
        hosts.send(signal.SIGTERM, 0)
        assert hosts.statuses() == [75, 75], hosts.all_said()
        assert "SIGTERM came before the run had begun" in hosts.said(0)


@pytest.mark.full
def test_a_mistake_in_the_command_is_told_at_once(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    cases = {
        ("run", job, "--workers", "0"): "workers: 0 runs run in a single process",
        ("run", job, "--address", "10.0.0.1:1"): "--address 10.0.0.1:1: `dp-ray node` starts the Ray",
        ("list",): "list: `dp-ray node` runs one of run, sweep",
        ("run", str(tmp_path / "none.yaml")): "none.yaml",
    }
    with hosts_in(tmp_path) as hosts:
        for command in cases:
            hosts.start(0, *command, hosts=1, meet="")
        assert hosts.statuses() == [2] * len(cases), hosts.said(0)
        assert all(says in hosts.said(0) for says in cases.values()), hosts.said(0)
