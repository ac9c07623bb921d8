"""Write constraints.txt, the one lock: the exact versions of all that `make` installs; `make lock` runs this.

Versions stay where the ranges of pyproject.toml allow them, but for those of the packages that are named:
`make lock UPGRADE="ruff mypy"`, and `UPGRADE=all` for the newest of all. pip solves it, and installs nothing.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "constraints.txt"
HEAD = "# Written by `make lock`: the versions that `make` installs and CI tests; pyproject.toml has the ranges.\n"


def main(upgraded: list[str]) -> None:
    """Solve the package with all its extras and the group `dev`, for this machine and this Python."""
    pins = [line for line in LOCK.read_text().splitlines() if "==" in line and upgraded != ["all"]]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as kept:
        kept.write("\n".join(pin for pin in pins if pin.partition("==")[0] not in upgraded))
        kept.flush()
        solve = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", "-c", kept.name]
        line = [sys.executable, "-m", "pip", *solve, "-e", ".[mlflow,site,trackio,wandb]", "--group", "dev"]
        done = subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found = [one["metadata"] for one in json.loads(done.stdout)["install"]]
    # Without the local part: PyPI has torch 2.13.0, a machine's folder of wheels may have 2.13.0+cpu.
    lines = {f"{one['name'].lower()}=={one['version'].partition('+')[0]}" for one in found if one["name"] != "dp-ray"}
    LOCK.write_text(HEAD + "\n".join(sorted(lines)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
