"""Count dp_ray's own Python calls in a training step of one process: `python -m benchmarks.calls` lists them.

They are the call events of `sys.setprofile` in dp_ray's files, of a run of six epochs less one of two, by step: an
MLP, no option on. What happens less than once in two steps is left out, and so are checkpoints by the clock: a run
has the more of them, the longer it takes.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dp_ray

HOME = str(Path(dp_ray.__file__).parent) + os.sep
STEPS, BATCH = 100, 4  # in an epoch; rows of a step


class Call(NamedTuple):
    """A function of dp_ray, and the file that it stands in."""

    file: str
    function: str


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def rows() -> TensorDataset:
    draws = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(STEPS * BATCH, 8, generator=draws), torch.randint(3, (STEPS * BATCH,), generator=draws)
    )


def calls_of_a_step() -> dict[Call, float]:
    """How often a step calls each function."""
    _run(1)  # what is imported and cached once is there then
    two, six = _run(2), _run(6)
    each = {call: (count - two[call]) / (4 * STEPS) for call, count in six.items()}
    return {call: count for call, count in each.items() if count >= 0.5}


def _run(epochs: int) -> Counter[Call]:
    calls: Counter[Call] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME):
            calls[Call(code.co_filename.removeprefix(HOME), code.co_qualname)] += 1

    with TemporaryDirectory() as folder:
        sys.setprofile(note)
        try:
            dp_ray.run(
                task="train",
                model=mlp,
                dataset=rows,
                loss="torch.nn:CrossEntropyLoss",
                optimizer={"target": "torch.optim:SGD", "args": {"lr": 0.01}},
                checkpoint={"every_seconds": None},
                batch_size=BATCH,
                epochs=epochs,
                workers=0,
                storage=folder,
                name="counted",
                quiet=True,
            )
        finally:
            sys.setprofile(None)
    return calls


def main() -> None:
    found = calls_of_a_step()
    for call, count in sorted(found.items(), key=lambda one: (one[0].file, -one[1])):
        print(f"{count:6.2f}  {call.file}: {call.function}")
    files = {call.file for call in found}
    print(f"{sum(found.values()):.1f} calls of {len(found)} functions in {len(files)} files")


if __name__ == "__main__":
    main()
