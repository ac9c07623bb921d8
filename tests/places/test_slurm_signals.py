"""What becomes of jobs on a Slurm of two nodes: signals, limits and losses.

Stand-ins take the place of Ray and of the runs; `test_slurm.py` has jobs on Ray.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import stand_in_ray
from tests.support.on_hosts import job_in
from tests.support.slurm import SECONDS, Slurm, slurm
from tests.support.within import within

pytestmark = [pytest.mark.slow, pytest.mark.root]
places = pytest.mark.places


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(2, tmp_path_factory.mktemp("slurm")) as made:
        yield made


class Job:
    """A job whose run is a stand-in, which is told how to end by files in a folder of its own."""

    def __init__(self, of: Slurm, folder: Path, *options: str, workers: object = 2, **lines: str) -> None:
        """Submit it, with these lines of the script edited."""
        self.slurm, self.folder = of, folder
        folder.mkdir()
        job = job_in(of.cwd, folder.name, workers=workers)
        program = ["--program", shlex.join(stand_in_ray.OWN)]
        line = [sys.executable, "-m", "dp_ray", "slurm", job, "--nodes=2", *program, *options]
        own = {stand_in_ray.FOLDER: str(folder)}
        if lines:
            text = of.run(*line, "--dry-run").stdout
            for name, value in lines.items():
                text, count = re.subn(rf"(?m)^{name}=.*", f"{name}={value}", text)
                assert count == 1
            (of.cwd / "edited.sbatch").write_text(text)
            line = ["sbatch", "--parsable", "edited.sbatch"]
        done = of.run(*line, **own)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    def begins(self) -> None:
        """Wait until its run has begun, and both hosts are there; forget it, for the next time."""
        runs = self.folder / "runs"
        assert within(SECONDS, runs.exists), (
            self.slurm.log(self.id) + self.slurm.run("scontrol", "show", "job").stdout
        )
        runs.unlink()

    def is_requeued(self) -> None:
        """Wait until it is queued or runs again."""
        assert within(SECONDS, lambda: self.slurm.field(self.id, "Restarts") == "1"), self.slurm.log(self.id)

    def ends(self, status: int, state: str) -> None:
        """Have the run end with a status, and wait until the job's state is this one."""
        (self.folder / "ends").write_text(str(status))
        self.is_over(state)

    def is_over(self, *states: str) -> None:
        self.slurm.wait_for(self.id, *states)

    @property
    def signals(self) -> str:
        return (self.folder / "signals").read_text()


@pytest.fixture
def folder(two_nodes: Slurm, tmp_path: Path) -> Iterator[Path]:
    """A folder for a job; what the job has run has ended on all nodes."""
    yield tmp_path / "job"
    two_nodes.run("scancel", "--signal=KILL", "--user=root")
    assert within(SECONDS, lambda: not two_nodes.processes()), two_nodes.processes()
    assert not [path.name for path in two_nodes.cwd.glob(".dp-ray/slurm-*")], "no meeting, and no token"


def test_a_job_that_gets_the_signal_of_its_time_limit_is_requeued(two_nodes: Slurm, folder: Path) -> None:
    """The signal is sent as Slurm does, to all nodes at once."""
    job = Job(two_nodes, folder)
    job.begins()
    two_nodes.run("scancel", "--signal=USR2", job.id)
    job.is_requeued()
    assert job.signals == "SIGUSR2" and not (folder / "drained").exists()
    assert two_nodes.log(job.id).count("asks Slurm to requeue the job") == 1
    two_nodes.wait_for(job.id, "PENDING")


@places
def test_a_requeued_job_goes_on_to_its_end(two_nodes: Slurm, folder: Path) -> None:
    job = Job(two_nodes, folder)
    job.begins()
    two_nodes.run("scancel", "--signal=USR2", job.id)
    job.is_requeued()
    job.begins()
    job.ends(0, "COMPLETED")
    assert two_nodes.field(job.id, "Restarts") == "1"


@places
def test_a_job_whose_time_is_over_is_requeued_and_goes_on(two_nodes: Slurm, folder: Path) -> None:
    """By Slurm's own clock, which may send the signal up to a minute early."""
    job = Job(two_nodes, folder, "--time=2", "--signal=USR2@30")
    job.begins()
    assert within(3 * SECONDS, lambda: two_nodes.field(job.id, "Restarts") == "1"), two_nodes.log(job.id)
    assert job.signals == "SIGUSR2"
    job.begins()
    job.ends(0, "COMPLETED")


