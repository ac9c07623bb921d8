"""The program `dp-ray`, which is `python -m dp_ray` too."""

import atexit
import os
import sys
import threading

from dp_ray.cli import main


def program() -> None:
    """Run the program, and end its process at once.

    Python would first take apart all modules, for a second or more where torch is imported. What has to happen at the
    end does: other threads end, exit handlers are called, output is written.
    """
    status: object = 0
    try:
        main()
    except SystemExit as leaving:
        status = leaving.code or 0
    if not isinstance(status, int):
        sys.exit(str(status))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    program()
