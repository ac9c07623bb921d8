"""Start each library on 2, 1 and 3 processes, compare what the programs end with, and print the table."""

import argparse
import csv
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.counts import killed
from benchmarks.counts.programs import Program, Results, oracle
from benchmarks.counts.side import NO_WAY, SETS, Told

COUNTS = (2, 1, 3)  # first those that begin what others go on with
LIBRARIES = {
    "ours": "dp_ray",
    "ddp": "DDP",
    "accelerated": "accelerate",
    "ray_train": "Ray Train",
    "hugging_face": "HF Trainer",
}
VERSIONS = ("torch", "accelerate", "ray", "transformers", "torchmetrics")
README = "https://github.com/dp-ray/dp_ray/blob/main/benchmarks/counts/README.md"
ROUNDING = 1e-5  # the most by which numbers differ, beside the largest of them, that rounding explains
SECONDS = 600  # of one library on one count: what takes longer hangs
Cells = dict[str, dict[str, Any]]  # of a library, by the name of the program


def main(words: list[str]) -> None:
    """Be `python -m benchmarks counts`."""
    of = argparse.ArgumentParser(prog="python -m benchmarks counts", description=__doc__.partition("\n")[0])
    of.add_argument("programs", choices=SETS, nargs="?", default="programs", help="which: all, unless one is named")
    of.add_argument(
        "--only", choices=LIBRARIES.values(), action="append", help="a library; may be given several times"
    )
    of.add_argument("--json", type=Path, help="write the cells there")
    of.add_argument("--csv", type=Path, help="write the table there")
    given = of.parse_args(words)
    make: Callable[[str], Cells] = {"programs": compared, "smallest": numbers, "killed": recovered}[given.programs]
    cells = {
        library: make(module) for module, library in LIBRARIES.items() if given.only is None or library in given.only
    }
    asked = [program for program in SETS[given.programs] if program.name != killed.UNDISTURBED]
    rows = [[f"{of.name}: {of.asks}", *[found[of.name]["shown"] for found in cells.values()]] for of in asked]
    print(", ".join(f"{name} {version(name)}" for name in VERSIONS), end="\n\n")
    for row in [["", *cells], ["---"] * (len(cells) + 1), *rows]:
        print(f"| {' | '.join(row)} |")
    if given.csv:
        with given.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["", *cells], *rows])
    if given.json:
        given.json.write_text(json.dumps(cells, indent=1))


def compared(module: str) -> Cells:
    """What each program came to with a library."""
    with tempfile.TemporaryDirectory() as folder:
        hung = [count for count in COUNTS if not ended(module, Path(folder), count, "programs")]
        cells = {}
        for program in SETS["programs"]:
            results = {count: found for count in COUNTS if (found := kept(folder, program, count))}
            cells[program.name] = judged(program, results, told_by(module).get(program.name), hung)
            cells[program.name]["shown"] = shown(program.name, cells[program.name])
    return cells


def numbers(module: str) -> Cells:
    """The numbers of 1 and 2 processes on the smallest inputs, or what both have."""
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 2):
            ended(module, Path(folder), count, "smallest")
        cells = {}
        for program in SETS["smallest"]:
            found = [kept(folder, program, count) for count in (1, 2)]
            texts = [" ".join(f"{x:.4g}" for x in next(iter(of.values())).flatten()) for of in found if of]
            cells[program.name] = {"shown": " → ".join(dict.fromkeys(texts)) or NO_WAY, "numbers": texts}
    return cells


def recovered(module: str) -> Cells:
    """What a killed process of two has changed."""
    with tempfile.TemporaryDirectory() as folder:
        done = ended(module, Path(folder), killed.COUNT, "killed")
        undisturbed, after = (kept(folder, program, killed.COUNT) for program in SETS["killed"])
        if not done or not undisturbed or not after:
            return {"killed": {"shown": "fails" if done else "hangs"}}
        apart = distance(after["weights"], undisturbed["weights"])
        again = killed.noted(Path(folder), "killed") - killed.noted(Path(folder), killed.UNDISTURBED)
    text = f"{said(apart) or f'other ({apart:.0e})'}, {again} rows computed again"
    told = told_by(module).get("killed")
    return {"killed": {"apart": apart, "again": again, "shown": f"[{text}]({told.page})" if told else text}}


def told_by(module: str) -> dict[str, Told]:
    """Why programs differ with a library."""
    told: dict[str, Told] = importlib.import_module(f"benchmarks.counts.{module}").TOLD
    return told


def kept(folder: str, program: Program, count: int) -> Results | None:
    """What a program ended with, if it did."""
    path = Path(folder, f"{program.name} on {count}.pt")
    return torch.load(path) if path.exists() else None


def ended(module: str, folder: Path, count: int, of: str) -> bool:
    """Run a set of programs on `count` processes; say whether they ended in time. Raises if they failed."""
    starts = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    starts += ["--max-restarts=1"] if of == "killed" else []
    if importlib.import_module(f"benchmarks.counts.{module}").STARTS_WITH == "python":
        starts = []
    command = [sys.executable, *starts, "-m", "benchmarks.counts.start", module, str(folder), str(count), of]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", killed.NOTES: str(folder)}
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
    why, page = (told.why, told.page) if told else ("", "")
    verdict = said(apart) or (told.verdict if told and told.verdict != "rounding" else "differs")
    return {**cell, "verdict": verdict, "why": why, "page": page}


def said(apart: float) -> str:
    """What a distance is called, if rounding explains it."""
    return "same bits" if apart == 0 else "rounding" if apart <= ROUNDING else ""


def distance(found: torch.Tensor, beside: torch.Tensor) -> float:
    """The largest difference, beside the largest number; infinite if there are other rows."""
    if found.shape != beside.shape:
        return float("inf")
    return float((found.double() - beside.double()).abs().max() / beside.double().abs().max())


def shown(name: str, cell: dict[str, Any]) -> str:
    """A cell of the table: to the smallest input if numbers differ, else to the page if there is one."""
    text, page = str(cell["verdict"]), cell["page"]
    if cell.get("apart"):
        text += " (other rows)" if cell["apart"] == float("inf") else f" ({cell['apart']:.0e})"
    if cell.get("apart", 0) > ROUNDING:
        page = f"{README}#{name.lower()}"
    elif (cell.get("from plain torch") or 0) > ROUNDING:
        text += f", {cell['from plain torch']:.0e} from plain torch"
    return f"[{text}]({page})" if page else text
