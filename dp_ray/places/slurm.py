"""Jobs of Slurm: the script that runs a job and has it requeued, and a look at a job that was submitted.

The script runs one `dp-ray node` on each node, in the job's folder, which all nodes share. The time limit's signal
stops the run, which is kept, and the script has Slurm requeue the job: the same command goes on.
"""

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_ray.errors import DONE, FAILED, INTERRUPTED, RUN_AGAIN, ClusterError, JobError
from dp_ray.text import listed

PREFIX = "slurm:"  # of the address of a job
SHORT = {
    "-J": "--job-name",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-t": "--time",
    "-a": "--array",
    "-k": "--no-kill",
    "-p": "--partition",
    "-A": "--account",
    "-q": "--qos",
    "-c": "--cpus-per-task",
    "-G": "--gpus",
}
ONE_A_NODE = "--ntasks-per-node"
NEED_VALUES = {  # of the options of sbatch: others may stand alone, as --exclusive
    *SHORT.values(),
    *("--account", "--constraint", "--cpus-per-gpu", "--cpus-per-task", "--exclude", "--gpus", "--gpus-per-node"),
    *("--gres", "--mem", "--mem-per-cpu", "--mem-per-gpu", "--nodelist", "--output", "--partition", "--qos"),
    *("--reservation", "--signal"),
} - {"--no-kill"}
# sbatch says so of an option that is wrong; else it has not reached Slurm, or Slurm has no place for the job.
WRONG = re.compile(r"nvalid|not a valid|unrecognized option|ambiguous|requires an argument|is not available")
TASK = "%a"  # in an argument of an array's job: the number of its task
DEFAULTS = {"--signal": "USR2@120", "--requeue": None, "--open-mode": "append"}
LOOK_SECONDS = 1.0
OVER = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)
Say = Callable[[str], None]

SCRIPT = """\
#!/bin/bash
{directives}
# Written by dp-ray slurm. Each node runs `dp-ray node`; the first one runs the job.
cancelled=
trap 'cancelled=1' TERM  # scancel; or preemption, after which Slurm requeues by itself
trap 'kill -USR2 "$srun"' USR2  # with --signal=B:USR2@...
mkdir -p .dp-ray && echo '*' > .dp-ray/.gitignore
restarts=${{SLURM_RESTART_COUNT:-0}}
meet=$PWD/.dp-ray/slurm-$SLURM_JOB_ID-$restarts
{first}\
srun {srun} \\
    {program} node --meet "$meet" -- \\
    {command} &
srun=$!
while kill -0 "$srun" 2> /dev/null; do wait "$srun"; done  # a signal ends `wait` early
wait "$srun"
status=$?
[ -r "$meet/status" ] && status=$(cat "$meet/status")  # the run's own; srun's is the largest of all nodes
rm -rf "$meet"
# 75: kept and unfinished. A signal before the time is over, or a lost node: but nobody has cancelled it.
if [ "$status" = 75 ] && [ -z "$cancelled" ]; then
    job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
    if [ "$restarts" -ge {max_requeues} ]; then
        echo "dp-ray slurm: was requeued $restarts times, and is not again (--max-requeues {max_requeues})" >&2
    else
        echo "dp-ray slurm: asks Slurm to requeue the job, which goes on from there" >&2
        scontrol requeue "${{job:-$SLURM_JOB_ID}}"
    fi
fi
exit "$status"
"""


@dataclass(frozen=True)
class Script:
    """The script of a job: `command` is the arguments of dp-ray, `options` are sbatch's by their long names."""

    name: str
    command: tuple[str, ...]
    options: dict[str, str | None] = field(default_factory=dict)
    program: str = "dp-ray"  # words of the shell
    is_elastic: bool = False
    overwrites: bool = False
    max_requeues: int = 20

    def text(self) -> str:
        """Return the script's text."""
        options = {"--job-name": self.name, **DEFAULTS, **self.options, ONE_A_NODE: "1"}
        if "--no-requeue" in options:
            del options["--requeue"]
        srun = ["--kill-on-bad-exit=0", "--cpu-bind=none", f"{ONE_A_NODE}=1"]
        if self.is_elastic:  # it goes on without a node that fails
            options["--no-kill"] = None
            srun.append("--no-kill")
        # In a container there is no scontrol: the script runs on the host, and `dp-ray node` in it.
        srun += [_option(name, options.pop(name)) for name in list(options) if name.startswith("--container")]
        is_array = "--array" in options
        return SCRIPT.format(
            directives="\n".join(f"#SBATCH {_option(name, value)}" for name, value in options.items()),
            first='overwrite=\n[ "$restarts" = 0 ] && overwrite=--overwrite\n' if self.overwrites else "",
            srun=" ".join(srun),
            program=self.program,
            command=" ".join(_word(word, is_array) for word in self.command) + " $overwrite" * self.overwrites,
            max_requeues=self.max_requeues,
        )


