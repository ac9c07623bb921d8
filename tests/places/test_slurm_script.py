"""The script of a job for Slurm: its text, what bash does with it, and what Slurm shows of a job."""

import os
import shlex
import subprocess
import textwrap
from pathlib import Path

import click.testing
import pytest

from dp_ray.cli import main
from dp_ray.errors import JobError
from dp_ray.places.slurm import Script, _parsed, parse_options
from tests.support.cluster import ROOT

COMMAND = ("run", "my job.yaml", "--set", "model.args.names=[a, 'b']")


def directives(text: str) -> list[str]:
    """The options of sbatch in a script, as its parser takes them apart: by a shell's quotes."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]


def slurm(*args: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main.cli, ["slurm", str(ROOT / "jobs" / "digits.yaml"), *args])


def dry(*args: str) -> str:
    done = slurm(*args, "--dry-run")
    assert done.exit_code == 0, done.output
    return done.output


def test_the_options_of_sbatch_are_passed_on() -> None:
    text = dry("--nodes", "4", "--gpus-per-node", "8", "-t", "2:00:00", "--exclusive", "-L", "a b", "--mail-type=END")
    assert directives(text) == [
        "--job-name=digits",
        "--signal=USR2@120",
        "--requeue",
        "--open-mode=append",
        "--nodes=4",
        "--gpus-per-node=8",
        "--time=2:00:00",
        "--exclusive",
        *("-L", "a b"),
        "--mail-type=END",
        "--ntasks-per-node=1",
    ]


def test_what_is_given_goes_before_the_defaults() -> None:
    given = directives(dry("--signal=USR2@600", "--no-requeue", "--open-mode", "truncate", "-J", 'it\'s a "job" #1'))
    assert {"--signal=USR2@600", "--no-requeue", "--open-mode=truncate", '--job-name=it\'s a "job" #1'} <= set(given)
    assert not any(one in given for one in ("--requeue", "--open-mode=append", "--signal=USR2@120"))


def test_the_job_goes_on_without_a_lost_node_if_it_is_elastic() -> None:
    assert "--no-kill" in directives(dry("--workers", "1:8")) and "srun" in (text := dry("--workers", "1:8"))
    assert "--no-kill" in text.partition("srun --kill")[2]
    assert "--no-kill" not in dry("--workers", "8")


def test_in_a_container_runs_what_the_nodes_run_and_not_the_script() -> None:
    text = dry("--container-image=team/image:1", "--container-mounts", "/data:/data")
    assert not any(one.startswith("--container") for one in directives(text))
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert shlex.split(line.rstrip("\\"))[-2:] == ["--container-image=team/image:1", "--container-mounts=/data:/data"]
    assert '    dp-ray node --meet "$meet"' in text
    assert "    apptainer exec a.sif dp-ray node --meet" in dry("--program", "apptainer exec a.sif dp-ray")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--ntasks", "4"], "--ntasks: dp-ray runs one task on each node"),
        (["--ntasks-per-node=8"], "--ntasks-per-node: dp-ray runs one task"),
        (["--comment", "a\nb"], "--comment=a\nb: a line break cannot stand"),
        (["--nodes", "2", "other.yaml"], "other.yaml: an option of sbatch is expected here"),
        (["--nodes"], "--nodes: needs a value"),
        (["-N", "--time", "2:00"], "-N: needs a value"),
        (["--comment="], "--comment: needs a value"),
        (["--set", "env.TOKEN=abc"], r"env.TOKEN=\(not shown\)': a secret would stand in the script"),
        (["--storage", "s3://key:secret@bucket/runs"], "a secret would stand in the script"),
        (["--workers", "0"], "workers: 0 runs digits in a single process"),
    ],
    ids=[
        "tasks",
        "tasks_per_node",
        "line_break",
        "word",
        "last",
        "before_another",
        "empty",
        "env",
        "url",
        "no_workers",
    ],
)
def test_what_cannot_work_is_an_error(args: list[str], says: str) -> None:
    done = slurm(*args, "--dry-run")
    with pytest.raises(JobError, match=says):
        raise done.exception or AssertionError(done.output)


def test_the_script_to_copy_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text((ROOT / "jobs" / "digits.yaml").read_text())
    asked = ["slurm", "job.yaml", "--nodes", "2", "--gpus-per-node", "8", "--time", "2:00:00", "--workers", "8"]
    done = click.testing.CliRunner().invoke(main.cli, [*asked, "--program", "dp-ray", "--dry-run"])
    assert (ROOT / "jobs" / "places" / "job.sbatch").read_text() == done.output


def test_the_job_file_comes_first() -> None:
    done = click.testing.CliRunner().invoke(main.cli, ["slurm", "--nodes", "2", "job.yaml", "--dry-run"])
    assert done.exit_code == 2 and "JOB.yaml comes first" in done.output


def test_options_without_and_with_values() -> None:
    words = ["-N", "4", "--time=1:00", "--exclusive", "--nice=-5", "-a", "0-3", "--no-kill", "-H"]
    assert parse_options(words) == {
        "--nodes": "4",
        "--time": "1:00",
        "--exclusive": None,
        "--nice": "-5",
        "--array": "0-3",
        "--no-kill": None,
        "-H": None,
    }


class Bash:
    """Runs a script with programs of Slurm's that only note how they were called."""

    def __init__(self, folder: Path, srun: str) -> None:
        self.folder, self.called = folder, folder / "called"
        programs = {"srun": srun, "scontrol": ""}
        for name, body in programs.items():
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                f"#!/bin/bash\n(IFS=$'\\x1f'; echo {name} \"$*\" >> {self.called})\n{textwrap.dedent(body)}"
            )
            path.chmod(0o755)

    def run(self, script: Script, **variables: str) -> tuple[int, list[list[str]]]:
        """The script's exit status, and the calls of the programs."""
        path = self.folder / "script"
        path.write_text(script.text())
        own = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", **variables}
        done = subprocess.run(["bash", str(path)], cwd=self.folder, env=own, timeout=120, capture_output=True)
        calls = self.called.read_text().splitlines() if self.called.exists() else []
        self.called.unlink(missing_ok=True)
        return done.returncode, [
            [name, *rest.split("\x1f")] for name, _, rest in (call.partition(" ") for call in calls)
        ]


