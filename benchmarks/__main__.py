"""Run the benchmarks that are named, or all: `python -m benchmarks [NAME...]`. Prints one markdown table.

Of `survivors` and `peers` also some rows alone, as `survivors:node`. `counts` is a suite of its own: see its README.
`peers` installs what it needs outside the repository, so all others run without it.
"""

import sys
import time
from importlib import import_module

from benchmarks.table import heading, line

NAMES = (
    *("run", "commands", "session", "predict", "outputs", "train", "faults", "survivors", "reports", "growth"),
    *("order", "feeds", "ahead", "start", "pages", "metrics", "sharding", "tax", "channel", "parallel", "loops"),
    *("mixture", "packing"),
)


def main(names: list[str]) -> None:
    unknown = [name for name in names if name.partition(":")[0] not in (*NAMES, "peers")]
    if unknown:
        sys.exit(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)} and peers")
    print(*heading(), sep="\n", flush=True)
    for name in names or NAMES:
        started = time.monotonic()
        module, _, rows = name.partition(":")
        for row in import_module(f"benchmarks.{module}").measure(*([rows] if rows else [])):
            print(line(row), flush=True)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["counts"]:
        import_module("benchmarks.counts.table").main(sys.argv[2:])
    else:
        main(sys.argv[1:])