def parse_options(words: Sequence[str]) -> dict[str, str | None]:
    """Parse options of sbatch: `--time 2:00`, `--time=2:00`, `-t 2:00`, `--exclusive`. Raises JobError if wrong.

    >>> parse_options(["-N", "4", "--time=2:00:00", "--exclusive"])
    {'--nodes': '4', '--time': '2:00:00', '--exclusive': None}
    """
    options: dict[str, str | None] = {}
    given = list(words)
    while given:
        name, equals, value = given.pop(0).partition("=")
        if not re.fullmatch(r"--[a-z][\w-]*|-[A-Za-z]", name):
            raise JobError(f"{name}: an option of sbatch is expected here, as --time 2:00:00; JOB.yaml comes first")
        if not equals and given and not given[0].startswith("-"):
            value = given.pop(0)
        if not value and (equals or SHORT.get(name, name) in NEED_VALUES):
            raise JobError(f"{name}: needs a value, as --nodes 2 or --time 2:00:00")
        options[SHORT.get(name, name)] = value or None
    for name in ("--ntasks", ONE_A_NODE, "--wrap"):
        if options.get(name, "1") != "1" or (name == "--ntasks" and name in options):
            raise JobError(f"{name}: dp-ray runs one task on each node, which starts its workers; give --nodes")
    if bad := [f"{name}={value}" for name, value in options.items() if "\n" in (value or "")]:
        raise JobError(f"{listed(bad)}: a line break cannot stand in an option of sbatch")
    options.pop(ONE_A_NODE, None)
    return options


def submit_to_slurm(text: str, path: Path) -> str:
    """Write the script and submit it; return the job's id.

    Raises JobError if an option of sbatch is wrong, and ClusterError if Slurm does not take it for another reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / ".gitignore").write_text("*\n")
        path.write_text(text)
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {error.strerror or error}") from None
    try:
        return _slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    except ClusterError as error:
        raise JobError(str(error)) if WRONG.search(str(error)) else error from None


@dataclass(frozen=True)
class SlurmJob:
    """A job as Slurm shows it.

    `reason` is why it waits, or what it failed by, in a word of Slurm's. `code` is its script's exit status, 0 before
    its end.
    """

    id: str
    name: str
    state: str
    restarts: int
    run_time: str
    nodes: str
    reason: str
    output: str
    code: int

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and is not requeued."""
        return self.state in OVER

    @property
    def exit_status(self) -> int | None:
        """The exit status that the job's command would have; None before its end."""
        if not self.is_over:
            return None
        by_state = {"COMPLETED": DONE, "CANCELLED": INTERRUPTED, "TIMEOUT": RUN_AGAIN, "NODE_FAIL": RUN_AGAIN}
        return self.code or by_state.get(self.state, FAILED)

    def to_json(self) -> dict[str, Any]:
        """Return the values to show."""
        keys = ("id", "name", "state", "restarts", "run_time", "nodes", "reason", "output")
        return {**{key: getattr(self, key) for key in keys}, "exit_status": self.exit_status}


def jobs_in_slurm(job: str) -> list[SlurmJob]:
    """Return what Slurm shows of a job, of an array each task. Raises JobError if Slurm does not know it."""
    try:
        text = _slurm("scontrol", "show", "job", "-o", job)
    except ClusterError as error:
        if not re.search(r"nvalid job id|Job \S+ not found", str(error)):
            raise
        raise JobError(
            f"{PREFIX}{job}: Slurm does not know this job, or no longer: `sacct -j {job}` may; "
            "what it printed is in the file that sbatch's --output names (slurm-ID.out)"
        ) from None
    return [_parsed(line) for line in text.splitlines() if line.strip()]


