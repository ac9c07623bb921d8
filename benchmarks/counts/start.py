"""Be a process of a library: `python -m benchmarks.counts.start LIBRARY FOLDER COUNT PROGRAMS`."""

import importlib
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    importlib.import_module(f"benchmarks.counts.{sys.argv[1]}").main(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
