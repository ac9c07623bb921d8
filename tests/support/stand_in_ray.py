"""`dp-ray node` with stand-ins for Ray and for the run, which start at once: what hosts tell each other, without Ray.

As a program: `node ARGUMENTS` is `dp-ray node`; `start` and `drain-node` are Ray's commands, and `run` the run, which
are told what to do by files in the folder that the variable FOLDER names.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dp_ray.cluster.internals.variables import ADDRESS, AUTH_TOKEN_PATH

FOLDER = "DP_RAY_STAND_IN"
PR_SET_NAME = 15
OWN = [sys.executable, __file__]


def node() -> None:
    from dp_ray.__main__ import program
    from dp_ray.places import node, own_ray

    own_ray.RAY, node.PROGRAM = OWN, OWN
    if versions := os.environ.get("DP_RAY_STAND_IN_PYTHON"):
        vars(node)["python_version"] = lambda: versions
    program()


def given(name: str) -> str:
    (value,) = [one.partition("=")[2] for one in sys.argv if one.startswith(f"--{name}=")]
    return value


def start(folder: Path) -> None:
    """Be up at once, with a raylet; end if that does with an error, as Ray does."""
    if (folder / ("broken_head" if "--head" in sys.argv else "broken")).exists():
        sys.exit("this Ray is broken")
    if (folder / "times_out").exists() and "--head" not in sys.argv:
        if (folder / "times_out").read_text() == "once":
            (folder / "times_out").unlink()
        sys.exit("Exception: The current node timed out during startup.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raylet = subprocess.Popen([*OWN, "raylet", "--gcs-address=10.0.0.1:6379", "--node_id=abc"])
    try:
        time.sleep(0.2)
        (Path(given("temp-dir")) / "ray_current_cluster").write_text("10.0.0.1:6379")
        raylet.wait()
        time.sleep(3600)
    finally:
        raylet.kill()


def raylet() -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"raylet")
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    time.sleep(3600)


def drain(folder: Path) -> None:
    (folder / "drained").touch()
    while not (folder / "left").exists():
        time.sleep(0.05)
    import psutil

    own = [one for one in psutil.process_iter(["cmdline"]) if "raylet" in (one.info["cmdline"] or [])]
    for one in own:
        if one.environ().get(AUTH_TOKEN_PATH) == os.environ[AUTH_TOKEN_PATH]:
            one.kill()


def run(folder: Path) -> None:
    """Note the signals, and end as `dp-ray run` would; or with the status that the file `ends` has."""
    statuses = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR2: 75}
    came: list[int] = []
    for number in statuses:
        signal.signal(number, lambda number, _: came.append(number))
    (folder / "runs").write_text(os.environ[ADDRESS] + " " + " ".join(sys.argv[2:]))
    while not came and not (folder / "ends").exists():
        time.sleep(0.02)
    (folder / "signals").write_text(" ".join(signal.Signals(number).name for number in came))
    if came:
        time.sleep(1.0)  # the step's end
        if (folder / "slow").exists():
            while len(came) < 2:
                time.sleep(0.02)
            sys.exit(130)
        sys.exit(statuses[signal.Signals(came[0])])
    sys.exit(int((folder / "ends").read_text()))


if __name__ == "__main__":
    of = Path(os.environ[FOLDER])
    match sys.argv[1]:
        case "node":
            node()
        case "start":
            start(of)
        case "raylet":
            raylet()
        case "drain-node":
            drain(of)
        case _:
            run(of)
