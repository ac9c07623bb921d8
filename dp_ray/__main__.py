"""The program `dp-ray`, which is `python -m dp_ray` too."""

import _signal  # type: ignore[import-not-found]
import os
import sys

# Python holds `_signal` in itself; while it imports `signal`, Ctrl-C may come.


def program() -> None:
    """Run the program, and end its process at once.

    Signals end it with status 130 or 75 and no traceback, from its first moment to its last. Python would first take
    apart all modules, for a second or more where torch is imported. What has to happen at the end does: other threads
    end, exit handlers are called, output is written.
    """
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _leave)
    import atexit
    import threading

    from dp_ray.errors import exit_status_of
    from dp_ray.system.threads import ends_at_once, interrupts

    interrupts("".join(sys.argv[1:2]))
    status: object = 0
    try:
        from dp_ray.cli.main import main

        main()
    except SystemExit as leaving:
        status = leaving.code or 0
    except KeyboardInterrupt as interrupted:
        status = exit_status_of(interrupted)
    ends_at_once(status if isinstance(status, int) else 1)
    if not isinstance(status, int):
        sys.exit(str(status))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave(*_: object) -> None:
    """End the process that was interrupted before it could import how to be."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    program()
