"""The git commit of the current folder, and which of its files differ from it."""

import subprocess
from typing import Any

SECONDS = 2.0
SHOWN = 50  # changed files that are listed


def git_state() -> dict[str, Any] | None:
    """The commit, the branch and the changed files of the repository around the current folder; None if unknown."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_status(done.stdout)


def parse_status(text: str) -> dict[str, Any]:
    """What `git status --porcelain=v2 --branch` says.

    >>> parse_status("# branch.oid 1f\\n# branch.head main\\n1 .M N... 100644 100644 100644 0 0 a b.py\\n")
    {'commit': '1f', 'branch': 'main', 'changed': ['a b.py'], 'num_changed': 1}
    """
    lines = text.splitlines()
    headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# ") and line.count(" ") > 1)
    changed = [_path_of(line) for line in lines if not line.startswith("#")]
    return {
        "commit": headers.get("branch.oid"),
        "branch": headers.get("branch.head"),
        "changed": changed[:SHOWN],
        "num_changed": len(changed),
    }


def _path_of(line: str) -> str:
    """The path in a line: after 8 fields, or 9 if the file was renamed, or 10 if it has a conflict."""
    fields = {"1": 8, "2": 9, "u": 10}.get(line[:1], 1)
    return line.split(" ", fields)[-1].partition("\t")[0]