# What the first host leaves, and what the largest status of all tasks is: that of a host that was lost.
LEAVES = (
    'mkdir -p "$PWD"/.dp-ray/slurm-12-{restarts}; echo {status} > "$PWD"/.dp-ray/slurm-12-{restarts}/status; exit 137'
)
REQUEUE = ["scontrol", "requeue", "12"]


@pytest.mark.parametrize("status", [0, 1, 2, 75, 130])
def test_the_runs_status_is_the_scripts_and_75_alone_requeues(status: int, tmp_path: Path) -> None:
    bash = Bash(tmp_path, LEAVES.format(status=status, restarts=0))
    ended, (srun, *others) = bash.run(Script("job", COMMAND))
    assert ended == status and others == ([REQUEUE] if status == 75 else [])
    assert srun[srun.index("--") + 1 :] == list(COMMAND)
    assert srun[srun.index("--meet") + 1] == f"{tmp_path}/.dp-ray/slurm-12-0"
    assert os.listdir(tmp_path / ".dp-ray") == [".gitignore"], "the meeting's folder is gone"


def test_without_the_runs_status_sruns_counts(tmp_path: Path) -> None:
    assert Bash(tmp_path, "exit 9").run(Script("job", COMMAND))[0] == 9
    assert Bash(tmp_path, "exit 75").run(Script("job", COMMAND))[1][1:] == [REQUEUE]


@pytest.mark.full(but=["usr2"])
@pytest.mark.parametrize(
    ("signals", "requeues"), [("TERM", False), ("USR2", True), ("USR2 TERM", False)], ids=["term", "usr2", "both"]
)
def test_only_what_nobody_cancels_is_requeued(signals: str, requeues: bool, tmp_path: Path) -> None:
    """The signals reach the script; srun hands on USR2, and what it has started ends with 75."""
    sends = "; ".join(f"kill -{name} $PPID; sleep 0.3" for name in signals.split())
    srun = f"trap 'echo srun USR2 >> {tmp_path}/called' USR2\n{sends}\nexit 75"
    status, calls = Bash(tmp_path, srun).run(Script("job", COMMAND))
    assert status == 75
    assert (REQUEUE in calls) == requeues
    assert (["srun", "USR2"] in calls) == ("USR2" in signals)


