"""What a worker pod does before it ends: Ray drains its node, and the pod waits until the run has left it.

The program `python -m dp_ray.places.pod SECONDS`, which Kubernetes runs in the pod's container and waits for.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from dp_ray.places.own_ray import RAY, drain_node

LOOK_SECONDS = 1.0


def leave(raylets: Sequence[psutil.Process], seconds: float) -> int:
    """Drain the nodes of these raylets; return 0 once they have ended, 1 if they have not within the seconds.

    Ray ends the raylet of a drained node when nothing runs there any more.
    """
    until = time.monotonic() + seconds
    for raylet in raylets:
        with suppress(psutil.NoSuchProcess):
            drain = drain_node(raylet, "Kubernetes ends the pod")
            subprocess.run([*RAY, *drain, f"--deadline-remaining-seconds={seconds:.0f}"], check=False)
    while any(map(_is_raylet, raylets)) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    return int(any(map(_is_raylet, raylets)))


def _is_raylet(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__":
    of_this_container = [process for process in psutil.process_iter() if _is_raylet(process)]
    sys.exit(leave(of_this_container, float(sys.argv[1])))
