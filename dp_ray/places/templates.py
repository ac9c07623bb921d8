"""The files of a job for a launcher: templates beside this module, which a user may copy and edit.

`job.sbatch` runs one `dp-ray node` on each node, in the job's folder, which all nodes share. The time limit's signal
stops the run, which is kept, and the script has Slurm requeue the job: the same command goes on. `rayjob.yaml` has
the pods end by hooks: the head's stops the run, to be run again, and a worker's drains its node (`pod.py`).
"""

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dp_ray.errors import ClusterError, JobError


def filled(name: str, lines: Mapping[str, str]) -> str:
    """Return a template in which other lines stand for those that begin with the keys of `lines`.

    Their indentation and the comments behind them stay.
    """
    text = Path(__file__).with_name(name).read_text()
    for begin, line in lines.items():
        pattern = rf"(?m)^( *){re.escape(begin)}.*?(  #.*)?$"
        text, times = re.subn(pattern, lambda found, line=line: f"{found[1]}{line}{found[2] or ''}", text)  # type: ignore[misc]
        assert times, f"{name} has no line {begin!r}"
    return text


def submitted_to_slurm(text: str, path: Path) -> str:
    """Write a script and submit it; return the job's id.

    Raises JobError if sbatch does not take it, and ClusterError if there is no sbatch.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / ".gitignore").write_text("*\n")
        path.write_text(text)
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {error.strerror or error}") from None
    command = ["sbatch", "--parsable", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise ClusterError("sbatch is not found: this is no host of a Slurm cluster") from None
    if done.returncode:
        raise JobError(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip().partition(";")[0]
