"""A process with simulated GPUs: `python -m tests.sim LIBRARY PLAN RANK`; the plan is a JSON file."""

import faulthandler
import json
import sys
import traceback
from pathlib import Path

from tests.support import simgpu


def main(library: str, plan: str, rank: str) -> None:
    """Run a plan; an error is kept beside it, and where the host has read a GPU's memory."""
    faulthandler.enable(Path(plan).with_name(f"error.{rank}.fault").open("w"))
    simgpu.begin(Path(library))
    from tests.sim.running import Plan, run_plan  # which import torch

    try:
        run_plan(Plan(**json.loads(Path(plan).read_text())), int(rank))
    except BaseException:
        Path(plan).with_name(f"error.{rank}").write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
