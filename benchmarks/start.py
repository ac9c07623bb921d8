"""How soon `dp-ray plan` and `import dp_ray` are there, against the import of torch, for which neither waits.

And how long the first command takes that runs something: with no Ray up, against the same at an earlier commit.
"""

import os
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

from benchmarks.cluster import scratch
from benchmarks.compare import at_most, compared
from benchmarks.measure import alternate, command_seconds, seconds
from benchmarks.table import Row, time_text

ROOT = Path(__file__).parent.parent
JOB = Path(__file__).parent / "plain.yaml"
REPEATS = 5
AT_MOST = 0.5
COMMANDS = {
    "dp-ray plan": ["-m", "dp_ray", "plan", str(JOB)],
    "import dp_ray": ["-c", "import dp_ray"],
}


EARLIER = "84cd204"  # the commit before the start was shortened
RUN = ["-m", "dp_ray", "run", "jobs/tutorial.yaml", "--workers", "2", "--quiet", "--overwrite", "--storage"]
AT_MOST_OF_EARLIER = 0.55


def measure() -> list[Row]:
    rows = [_beside_torch(what, arguments) for what, arguments in COMMANDS.items()]
    with scratch() as folder:
        return [*rows, _whole_command(folder)] if unpack(EARLIER, folder / "earlier") else rows


def unpack(commit: str, folder: Path) -> bool:
    """Put an earlier commit's files into a folder; False if this is no checkout, or one without the commit."""
    packed = folder.with_suffix(".tar")
    archive = ["git", "archive", "--format=tar", f"--output={packed}", commit]
    if subprocess.run(archive, cwd=ROOT, capture_output=True).returncode:
        return False
    with tarfile.open(packed) as files:
        files.extractall(folder, filter="data")
    return True


def _whole_command(folder: Path) -> Row:
    def run(code: Path) -> float:
        command = [sys.executable, *RUN, str(folder / "runs")]
        environment = {**os.environ, "PYTHONPATH": str(code)}
        return seconds(lambda: subprocess.run(command, cwd=code, env=environment, check=True))

    ours, theirs = partial(run, ROOT), partial(run, folder / "earlier")
    ours(), theirs()
    what = "start: dp-ray run jobs/tutorial.yaml --workers 2, the whole command, no Ray up"
    goal = at_most(AT_MOST_OF_EARLIER, f"at most {AT_MOST_OF_EARLIER} of its time")
    return compared(what, alternate(ours, theirs, REPEATS), time_text, f"at {EARLIER}", goal)


def _beside_torch(what: str, arguments: list[str]) -> Row:
    ours = partial(command_seconds, sys.executable, *arguments)
    theirs = partial(command_seconds, sys.executable, "-c", "import torch")
    ours(), theirs()  # from here on their files are in memory
    goal = at_most(AT_MOST, f"at most {AT_MOST} of its time")
    return compared(f"start: {what}", alternate(ours, theirs, REPEATS), time_text, "import torch", goal)
