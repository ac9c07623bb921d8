"""Jobs on Ray on a Slurm of two nodes: their bits after a requeue, a cancel, a lost node; two at once.

`test_slurm_signals.py` has all cases of Slurm, without Ray.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.on_hosts import SECONDS, bits, job_in, undisturbed
from tests.support.slurm import Slurm, slurm
from tests.support.within import within

pytestmark = [pytest.mark.ray, pytest.mark.root, pytest.mark.places]
SLOWLY: dict[str, Any] = {"dataset": {"target": "tests.support.models:SlowPairs", "args": {"seconds": 0.05}}}


@pytest.fixture(scope="module")
def cluster_of_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(2, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def jobs(cluster_of_slurm: Slurm) -> Iterator["Jobs"]:
    """The commands for jobs; what they run has ended with the last of them, on all nodes."""
    made = Jobs(cluster_of_slurm)
    yield made
    for job in made.submitted:
        made.slurm.run("scancel", "--signal=KILL", job)
    assert within(60, lambda: not made.slurm.processes()), made.slurm.processes()
    assert not [path.name for path in made.folder.glob(".dp-ray/slurm-*")], "no meeting, and no token"


class Jobs:
    def __init__(self, of: Slurm) -> None:
        self.slurm, self.folder, self.submitted = of, of.cwd, list[str]()

    def dp_ray(self, *args: str) -> "subprocess.CompletedProcess[str]":
        return self.slurm.run(sys.executable, "-m", "dp_ray", *args)

    def submit(self, name: str, *options: str, **keys: Any) -> str:
        """Submit a job of two nodes, and return its id."""
        done = self.dp_ray("slurm", job_in(self.folder, name, **keys), "--nodes=2", *options)
        assert done.returncode == 0, done.stderr
        self.submitted.append(done.stdout.strip())
        return self.submitted[-1]

    def wait_for_steps(self, job: str, name: str) -> None:
        run_dir = self.folder / name
        assert within(SECONDS, lambda: any(run_dir.glob("checkpoints/step-*.safetensors"))), self.slurm.log(job)

    def ends(self, job: str, *states: str) -> None:
        self.slurm.wait_for(job, *states, seconds=2 * SECONDS)


def test_a_job_that_gets_the_signal_of_its_time_limit_is_requeued_and_has_the_same_bits(jobs: Jobs) -> None:
    """The signal is sent as Slurm does, to all nodes at once."""
    job = jobs.submit("time", **SLOWLY)
    jobs.wait_for_steps(job, "time")
    jobs.slurm.run("scancel", "--signal=USR2", job)
    jobs.ends(job, "COMPLETED")
    said = jobs.slurm.log(job)
    assert said.count("asks Slurm to requeue the job") == 1 and "run the same command to resume" in said
    assert jobs.slurm.field(job, "Restarts") == "1"
    assert bits(jobs.folder / "time") == undisturbed(jobs.folder, **SLOWLY)
    assert "time: done" in said


def test_a_job_whose_run_is_stopped_is_not_requeued(jobs: Jobs) -> None:
    job = jobs.submit("stopped", **SLOWLY)
    jobs.wait_for_steps(job, "stopped")
    done = jobs.dp_ray("stop", str(jobs.folder / "stopped"))
    assert done.returncode == 0, done.stderr
    jobs.ends(job, "FAILED")
    assert jobs.slurm.field(job, "ExitCode") == "130:0" and jobs.slurm.field(job, "Restarts") == "0"


def test_a_cancelled_job_keeps_its_work_and_is_not_requeued(jobs: Jobs) -> None:
    job = jobs.submit("cancelled", **SLOWLY)
    jobs.wait_for_steps(job, "cancelled")
    jobs.slurm.run("scancel", job)
    jobs.ends(job, "CANCELLED")
    assert "run the same command to resume" in jobs.slurm.log(job)
    assert jobs.slurm.field(job, "Restarts") == "0"
    again = jobs.submit("cancelled", **SLOWLY)
    jobs.ends(again, "COMPLETED")
    assert bits(jobs.folder / "cancelled") == undisturbed(jobs.folder, **SLOWLY)


def test_a_node_that_goes_down(jobs: Jobs) -> None:
    """Slurm ends the job on the other node, and requeues it; it goes on once there are nodes."""
    job = jobs.submit("down", **SLOWLY)
    jobs.wait_for_steps(job, "down")
    lost = jobs.slurm.hosts[1]
    jobs.slurm.kill_node(lost)
    assert within(SECONDS, lambda: jobs.slurm.field(job, "Restarts") == "1"), jobs.slurm.log(job)
    jobs.slurm.revive_node(lost)
    jobs.ends(job, "COMPLETED")
    assert bits(jobs.folder / "down") == undisturbed(jobs.folder, **SLOWLY)


def test_two_jobs_on_the_same_nodes(jobs: Jobs) -> None:
    one, other = jobs.submit("one"), jobs.submit("other")
    jobs.ends(one, "COMPLETED")
    jobs.ends(other, "COMPLETED")
    assert bits(jobs.folder / "one") == bits(jobs.folder / "other") == undisturbed(jobs.folder)


def test_a_host_whose_command_is_killed(jobs: Jobs) -> None:
    """As by the kernel, for its memory: an elastic job goes on, and nothing of that host is left."""
    job = jobs.submit("killed", workers={"min": 1, "max": 2}, **SLOWLY)
    jobs.wait_for_steps(job, "killed")
    inside = subprocess.run(["ip", "netns", "pids", "dp-ray-2"], capture_output=True, text=True).stdout.split()
    nodes = [psutil.Process(int(pid)) for pid in inside if psutil.pid_exists(int(pid))]
    (node,) = [one for one in nodes if "dp_ray" in one.cmdline() and "node" in one.cmdline()]
    node.send_signal(signal.SIGKILL)
    jobs.ends(job, "COMPLETED")
    assert "host 1 (n2) went away" in jobs.slurm.log(job)
    assert bits(jobs.folder / "killed") == undisturbed(jobs.folder, **SLOWLY)
