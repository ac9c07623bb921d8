"""Ray Data's side of `predict`: map_batches over a pool of two actors, written as Parquet.

`python -m benchmarks.mapped ROWS OUT`, the whole command, is that of `commands`.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.data import ActorPoolStrategy, DataContext
from torch import nn

from benchmarks.rows import BATCH_SIZE, WIDTH, Mlp, Work

BLOCKS = 20


class Predictor:
    """The actor's body: the model is made once."""

    def __init__(self, stamps: str | None, make: Callable[[str | None], nn.Module]) -> None:
        self.model = make(stamps).eval()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            return {"output": self.model(torch.from_numpy(batch["data"])).numpy()}


def put(rows: Path) -> list[Any]:
    """The rows in Ray's memory, in blocks."""
    data = np.fromfile(rows, np.float32).reshape(-1, WIDTH)
    return [ray.put(block) for block in np.array_split(data, BLOCKS)]


def predict(
    blocks: list[Any], work: Work, stamps: Path | None, out: Path, make: Callable[[str | None], nn.Module] = Mlp
) -> None:
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.from_numpy_refs(blocks * work.times).map_batches(
        Predictor,
        fn_constructor_args=(stamps and str(stamps), make),
        batch_size=work.batch_size // work.workers,
        batch_format="numpy",
        compute=ActorPoolStrategy(size=work.workers),
        num_cpus=1,
    ).write_parquet(str(out))


def main(rows: str, out: str) -> None:
    """Start a Ray, read the rows into its memory, and predict."""
    ray.init(log_to_driver=False, logging_level="ERROR")
    predict(put(Path(rows)), Work(rows, 1, BATCH_SIZE, 2), None, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
