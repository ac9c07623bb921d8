"""Seconds for the page in a process that could have run a job: first with its imports, then without."""

import json
import sys
import time

import dp_ray.driver  # noqa: F401  (what a run has imported)
from dp_ray.storage import Storage


def main(folder: str) -> None:
    run, seconds = Storage(folder), []
    for _ in range(2):
        started = time.perf_counter()
        from dp_ray.report.page import write_page

        write_page(run)
        seconds.append(time.perf_counter() - started)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1])
