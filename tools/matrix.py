"""Run README's quick start from the wheel in a fresh environment for each Python and torch; `make matrix` runs this.

One environment at a time, removed after: with a CUDA build of torch each takes some 6 GB. The oldest torch runs on
the oldest Python, the newest on each. `ONLY="3.12 3.13"` leaves out the other Pythons.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.pages import blocks_of

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH = "2.11.0"
COMMANDS = ("dp-ray init", "dp-ray run job.yaml", "python train.py", "dp-ray run train.yaml")
LIMIT = 1800  # seconds of one command


def main(only: list[str]) -> int:
    """Print a line for each environment; return how many failed."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    (newest,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    torches = {PYTHONS[0]: (OLDEST_TORCH, newest)}
    failed = 0
    for version in only or PYTHONS:
        python = python_of(version)
        for torch in torches.get(version, (newest,)) if python else ():
            began = time.monotonic()
            says = tried(str(python), torch, wheel)
            failed += says != "passed"
            print(f"Python {version}, torch {torch}: {says}, {time.monotonic() - began:.0f} s", flush=True)
        if not python:
            print(f"Python {version}: not had here", flush=True)
    return failed


def python_of(version: str) -> str | None:
    """Return the interpreter of a version: pyenv's newest (its shims are on the path, too), else that on the path."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def tried(python: str, torch: str, wheel: Path) -> str:
    """Install the wheel as a user does, with the newest of all else; run the quick start in a new folder."""
    with tempfile.TemporaryDirectory(prefix="dp-ray-matrix-") as made:
        folder, own = Path(made), Path(made, "venv")
        for block in blocks_of(ROOT / "README.md"):
            if block.file_name:
                (folder / block.file_name).write_text(block.text)
        # Without pip's cache, which would keep gigabytes.
        install = ["python", "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={torch}", str(wheel)]
        for line in ([python, "-m", "venv", str(own)], install, *map(str.split, COMMANDS)):
            program = [str(own / "bin" / line[0]), *line[1:]] if line[0] != python else line
            try:
                done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
            except subprocess.TimeoutExpired:
                return f"`{' '.join(line)}` took more than {LIMIT} s"
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                return f"`{' '.join(line)}` failed with status {done.returncode}"
    return "passed"


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
