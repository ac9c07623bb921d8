"""What a host gives to its Ray, and what its programs inherit."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from dp_ray.cluster.internals.variables import ADDRESS, AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH, TMPDIR
from dp_ray.places import own_ray
from dp_ray.places.own_ray import OwnRay, clients_environment, drain_node, usable_cpus


@pytest.mark.parametrize(
    ("variables", "cpus"),
    [
        ({}, 16),
        ({"SLURM_CPUS_ON_NODE": "4"}, 4),
        ({"SLURM_CPUS_ON_NODE": "64"}, 16),
        ({"SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_CPUS_ON_NODE": "32", "SLURM_GPUS_ON_NODE": "8"}, 16),
        ({"SLURM_CPUS_ON_NODE": "", "SLURM_GPUS_ON_NODE": "none"}, 16),
    ],
)
def test_the_cpus_of_a_host(variables: Mapping[str, str], cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_ray, "cores", lambda: set(range(16)))
    assert usable_cpus(variables) == cpus


def test_programs_find_this_ray_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {ADDRESS: "10.0.0.9:6379", AUTH_TOKEN: "secret", TMPDIR: "/x", "RANK": "3", "PMI_FD": "7"}
    for name, value in {**others, "NCCL_DEBUG": "INFO"}.items():
        monkeypatch.setenv(name, value)
    given = clients_environment(tmp_path)
    assert not others.keys() & given.keys()
    assert given["NCCL_DEBUG"] == "INFO" and given["PATH"] == os.environ["PATH"]
    assert (given[AUTH_MODE], given[AUTH_TOKEN_PATH]) == ("token", str(tmp_path / "token"))


def test_of_a_traceback_the_exception_is_shown(tmp_path: Path) -> None:
    frames = "".join(f'  File "a.py", line {line}, in start\n    call()\n\n' for line in range(20))
    said = f"Usage stats are off.\nTraceback (most recent call last):\n{frames}Exception: The node timed out.\n"
    (tmp_path / own_ray.LOG).write_text(said)
    with subprocess.Popen(["true"]) as ended:
        assert OwnRay(tmp_path, [], ended).last_lines() == "Usage stats are off.\nException: The node timed out."


def test_a_node_is_drained_by_what_its_raylet_was_told() -> None:
    told = ["--node_id=ab12", "--gcs-address=10.0.0.1:6379", "--flag", "--session=a=b"]
    runs = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", runs, *told], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as raylet:
        assert raylet.stdout is not None
        raylet.stdout.readline()  # while a program is being started its command line is empty
        line = drain_node(psutil.Process(raylet.pid), "the reason")
        assert line[0] == "drain-node"
        assert {"--address=10.0.0.1:6379", "--node-id=ab12", "--reason-message=the reason"} < set(line)
        ended = psutil.Process(raylet.pid)
        raylet.kill()
        raylet.wait()
        with pytest.raises(psutil.NoSuchProcess):
            drain_node(ended, "the reason")
