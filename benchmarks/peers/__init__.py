"""Beside the peers, on their own work: their scripts, unchanged but for data, and what dp_ray makes of the same.

`python -m benchmarks peers` measures all rows, `python -m benchmarks peers:gate` those of one name of ROWS. What a
row needs is outside the repository, in `~/.cache/dp_ray-peers` or the folder in DP_RAY_PEERS: see `needed.py`.
"""

import sys
from collections.abc import Iterator
from importlib import import_module

from benchmarks.peers.needed import NotHere
from benchmarks.table import Row

ROWS = ("gate", "torchft", "parity", "images", "glue", "nanogpt")


def measure(only: str = "") -> Iterator[Row]:
    """Measure all rows, or those of a name; what cannot be had on this machine is left out, and says so."""
    for name in [only] if only else ROWS:
        try:
            yield from import_module(f"benchmarks.peers.{name}").measure()
        except NotHere as missing:
            print(f"peers:{name} is left out: {missing}", file=sys.stderr, flush=True)
