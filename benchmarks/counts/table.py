"""Start each library on 2, 1 and 3 processes, compare what the programs end with, and print the table."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.counts.programs import PROGRAMS, Program, Results, oracle
from benchmarks.counts.side import NO_WAY, Told

COUNTS = (2, 1, 3)  # first those that begin what others go on with
LIBRARIES = {
    "ours": "dp_ray",
    "ddp": "DDP",
    "accelerated": "accelerate",
    "ray_train": "Ray Train",
    "hugging_face": "HF Trainer",
}
ROUNDING = 1e-5  # the most by which numbers differ, beside the largest of them, that rounding explains
SECONDS = 300  # of one library on one count: what takes longer hangs


def main(words: list[str]) -> None:
    """Be `python -m benchmarks counts`."""
    of = argparse.ArgumentParser(prog="python -m benchmarks counts", description=__doc__.partition("\n")[0])
    of.add_argument(
        "--only", choices=LIBRARIES.values(), action="append", help="a library; may be given several times"
    )
    of.add_argument("--json", type=Path, help="write the cells there")
    given = of.parse_args(words)
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for module, library in LIBRARIES.items():
        if given.only is None or library in given.only:
            cells[library] = cells_of(module)
    print(f"| on 1, 2 and 3 processes | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|", sep="\n")
    for program in PROGRAMS:
        print(f"| {program.name}: {program.asks} | {' | '.join(shown(of[program.name]) for of in cells.values())} |")
    if given.json:
        given.json.write_text(json.dumps(cells, indent=1))


def cells_of(module: str) -> dict[str, dict[str, Any]]:
    """What each program came to with a library."""
    told: dict[str, Told] = importlib.import_module(f"benchmarks.counts.{module}").TOLD
    with tempfile.TemporaryDirectory() as folder:
        hung = [count for count in COUNTS if not ended(module, Path(folder), count)]
        cells = {}
        for program in PROGRAMS:
            found = {count: Path(folder, f"{program.name} on {count}.pt") for count in COUNTS}
            results = {count: torch.load(path) for count, path in found.items() if path.exists()}
            cells[program.name] = judged(program, results, told.get(program.name), hung)
    return cells


def ended(module: str, folder: Path, count: int) -> bool:
    """Run the programs on `count` processes; say whether they ended in time. Raises if they failed."""
    starts = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    if importlib.import_module(f"benchmarks.counts.{module}").STARTS_WITH == "python":
        starts = []
    command = [sys.executable, *starts, "-m", "benchmarks.counts.start", module, str(folder), str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        sys.exit(f"{module} on {count}:\n{done.stderr[-4000:]}")
    return True


def judged(program: Program, results: dict[int, Results], told: Told | None, hung: list[int]) -> dict[str, Any]:
    """The verdict on a program, with how far the numbers are apart: of the counts, and of the oracle."""
    if told is not None and told.verdict == NO_WAY:
        return {"verdict": NO_WAY, "why": told.why, "page": told.page}
    if missing := [count for count in COUNTS if count not in results]:
        return {"verdict": "hangs" if hung else "failed", "why": f"on {', '.join(map(str, missing))}", "page": ""}
    values = {count: next(iter(of.values())) for count, of in results.items()}
    apart = max(distance(values[count], values[1]) for count in COUNTS)
    cell: dict[str, Any] = {"apart": apart, "from plain torch": None}
    if not program.draws:
        plain = next(iter(oracle(program).values()))
        cell["from plain torch"] = max(distance(of, plain) for of in values.values())
    if apart <= ROUNDING:
        verdict = "same bits" if apart == 0 else "rounding"
        return {**cell, "verdict": verdict, "why": told.why if told else "", "page": told.page if told else ""}
    return {**cell, **(told._asdict() if told else {"verdict": "differs", "why": "", "page": ""})}


def distance(found: torch.Tensor, beside: torch.Tensor) -> float:
    """The largest difference, beside the largest number; infinite if there are other rows."""
    if found.shape != beside.shape:
        return float("inf")
    return float((found.double() - beside.double()).abs().max() / beside.double().abs().max())


def shown(cell: dict[str, Any]) -> str:
    """A cell of the table."""
    text = str(cell["verdict"])
    if cell.get("apart") and cell["apart"] != float("inf"):
        text += f" ({cell['apart']:.0e})"
    if cell.get("from plain torch") is not None and cell["from plain torch"] > ROUNDING and cell["apart"] <= ROUNDING:
        text += f", {cell['from plain torch']:.0e} from plain torch"
    return f"[{text}]({cell['page']})" if cell["page"] else text