def test_of_an_array_one_task_is_requeued_and_has_a_run_of_its_own(tmp_path: Path) -> None:
    text = dry("--array", "0-3", "--set", "seed=%a")
    assert '--set seed="$SLURM_ARRAY_TASK_ID" --name digits-"$SLURM_ARRAY_TASK_ID"' in text
    script = Script("job", ("run", "a b.yaml", "--name", "x-%a-%a", "--set", "k=it's %a"), {"--array": "0-3"})
    of_task = {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}
    _, (srun, requeue) = Bash(tmp_path, LEAVES.format(status=75, restarts=0)).run(script, **of_task)
    assert requeue == ["scontrol", "requeue", "10_2"]
    assert srun[srun.index("--") + 1 :] == ["run", "a b.yaml", "--name", "x-2-2", "--set", "k=it's 2"]


def test_an_array_whose_tasks_share_a_run_is_told_apart_by_storage() -> None:
    assert "--name" not in dry("--array=0-3", "--storage", "runs/%a").partition("-- \\\n")[2].replace("\n", " ")


def test_it_is_requeued_so_many_times_and_not_more(tmp_path: Path) -> None:
    script = Script("job", COMMAND, max_requeues=2)
    for restarts in (0, 1, 2):
        bash = Bash(tmp_path, LEAVES.format(status=75, restarts=restarts))
        status, calls = bash.run(script, SLURM_RESTART_COUNT=str(restarts))
        assert status == 75 and (REQUEUE in calls) == (restarts < 2)


def test_a_run_is_overwritten_by_the_first_attempt_alone(tmp_path: Path) -> None:
    script = Script("job", COMMAND, overwrites=True)
    for restarts in (0, 1):
        bash = Bash(tmp_path, LEAVES.format(status=75, restarts=restarts))
        _, (srun, _) = bash.run(script, SLURM_RESTART_COUNT=str(restarts))
        assert srun[srun.index("--") + 1 :] == [*COMMAND, *(["--overwrite"] if restarts == 0 else [])]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ("JobState=RUNNING ExitCode=0:0", None),
        ("JobState=PENDING Reason=BeginTime ExitCode=75:0", None),
        ("JobState=COMPLETED Reason=None ExitCode=0:0", 0),
        ("JobState=FAILED ExitCode=1:0", 1),
        ("JobState=FAILED ExitCode=130:0", 130),
        ("JobState=CANCELLED ExitCode=0:15", 143),
        ("JobState=CANCELLED ExitCode=0:0", 130),
        ("JobState=NODE_FAIL ExitCode=0:0", 75),
        ("JobState=TIMEOUT ExitCode=0:0", 75),
        ("JobState=OUT_OF_MEMORY ExitCode=0:0", 1),
    ],
)
def test_the_exit_status_of_a_job_that_slurm_shows(fields: str, status: int | None) -> None:
    line = "JobId=14 ArrayJobId=12 ArrayTaskId=2 JobName=it's a=b job UserId=me(1000) GroupId=me(1000)"
    line += f" {fields} Restarts=3 RunTime=00:01:00 NodeList=n[1-2] StdOut=/home/me/my job/slurm-12_2.out Power="
    job = _parsed(line)
    assert (job.id, job.name, job.restarts, job.nodes) == ("12_2", "it's a=b job", 3, "n[1-2]")
    assert job.reason == ("BeginTime" if job.state == "PENDING" else "")
    assert job.output == "/home/me/my job/slurm-12_2.out"
    assert job.exit_status == status and job.is_over == (status is not None)


@pytest.mark.parametrize("name", ["../../elsewhere", "a/b", "two words", "x" * 300])
def test_the_script_of_a_job_of_any_name_lies_in_its_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text((ROOT / "jobs" / "digits.yaml").read_text())
    told: list[str] = []

    def submitted(*command: str) -> str:
        told.extend(command)
        return "7"

    monkeypatch.setattr("dp_ray.places.slurm._slurm", submitted)
    asked = ["slurm", "job.yaml", "--workers", "2", "--job-name", name]
    done = click.testing.CliRunner().invoke(main.cli, asked)
    assert done.exit_code == 0, done.output
    script = Path(told[-1])
    assert script.parent == Path(".dp-ray")
    assert f"#SBATCH --job-name={shlex.quote(name)}" in script.read_text()
