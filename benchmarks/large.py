"""One prediction with large outputs, as a process of its own: `python -m benchmarks.large ROWS TIMES OUT [KEYS]`.

It prints the seconds of the whole, call to done, and those of them after the last step. An earlier version of dp_ray
runs it too, beside its own `benchmarks.rows`, which is the same.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dp_ray
from benchmarks.rows import BATCH_SIZE


class Wide(nn.Module):
    """Each row four times over: 4 kB of output a row. Each process keeps in `stamps` when its last forward was."""

    def __init__(self, stamps: str) -> None:
        super().__init__()
        self.stamps = stamps
        self.stamp: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.stamp is None:
            self.stamp = np.memmap(f"{self.stamps}/{os.getpid()}", np.float64, "w+", shape=(1,))
        outputs = inputs.repeat(1, 4)
        self.stamp[0] = time.time()
        return outputs


def predict(rows: str, times: int, out: Path, keys: dict[str, Any]) -> dp_ray.Result:
    """Predict on two workers, with more keys of the job."""
    (out / "stamps").mkdir()
    return dp_ray.run(
        model={"target": "benchmarks.large:Wide", "args": {"stamps": str(out / "stamps")}},
        dataset={"target": "benchmarks.rows:Rows", "args": {"path": rows, "times": times}},
        batch_size=BATCH_SIZE,
        workers=2,
        storage=str(out),
        quiet=True,
        **keys,
    )


def main(rows: str, times: str, out: str, keys: str = "{}") -> None:
    began = time.time()
    result = predict(rows, int(times), Path(out), json.loads(keys))
    ended = time.time()
    last = max(float(np.fromfile(stamp, np.float64)[0]) for stamp in Path(out, "stamps").iterdir())
    print(json.dumps({"rows": result.rows, "whole": ended - began, "after": ended - last}))


if __name__ == "__main__":
    main(*sys.argv[1:])
