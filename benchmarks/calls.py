"""Count the calls of a step: `python -m benchmarks.calls` lists dp_ray's own in a training step of one process.

Those are the Python calls in dp_ray's files: an MLP, no option on. What happens in fewer than nine of ten steps
is left out, as what happens by the clock. tests/sim/calls.py counts all calls, beside a plain loop's.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dp_ray
from dp_ray.monitor.in_process import DriverStepControl

HOME = str(Path(dp_ray.__file__).parent) + os.sep
STEPS, BATCH = 100, 4  # of the training; rows of a step


class Call(NamedTuple):
    """A function, and the file that it stands in; a function of C has none."""

    file: str
    function: str


class Calls:
    """Counts the calls of this thread, of Python and C functions, from each `begin` on until `end`.

    With `within`, only Python calls, in files whose path begins so. What runs within a function of a file whose path
    begins with `as_c` counts as one call of a C function.
    """

    def __init__(self, within: str = "", as_c: str | None = None) -> None:
        self._within = within
        self._as_c = as_c
        self._depth = 0  # of frames whose calls are not counted
        self._counts: list[dict[Call, int]] = []  # since each `begin`

    def begin(self) -> None:
        self._counts.append({})
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)

    def of_a_step(self, share: float) -> Counter[Call]:
        """How often this share of the steps calls each function at least, if each `begin` is the begin of a step."""
        at = int(len(self._counts) * (1 - share))
        found = {call: sorted(turn.get(call, 0) for turn in self._counts)[at] for call in set().union(*self._counts)}
        return Counter({call: count for call, count in found.items() if count})

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        file, counts = frame.f_code.co_filename, self._counts[-1]
        if self._depth:
            self._depth += (event == "call") - (event == "return")
        elif file == __file__:
            return
        elif event == "call":
            self._depth = int(self._as_c is not None and file.startswith(self._as_c))
            if file.startswith(self._within):
                call = Call("" if self._depth else file, frame.f_code.co_qualname)
                counts[call] = counts.get(call, 0) + 1
        elif event == "c_call" and not self._within:
            call = Call("", getattr(function, "__qualname__", str(function)))
            counts[call] = counts.get(call, 0) + 1


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def rows() -> TensorDataset:
    draws = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(STEPS * BATCH, 8, generator=draws), torch.randint(3, (STEPS * BATCH,), generator=draws)
    )


def calls_of_a_step() -> Counter[Call]:
    """How often a step calls each function of dp_ray."""
    calls, before = Calls(HOME), DriverStepControl.before

    def beginning(control: DriverStepControl, step: int) -> None:
        calls.begin()
        before(control, step)

    with TemporaryDirectory() as folder, patch.object(DriverStepControl, "before", beginning):
        try:
            dp_ray.run(
                task="train",
                model=mlp,
                dataset=rows,
                loss="torch.nn:CrossEntropyLoss",
                optimizer={"target": "torch.optim:SGD", "args": {"lr": 0.01}},
                checkpoint={"every_seconds": None},
                batch_size=BATCH,
                workers=0,
                storage=folder,
                name="counted",
                quiet=True,
            )
        finally:
            calls.end()
    return calls.of_a_step(0.9)


def main() -> None:
    found = calls_of_a_step()
    for call, count in sorted(found.items(), key=lambda item: (item[0].file, -item[1])):
        print(f"{count:4.0f}  {call.file.removeprefix(HOME)}: {call.function}")
    files = {call.file for call in found}
    print(f"{found.total():.0f} calls of {len(found)} functions in {len(files)} files")


if __name__ == "__main__":
    main()
