"""Drawn kills on Ray: jobs, loops and parallel modules whose workers are killed or stopped at drawn moments.

What is left is the undisturbed run's, bit for bit. To draw for long:
`python -m tests.driver.test_drawn_on_ray SECONDS [SEED]`, which prints each draw that fails, and at the end the
processes that are left.
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.cluster.internals.train import WORKER_PROCESS
from dp_ray.driver.sessions import Session
from tests.driver.test_survivors import GOES_ON, LOOP, PREDICTS
from tests.support.drivers import told

TRAINS = {**GOES_ON, "epochs": 8, "checkpoint": {"every_steps": 5}}
KINDS: dict[str, dict[str, Any]] = {
    "trains": TRAINS,
    "fsdp": {**TRAINS, "strategy": "fsdp"},
    "restarts": {**TRAINS, "on_lost_worker": "restart"},
    "loops": LOOP,
    "predicts": PREDICTS,
    "modules": {},
}
SETTINGS: dict[str, Any] = {"retries": 50, "timeouts": {"step": 20, "rejoin": 3}, "quiet": True}
FEW = 4


def workers_here() -> list[psutil.Process]:
    """The processes of the workers that this process's Ray has started."""
    return [one for one in psutil.Process().children(recursive=True) if WORKER_PROCESS in " ".join(one.cmdline())]


@contextmanager
def disturbed(chance: random.Random) -> Iterator[list[str]]:
    """Kill workers at drawn moments while the block runs, or stop one for a while; yields what was done."""
    done, has_ended = list[str](), threading.Event()
    moments = sorted(chance.uniform(0.0, 4.0) for _ in range(chance.choice([1, 1, 2, 3])))
    acts = [(moment, chance.random() < 0.25, chance.random()) for moment in moments]

    def act() -> None:
        began = time.monotonic()
        for moment, stops, which in acts:
            if has_ended.wait(max(0.0, began + moment - time.monotonic())):
                return
            with suppress(psutil.NoSuchProcess, IndexError):
                there = sorted(workers_here(), key=lambda one: one.pid)
                one = there[int(which * len(there))]
                one.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
                what = "stop" if stops else "kill"
                done.append(f"{moment:.2f} s: {what} {there.index(one)} of {len(there)}")
                if stops:
                    has_ended.wait(chance.uniform(0.2, 6.0))
                    one.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=act, name="disturber")
    thread.start()
    try:
        yield done
    finally:
        has_ended.set()
        thread.join()


def of_modules(session: Session) -> dict[str, torch.Tensor]:
    """The weights of a module that a plain loop trains on the session's workers."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.Dropout(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with session.parallel(module, bitwise=True) as model:
        for step in range(60):
            optimizer.zero_grad()
            model(torch.randn(10, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)
    return module.state_dict()


def ran(session: Session | None, kind: str, folder: Path, name: str) -> Any:
    """Run a kind of work on the session's workers, or in this process; return what is left of it."""
    if kind == "modules" and session is not None:
        return of_modules(session)
    keys = {**KINDS[kind], **SETTINGS, "storage": str(folder), "name": name}
    result = dp_ray.run(None, **keys, workers=0) if session is None else session.run(None, **keys, workers=3)
    return result.outputs_sha256 if kind == "predicts" else (result.weights_sha256, told(result))


def is_same(got: Any, wanted: Any) -> bool:
    """Whether two runs have left the same, to the bit."""
    if isinstance(got, dict):
        return all(torch.equal(got[name], wanted[name]) for name in wanted)
    return bool(got == wanted)


def check(session: Session, seed: int, folder: Path, undisturbed: dict[str, Any]) -> str:
    """Draw a kind of work and what disturbs it; compare what is left. Returns what was done."""
    chance = random.Random(seed)
    kind = chance.choice(sorted(KINDS))
    if kind not in undisturbed:
        undisturbed[kind] = ran(session if kind == "modules" else None, kind, folder, f"undisturbed-{kind}")
    with disturbed(chance) as done:
        got = ran(session, kind, folder, f"drawn-{seed}")
    assert is_same(got, undisturbed[kind]), f"{kind}, {done}"
    return f"{kind}: {'; '.join(done)}"


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.slow
def test_drawn_kills_on_ray(tmp_path: Path, in_project: Path) -> None:
    undisturbed: dict[str, Any] = {}
    with dp_ray.session(workers=3, quiet=True) as session:
        for seed in range(FEW):
            check(session, seed, tmp_path, undisturbed)
    assert not workers_here()


def main(seconds: float, seed: int) -> int:
    """Draw for so long; return how many draws have failed."""
    until, drawn, failed = time.monotonic() + seconds, 0, 0
    undisturbed: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        while time.monotonic() < until:
            with dp_ray.session(workers=3, quiet=True) as session:
                for _ in range(20):
                    try:
                        done = check(session, seed + drawn, Path(folder), undisturbed)
                        print(f"{seed + drawn}: {done}", flush=True)
                    except Exception:
                        failed += 1
                        print(f"FAILED {seed + drawn}\n{traceback.format_exc()[-6000:]}", flush=True)
                    drawn += 1
    left = [" ".join(one.cmdline())[:100] for one in psutil.Process().children(recursive=True)]
    print(f"{drawn} drawn, {failed} failed, processes left: {left}", flush=True)
    return failed


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0) > 0)
