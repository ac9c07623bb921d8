"""Add up what the tests took: `python -m tools.durations [FOLDER]`, of `build/durations.txt`."""

import sys
from collections import defaultdict
from pathlib import Path

WRITTEN = Path(__file__).parents[1] / "build" / "durations.txt"


def main(folder: str = "tests") -> None:
    """Print a table of the folder: a row for each folder or file in it, with its tests and seconds."""
    found = defaultdict[str, list[float]](list)
    for line in WRITTEN.read_text().splitlines():
        seconds, _, test = line.strip().partition(" s  ")
        path = Path(test.partition("::")[0])
        if path.is_relative_to(folder):
            found[path.relative_to(folder).parts[0]].append(float(seconds))
    print(f"| {folder} | tests | seconds |", "|---|---|---|", sep="\n")
    for name, taken in sorted(found.items(), key=lambda item: -sum(item[1])):
        print(f"| {name} | {len(taken):,} | {sum(taken):,.0f} |")
    print(f"| all | {sum(map(len, found.values())):,} | {sum(map(sum, found.values())):,.0f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