def _parsed(line: str) -> SlurmJob:
    """Parse a line of `scontrol show job -o`, whose values may have blanks.

    >>> _parsed("JobId=7 JobName=a b UserId=me(1) JobState=FAILED ExitCode=75:0 StdOut=/a b/7.out Power=").name
    'a b'
    """
    fields = dict(re.findall(r"(?:^|(?<= ))([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|\s*$)", line))
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
    code, _, killed = fields.get("ExitCode", "0:0").partition(":")
    return SlurmJob(
        id=f"{array}_{task}" if array and task else fields["JobId"],
        name=fields.get("JobName", ""),
        state=fields.get("JobState", ""),
        restarts=int(fields.get("Restarts", 0)),
        run_time=fields.get("RunTime", ""),
        nodes=fields.get("NodeList", "").replace("(null)", ""),
        reason="" if fields.get("Reason") == "None" else fields.get("Reason", ""),
        output=fields.get("StdOut", ""),
        code=int(code) or (128 + int(killed) if int(killed or 0) else 0),
    )


def printed(job: str, follows: bool) -> Iterator[str]:
    """Yield what a job has printed and, if it is followed, prints until its end, over requeues."""
    shown = single(job)
    read, rest = 0, b""
    while True:
        shown = single(job)
        with suppress(FileNotFoundError), open(shown.output, "rb") as file:
            file.seek(read)
            new = file.read()
            read += len(new)
            *whole, rest = (rest + new).split(b"\n")
            yield from (f"{line.decode(errors='replace')}\n" for line in whole)
        if shown.is_over or not follows:
            if rest:
                yield rest.decode(errors="replace")
            return
        time.sleep(LOOK_SECONDS)


def single(job: str) -> SlurmJob:
    """Return what Slurm shows of a job, which must not be an array. Raises JobError."""
    found = jobs_in_slurm(job)
    if len(found) > 1:
        raise JobError(f"{PREFIX}{job} is an array: name a task, as {PREFIX}{found[0].id}")
    return found[0]


def stop_in_slurm(job: str, waits: bool, say: Say, again: bool = False) -> str:
    """Stop a job after its current step, and return what became of it; Slurm requeues it only if it is to run again.

    Raises JobError if it does not run.
    """
    before = jobs_in_slurm(job)
    if all(task.is_over for task in before):
        raise JobError(f"{PREFIX}{job} is not running: it is {before[0].state}")
    if all(task.state != "RUNNING" for task in before):
        if again:
            raise JobError(f"{PREFIX}{job} is not running: it is {before[0].state}, and will run")
        _slurm("scancel", job)
        return "it had not begun, and is cancelled"
    # Only to the steps, which are `dp-ray node`: SIGINT is a person's stop, and the script requeues after USR2.
    _slurm("scancel", f"--signal={'USR2' if again else 'INT'}", job)
    say(f"asked {PREFIX}{job} to stop after its current step")
    if not waits:
        return "it was asked to stop"
    restarts = {task.id: task.restarts for task in before}
    after = before
    while any(task.state == "RUNNING" and task.restarts == restarts.get(task.id) for task in after):
        time.sleep(LOOK_SECONDS)
        after = jobs_in_slurm(job)
    return f"it is {listed(dict.fromkeys(task.state for task in after))}"


def _slurm(*command: str) -> str:
    """Run a command of Slurm's, and return what it prints; raises ClusterError with what it complains of."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise ClusterError(f"{command[0]} is not found: this is no host of a Slurm cluster") from None
    if done.returncode:
        raise ClusterError(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _option(name: str, value: str | None) -> str:
    """Return an option as sbatch reads it in a script, and as a shell does."""
    if value is None:
        return name
    return f"{name}={shlex.quote(value)}" if name.startswith("--") else f"{name} {shlex.quote(value)}"


def _word(word: str, is_array: bool) -> str:
    """Return a word for the shell, in which an array's task stands by its number."""
    if not is_array:
        return shlex.quote(word)
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split(TASK))
