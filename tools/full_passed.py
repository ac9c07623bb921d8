"""Keep on which commit all tests passed, in `tests/full-passed`, and say how many commits ago that was."""

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

KEPT = Path(__file__).parents[1] / "tests" / "full-passed"
PAGES = [":!*.md", ":!docs/pictures", f":!tests/{KEPT.name}"]  # what may differ from the commit that passed


def main() -> None:
    """Be `python -m tools.full_passed [keep COMMIT BEGUN]`; `BEGUN` is in seconds since 1970."""
    if sys.argv[1:2] == ["keep"]:
        keep(sys.argv[2], float(sys.argv[3]))
    else:
        print(how_long_ago())


def keep(commit: str, begun: float) -> None:
    """Keep that the commit passed, unless the files have changed since the tests began."""
    if changed := git("diff", "--name-only", commit, "--", *PAGES):
        sys.exit(f"All tests passed, but these files are not those of {commit[:8]}: {', '.join(changed.split())}")
    when = datetime.now(UTC).isoformat(" ", "minutes")
    KEPT.write_text(f"{commit}\n{when}, in {(time.time() - begun) / 60:.0f} minutes\n")


def how_long_ago() -> str:
    """What `make check` says."""
    if not KEPT.exists():
        return "All tests have never passed: run `make full`."
    commit, when = KEPT.read_text().splitlines()
    try:
        since = git("rev-list", "--count", f"{commit}..HEAD", "--", ".", *PAGES)
    except subprocess.CalledProcessError:  # a clone without history
        return f"All tests passed on {commit[:8]} ({when})."
    return f"All tests passed on {commit[:8]} ({when}), {since} commits ago, pages aside."


def git(*arguments: str) -> str:
    """What git prints of this repository."""
    command = ["git", "-C", str(KEPT.parents[1]), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
