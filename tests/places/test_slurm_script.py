"""The script of a job for Slurm: its text, and what bash does with it."""

import os
import shlex
import subprocess
import textwrap
from pathlib import Path

import click.testing
import pytest

from dp_ray.cli import main
from dp_ray.errors import JobError
from dp_ray.places.templates import filled
from tests.support.cluster import ROOT

COMMAND = ["run", "my job.yaml", "--set", "model.args.names=[a, 'b']"]


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
    """After those of the template, so that they win."""
    text = dry(
        "--nodes", "4", "--gpus-per-node", "8", "-t", "2:00:00", "--exclusive", "--signal=USR2@600", "-L", "a b"
    )
    assert directives(text) == [
        "--job-name=digits",
        "--ntasks-per-node=1",
        "--open-mode=append",
        "--signal=USR2@120",
        "--requeue",
        "--no-kill=off",
        *("--nodes", "4", "--gpus-per-node", "8", "-t", "2:00:00", "--exclusive", "--signal=USR2@600", "-L", "a b"),
    ]


def test_the_job_goes_on_without_a_lost_node_if_it_is_elastic() -> None:
    text = dry("--workers", "1:8")
    assert "--no-kill" in directives(text) and "\nelastic=--no-kill\n" in text
    assert "--no-kill=off" in directives(dry("--workers", "8")) and "\nelastic=\n" in dry("--workers", "8")


def test_a_node_may_run_it_in_a_container() -> None:
    assert "\nprogram=(apptainer exec a.sif dp-ray) " in dry("--program", "apptainer exec a.sif dp-ray")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--set", "env.TOKEN=abc"], r"env.TOKEN=\(not shown\)': a secret would stand in the script"),
        (["--storage", "s3://key:secret@bucket/runs"], "a secret would stand in the script"),
        (["--workers", "0"], "workers: 0 runs digits in a single process"),
    ],
    ids=["env", "url", "no_workers"],
)
def test_what_cannot_work_is_an_error(args: list[str], says: str) -> None:
    done = slurm(*args, "--dry-run")
    with pytest.raises(JobError, match=says):
        raise done.exception or AssertionError(done.output)


@pytest.mark.parametrize("name", ["job.sbatch", "rayjob.yaml"])
def test_the_file_to_copy_is_the_template(name: str) -> None:
    assert (ROOT / "jobs" / "places" / name).read_text() == (ROOT / "dp_ray" / "places" / name).read_text()


@pytest.mark.parametrize("words", [["--nodes", "2", "job.yaml"], ["job.yaml", "other.yaml"]])
def test_the_job_file_comes_first(words: list[str]) -> None:
    done = click.testing.CliRunner().invoke(main.cli, ["slurm", *words, "--dry-run"])
    assert done.exit_code == 2 and "JOB.yaml comes first" in done.output


@pytest.mark.parametrize("words", [["--array=0-3"], ["-a", "0-3"], ["--nodes=2", "--array", "0-3"]])
def test_an_array_is_for_the_script(words: list[str]) -> None:
    """Its tasks would share a run."""
    done = slurm(*words, "--dry-run")
    assert done.exit_code == 2 and "--array: give each task a run of its own" in done.output


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

    def run(self, *, variables: dict[str, str] | None = None, **lines: str) -> tuple[int, list[list[str]]]:
        """The script's exit status, and the calls of the programs; `lines` are variables of the script."""
        path = self.folder / "script"
        lines = {"job": f"({shlex.join(COMMAND)})", **lines}
        path.write_text(filled("job.sbatch", {f"{name}=": f"{name}={value}" for name, value in lines.items()}))
        own = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", **(variables or {})}
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
    ended, (srun, *others) = bash.run()
    assert ended == status and others == ([REQUEUE] if status == 75 else [])
    assert srun[srun.index("--") + 1 :] == COMMAND
    assert srun[srun.index("--meet") + 1] == f"{tmp_path}/.dp-ray/slurm-12-0"
    assert not os.listdir(tmp_path / ".dp-ray"), "the meeting's folder is gone"


def test_without_the_runs_status_sruns_counts(tmp_path: Path) -> None:
    assert Bash(tmp_path, "exit 9").run()[0] == 9
    assert Bash(tmp_path, "exit 75").run()[1][1:] == [REQUEUE]


@pytest.mark.full(but=["usr2"])
@pytest.mark.parametrize(
    ("signals", "requeues"), [("TERM", False), ("USR2", True), ("USR2 TERM", False)], ids=["term", "usr2", "both"]
)
def test_only_what_nobody_cancels_is_requeued(signals: str, requeues: bool, tmp_path: Path) -> None:
    """The signals reach the script; srun hands on USR2, and what it has started ends with 75."""
    sends = "; ".join(f"kill -{name} $PPID; sleep 0.3" for name in signals.split())
    srun = f"trap 'echo srun USR2 >> {tmp_path}/called' USR2\n{sends}\nexit 75"
    status, calls = Bash(tmp_path, srun).run()
    assert status == 75
    assert (REQUEUE in calls) == requeues
    assert (["srun", "USR2"] in calls) == ("USR2" in signals)


def test_of_an_array_one_task_is_requeued_and_has_a_run_of_its_own(tmp_path: Path) -> None:
    of_task = {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}
    bash = Bash(tmp_path, LEAVES.format(status=75, restarts=0))
    _, (srun, requeue) = bash.run(variables=of_task, job='(run "a b.yaml" --name "x-$SLURM_ARRAY_TASK_ID")')
    assert requeue == ["scontrol", "requeue", "10_2"]
    assert srun[srun.index("--") + 1 :] == ["run", "a b.yaml", "--name", "x-2"]


def test_it_is_requeued_so_many_times_and_not_more(tmp_path: Path) -> None:
    for restarts in (0, 1, 2):
        bash = Bash(tmp_path, LEAVES.format(status=75, restarts=restarts))
        status, calls = bash.run(variables={"SLURM_RESTART_COUNT": str(restarts)}, most="2")
        assert status == 75 and (REQUEUE in calls) == (restarts < 2)


def test_a_run_is_overwritten_by_the_first_attempt_alone(tmp_path: Path) -> None:
    for restarts in (0, 1):
        bash = Bash(tmp_path, LEAVES.format(status=75, restarts=restarts))
        _, (srun, _) = bash.run(variables={"SLURM_RESTART_COUNT": str(restarts)}, overwrite="--overwrite")
        assert srun[srun.index("--") + 1 :] == [*COMMAND, *(["--overwrite"] if restarts == 0 else [])]


def test_the_script_is_submitted_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/called\necho "7;cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}")
    done = slurm("--workers", "2", "--nodes=2", "--overwrite")
    assert done.exit_code == 0 and done.output.splitlines()[-1] == "7", done.output
    assert (tmp_path / "called").read_text() == "--parsable .dp-ray/digits.sbatch\n"
    script = (tmp_path / ".dp-ray" / "digits.sbatch").read_text()
    assert f"\njob=(run {ROOT / 'jobs' / 'digits.yaml'} --workers 2) " in script
    assert "\noverwrite=--overwrite " in script and directives(script)[-1] == "--nodes=2"
