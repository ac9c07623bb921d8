"""What a library's side says of itself, and how its processes go through the programs."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.counts.killed import KILLED
from benchmarks.counts.programs import PROGRAMS, Program, Results
from benchmarks.counts.smallest import SMALLEST


class Told(NamedTuple):
    """Why a program does not end with the same bits there, in few words, and the page that says it."""

    verdict: str  # "by design", "rows twice", "not said", "wrong" against what the page promises, or NO_WAY
    why: str
    page: str


NO_WAY = "no way"  # that its documentation shows
SETS = {"programs": PROGRAMS, "smallest": SMALLEST, "killed": KILLED}
Run = Callable[[Program, Path, bool], Results | None]  # the program, where it keeps, and whether it leaves then


def run_all(
    run: Run, folder: Path, count: int, of: str, keeps: bool, told: dict[str, Told], only: str | None = None
) -> None:
    """Be one of `count` processes in each program of a set that has a way, or in one of them alone.

    One of the processes `keeps` what they end with.
    """
    for program in SETS[of]:
        if only not in (None, program.name) or (program.name in told and told[program.name].verdict == NO_WAY):
            continue
        kept = folder / f"{program.name}-begun-by-{program.begun_by or count}".replace(" ", "-")
        if program.left_after is not None and program.begun_by in (None, count):
            run(program, kept, True)
        results = run(program, kept, False)
        if keeps:
            torch.save(results, folder / f"{program.name} on {count}.pt")