@places
@pytest.mark.parametrize("status", [1, 2, 130])
def test_a_run_that_fails_is_not_requeued(status: int, two_nodes: Slurm, folder: Path) -> None:
    job = Job(two_nodes, folder)
    job.begins()
    job.ends(status, "FAILED")
    assert two_nodes.field(job.id, "ExitCode") == f"{status}:0" and two_nodes.field(job.id, "Restarts") == "0"


@places
def test_a_lost_cluster_is_run_again_but_not_for_ever(two_nodes: Slurm, folder: Path) -> None:
    """The run ends with 75, and there was no signal."""
    job = Job(two_nodes, folder, most="1")
    (folder / "ends").write_text("75")
    job.is_requeued()
    job.is_over("FAILED")
    assert "was requeued 1 times, and is not again (most=1)" in two_nodes.log(job.id)
    assert two_nodes.field(job.id, "ExitCode") == "75:0"


@places
def test_a_cancelled_job_is_stopped_and_not_requeued(two_nodes: Slurm, folder: Path) -> None:
    job = Job(two_nodes, folder)
    job.begins()
    two_nodes.run("scancel", job.id)
    job.is_over("CANCELLED")
    assert within(SECONDS, lambda: not two_nodes.processes())
    assert job.signals == "SIGTERM", "once, and the run had the time to stop"
    assert two_nodes.field(job.id, "Restarts") == "0" and "asks Slurm" not in two_nodes.log(job.id)


@places
def test_a_job_that_a_person_stops_is_not_requeued(two_nodes: Slurm, folder: Path) -> None:
    job = Job(two_nodes, folder)
    job.begins()
    two_nodes.run("scancel", "--signal=INT", job.id)
    job.is_over("FAILED")
    assert job.signals == "SIGINT"
    assert two_nodes.field(job.id, "ExitCode") == "130:0" and two_nodes.field(job.id, "Restarts") == "0"


@places
def test_a_job_goes_on_after_a_node_went_down(two_nodes: Slurm, folder: Path) -> None:
    """Slurm itself ends it on the other node, and requeues it."""
    job = Job(two_nodes, folder)
    job.begins()
    lost = two_nodes.hosts[1]
    two_nodes.kill_node(lost)
    job.is_requeued()
    two_nodes.revive_node(lost)
    job.begins()
    job.ends(0, "COMPLETED")
    assert two_nodes.field(job.id, "Restarts") == "1"


@places
def test_an_elastic_job_stays_when_a_node_goes_down(two_nodes: Slurm, folder: Path) -> None:
    job = Job(two_nodes, folder, workers={"min": 1, "max": 2})
    job.begins()
    lost = two_nodes.hosts[1]
    two_nodes.kill_node(lost)
    two_nodes.wait_until_said(job.id, "host 1 (n2) went away")
    job.ends(0, "COMPLETED")
    assert two_nodes.field(job.id, "Restarts") == "0"
    two_nodes.revive_node(lost)


@places
def test_two_jobs_on_the_same_nodes_do_not_meet(two_nodes: Slurm, folder: Path) -> None:
    jobs = [Job(two_nodes, folder.with_name(name)) for name in ("one", "other")]
    for job in jobs:
        job.begins()
    two_nodes.run("scancel", "--signal=USR2", jobs[0].id)
    jobs[0].is_requeued()
    jobs[1].ends(0, "COMPLETED")
    assert jobs[1].signals == ""
    jobs[0].begins()
    jobs[0].ends(0, "COMPLETED")


@places
def test_of_an_array_the_task_that_was_signalled_is_requeued(two_nodes: Slurm, folder: Path) -> None:
    job = Job(
        two_nodes, folder, "--array=0-1%1", job=f'(run {two_nodes.cwd}/job.json --name "job-$SLURM_ARRAY_TASK_ID")'
    )
    job.begins()
    first = f"{job.id}_0"
    assert within(SECONDS, lambda: two_nodes.field(first, "JobState") == "RUNNING")
    two_nodes.run("scancel", "--signal=USR2", first)
    assert within(SECONDS, lambda: two_nodes.field(first, "Restarts") == "1"), two_nodes.log(first)
    (folder / "ends").write_text("0")
    for task in (0, 1):
        two_nodes.wait_for(f"{job.id}_{task}", "COMPLETED")
    assert [two_nodes.field(f"{job.id}_{task}", "Restarts") for task in (0, 1)] == ["1", "0"]


def test_what_sbatch_does_not_take(two_nodes: Slurm, folder: Path) -> None:
    folder.mkdir()
    job = job_in(folder, "nowhere")
    bad = {"--partition=nowhere": "invalid partition", "--nodse=2": "unrecognized option '--nodse=2'"}
    for option, says in bad.items():
        done = two_nodes.run(sys.executable, "-m", "dp_ray", "slurm", job, option)
        assert done.returncode == 2 and says in done.stderr, done.stderr
