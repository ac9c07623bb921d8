"""In the sixth step of eight one of two processes is killed: what does each library make of it?

Each keeps a checkpoint after each epoch of four steps, and starts again, as its pages show. The same program without
the kill is beside it, so that a library's numbers are compared with its own. Rows that are computed are noted.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.counts.programs import BATCH_SIZE, Mlp, Program

UNDISTURBED = "undisturbed"
NOTES = "COUNTS_NOTES"  # of the environment: the folder of the notes
COUNT = 2  # of processes
AFTER = 5 * BATCH_SIZE // COUNT  # rows of its own: the process that has them first is killed before its next one


class Noting(Mlp):
    """An Mlp that notes the rows that it computes in a training."""

    note = UNDISTURBED

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            with Path(os.environ[NOTES], self.note).open("a") as notes:
                notes.write(f"{len(inputs)}\n")
        outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


class Killed(Noting):
    """One whose process is killed, if it is the first one to come so far."""

    note = "killed"

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.computed == AFTER:
            with suppress(FileExistsError), Path(os.environ[NOTES], "done").open("x"):
                os.kill(os.getpid(), signal.SIGKILL)
        self.computed += len(inputs) if self.training else 0
        return super().forward(inputs)


KILLED = (
    Program(UNDISTURBED, "8 steps on 2 processes", model=Noting, keeps_epochs=True),
    Program("killed", "the same, but a process is killed in step 6", model=Killed, keeps_epochs=True),
)


def noted(folder: Path, note: str) -> int:
    """How many rows were computed."""
    return sum(map(int, (folder / note).read_text().split()))
