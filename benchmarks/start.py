"""How soon `dp-ray plan` and `import dp_ray` are there, against the import of torch, for which neither waits."""

import sys
from functools import partial
from pathlib import Path

from benchmarks.measure import alternate, command_seconds, medians
from benchmarks.table import Row, share, time_text

JOB = Path(__file__).parent / "plain.yaml"
REPEATS = 5
AT_MOST = 0.5
COMMANDS = {
    "dp-ray plan": ["-m", "dp_ray", "plan", str(JOB)],
    "import dp_ray": ["-c", "import dp_ray"],
}


def measure() -> list[Row]:
    return [_compared(what, arguments) for what, arguments in COMMANDS.items()]


def _compared(what: str, arguments: list[str]) -> Row:
    ours = partial(command_seconds, sys.executable, *arguments)
    theirs = partial(command_seconds, sys.executable, "-c", "import torch")
    ours(), theirs()  # from here on their files are in memory
    ours_seconds, theirs_seconds = medians(alternate(ours, theirs, REPEATS))
    return Row(
        f"start: {what}",
        time_text(ours_seconds),
        f"{time_text(theirs_seconds)} import torch",
        share(ours_seconds, theirs_seconds),
        f"at most {AT_MOST} of its time",
        ours_seconds <= AT_MOST * theirs_seconds,
    )
