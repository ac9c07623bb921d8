"""Elastic jobs on CPUs that take further workers in where room comes: those that run go on, to the same bits."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.nn.functional import cross_entropy

import dp_ray
from dp_ray.cluster.channel import GROUP
from dp_ray.cluster.internals.core import wants_token
from dp_ray.cluster.internals.train import WORKER_PROCESS
from dp_ray.cluster.internals.variables import AUTH_MODE
from dp_ray.system.threads import repeated
from tests.support.cluster import Cluster, Run, ours
from tests.support.drivers import SLOW, told
from tests.support.kinds import SlowUntil
from tests.support.within import within

SECONDS = 200.0
HOLDS = """
import sys, ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
ray.init(sys.argv[1], log_to_driver=False)
left, *frees = map(int, sys.argv[2:])
taken = [group["bundles"].values() for group in placement_group_table().values() if group["state"] != "REMOVED"]
room = ray.cluster_resources()["CPU"] - sum(bundle.get("CPU", 0) for bundles in taken for bundle in bundles)
held = [placement_group([{"CPU": cpus}]) for cpus in (*frees, room - left - sum(frees)) if cpus]
ray.get([one.ready() for one in held])
print("holds", flush=True)
mine = {one.id.hex() for one in held}
for line in sys.stdin:
    if line == "free\\n":
        remove_placement_group(held.pop(0))
    table = placement_group_table()
    print(sum(one["state"] != "REMOVED" and key not in mine for key, one in table.items()), flush=True)
"""


NO_ROOM = """
import sys, time, ray
from dp_ray.cluster.internals import train
from types import SimpleNamespace
ray.init(sys.argv[1], log_to_driver=False)
group = object.__new__(train.CleanWorkerGroup)
group._worker_group_context = SimpleNamespace(resources_per_worker={"CPU": 1.0}, placement_strategy="PACK")
group._worker_group_state = SimpleNamespace(workers=[None])
group._further = {}
began = time.monotonic()
print(group.grow(100, {}))
print([one["state"] for one in ray.util.placement_group_table().values() if len(one["bundles"]) == 99])
print(len(group) == 1 and time.monotonic() - began < 5)
"""


class Others:
    """Another driver, which holds all CPUs of the cluster but some, until it is told to free the next of them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _say(self, what: str) -> int:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def free(self) -> None:
        self._say("free")

    def groups(self) -> int:
        """Return how many placement groups others have."""
        return self._say("")


Hold = Callable[..., AbstractContextManager[Others]]


@pytest.fixture
def others(cluster: Cluster) -> Hold:
    @contextmanager
    def hold(left: int, *frees: int) -> Iterator[Others]:
        line = [sys.executable, "-c", HOLDS, cluster.address, *map(str, (left, *frees))]
        # A Ray that was started before this machine had any token demands none, and refuses who shows one later.
        environment = {**os.environ, AUTH_MODE: "token" if wants_token(cluster.address) else "disabled"}
        pipe = subprocess.PIPE
        with subprocess.Popen(line, stdin=pipe, stdout=pipe, env=environment, text=True) as process:
            assert process.stdout and process.stdout.readline() == "holds\n"
            try:
                yield Others(process)
            finally:
                process.kill()

    return hold


class Builds(SlowUntil):
    """Notes the process of each worker that builds it; of a pair in `deadly`, the first one kills the second.

    They are counted from 0. The one of the number `late` takes very long.
    """

    def __init__(self, path: str, deadly: Sequence[tuple[int, int]] = (), late: int | None = None) -> None:
        super().__init__(path)
        if GROUP not in os.environ:
            return
        pids = self.path.with_name("pids")
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        known = [int(pid) for pid in pids.read_text().split()]
        at = known.index(os.getpid())
        killed = next((other for rank, other in deadly if rank == at), None)
        if killed is not None:
            os.kill(known[killed], signal.SIGKILL)
        if known.index(os.getpid()) == late:
            time.sleep(2 * SECONDS)


def by_loop(run: dp_ray.Loop) -> None:
    update = run.optimizer(torch.optim.AdamW(run.model.parameters(), lr=0.01))

    def loss(batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return cross_entropy(run.model(inputs), targets, reduction="none")

    for step in run.steps():
        step.backward(loss, run.model)
        update.step()


class Watched:
    """A run in this folder, as its files tell of it while it runs, and what ends it."""

    def __init__(
        self, folder: Path, deadly: Sequence[tuple[int, int]] = (), late: int | None = None, **keys: Any
    ) -> None:
        self.go, self.story, self._pids = folder / "go", folder / "run" / "story.json", folder / "pids"
        args = {"path": str(self.go), "deadly": [list(pair) for pair in deadly], "late": late}
        self.keys: dict[str, Any] = {
            **SLOW,
            "dataset": {"target": "tests.driver.test_growth:Builds", "args": args},
            "workers": {"min": 1, "max": 3},
            "epochs": 25,
            "checkpoint": {"every_steps": 100},
            "quiet": False,
            **keys,
        }
        for key in ("loss", "optimizer") if "loop" in keys else ():
            del self.keys[key]

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in self._pids.read_text().split()] if self._pids.exists() else []

    def come_to(self, *world_sizes: int) -> None:
        def is_there() -> bool:
            return self.story.exists() and json.loads(self.story.read_text())["world_sizes"] == [*world_sizes]

        assert within(SECONDS, lambda: self.go.exists() or is_there())

    @contextmanager
    def meanwhile(self, act: Callable[[], None]) -> Iterator[None]:
        """Act while the block runs the job, which may end then."""
        wrong: list[BaseException] = []

        def acting() -> None:
            try:
                act()
            except BaseException as error:
                wrong.append(error)
            finally:
                self.go.touch()

        thread = threading.Thread(target=acting)
        thread.start()
        try:
            yield
        finally:
            self.go.touch()
            thread.join()
        assert not wrong, wrong


def assert_as_alone(result: dp_ray.Result, run: Run, keys: dict[str, Any]) -> None:
    alone = run(None, **{**keys, "workers": 0, "quiet": True}, name="alone")
    assert result.weights_sha256 == alone.weights_sha256
    assert told(result) == told(alone)


@pytest.mark.ray
def test_a_job_grows_twice_and_loses_a_worker_that_came_later(
    run: Run, tmp_path: Path, others: Hold, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Watched(tmp_path)
    with others(1, 1, 1) as hold:
        before = hold.groups()

        def act() -> None:
            job.come_to(1)
            hold.free()
            job.come_to(1, 2)
            hold.free()
            job.come_to(1, 2, 3)
            os.kill(job.pids[1], signal.SIGKILL)
            job.come_to(1, 2, 3, 2, 3)
            assert hold.groups() == before + 3

        with job.meanwhile(act):
            result = run(None, **job.keys)
        assert within(30, lambda: hold.groups() == before), "a placement group stays"
    assert result.world_sizes == [1, 2, 3, 2, 3]
    assert [(one["kind"], one["level"], one["ranks"]) for one in result.interruptions] == [("worker", "memory", [1])]
    assert len(job.pids) == 4, "those that were there have stayed"
    said = capfd.readouterr().err
    assert "there is room for 2 workers: 1 more joins" in said and "there is room for 3 workers: 1 more joins" in said
    assert_as_alone(result, run, job.keys)


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize("lost", [0, 1])
def test_who_was_there_is_killed_as_another_one_comes(run: Run, tmp_path: Path, others: Hold, lost: int) -> None:
    """Within its start, of which the others know nothing yet."""
    job = Watched(tmp_path, [(2, lost)])
    with others(2, 1) as hold:
        before = hold.groups()

        def act() -> None:
            job.come_to(2)
            hold.free()
            assert within(SECONDS, lambda: len(job.pids) == 4 or job.go.exists())
            assert within(SECONDS, lambda: json.loads(job.story.read_text())["world_sizes"][-1] == 3)

        with job.meanwhile(act):
            result = run(None, **job.keys)
        assert within(30, lambda: hold.groups() == before)
    assert [(one["kind"], one["level"]) for one in result.interruptions] == [("worker", "memory")]
    assert result.world_sizes[0] == 2 and result.world_sizes[-1] == 3 and len(job.pids) == 4
    assert_as_alone(result, run, job.keys)


@pytest.mark.full
@pytest.mark.ray
def test_a_job_ends_while_another_worker_comes(run: Run, tmp_path: Path, others: Hold) -> None:
    """Also one that takes so long that it has to be ended."""
    job = Watched(tmp_path, late=1)
    with others(1, 2) as hold:
        before = hold.groups()

        def act() -> None:
            job.come_to(1)
            hold.free()
            assert within(SECONDS, lambda: len(job.pids) == 3)
            assert hold.groups() == before + 2

        with job.meanwhile(act):
            result = run(None, **job.keys)
        assert within(30, lambda: hold.groups() == before), "a placement group stays"
    assert result.world_sizes in ([1], [1, 2]) and result.interruptions == []
    assert within(SECONDS, lambda: not any(psutil.pid_exists(pid) for pid in job.pids)), "a worker stays"
    assert_as_alone(result, run, job.keys)


@pytest.mark.ray
def test_a_placement_group_that_has_no_room_after_all_is_given_back(cluster: Cluster) -> None:
    mode = "token" if wants_token(cluster.address) else "disabled"
    lines = [sys.executable, "-c", NO_ROOM, cluster.address]
    done = subprocess.run(lines, env={**os.environ, AUTH_MODE: mode}, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "None\n['REMOVED']\nTrue\n", done.stderr


@pytest.mark.full
@pytest.mark.ray
def test_further_workers_that_die_as_they_begin_are_no_more_started(
    run: Run, tmp_path: Path, others: Hold, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Watched(tmp_path, [(at, at) for at in range(1, 9)])
    with others(1, 2) as hold:

        def act() -> None:
            job.come_to(1)
            hold.free()
            assert within(SECONDS, lambda: "no other worker is started" in "".join(said))

        said: list[str] = []
        with job.meanwhile(act), repeated("said", 0.5, lambda: said.append(capfd.readouterr().err)):
            result = run(None, **job.keys)
    assert result.world_sizes == [1] and result.interruptions == []
    assert_as_alone(result, run, job.keys)


@pytest.mark.full
@pytest.mark.ray
def test_a_further_worker_that_dies_while_it_starts_is_started_again(
    run: Run, tmp_path: Path, others: Hold, cluster: Cluster
) -> None:
    """Before it has any code of the job: its placement group is given back, and there is another one."""
    job = Watched(tmp_path, workers={"min": 1, "max": 2})
    with others(1, 1) as hold:
        before = hold.groups()

        def processes() -> set[int]:
            found = psutil.process_iter(["cmdline", "environ", "pid"])
            ours_here = [one.info for one in found if ours() in (one.info["environ"] or {})]
            return {one["pid"] for one in ours_here if WORKER_PROCESS in " ".join(one["cmdline"] or [])}

        def act() -> None:
            job.come_to(1)
            there = processes()
            hold.free()
            assert within(SECONDS, lambda: bool(processes() - there))
            os.kill((processes() - there).pop(), signal.SIGKILL)
            job.come_to(1, 2)
            assert hold.groups() == before + 2

        with job.meanwhile(act):
            result = run(None, **job.keys)
        assert within(30, lambda: hold.groups() == before)
    assert len(job.pids) == 2 and result.interruptions == []
    assert_as_alone(result, run, job.keys)


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "fsdp", "checkpoint": {"every_steps": 4}},
        {"loop": "tests.driver.test_growth:by_loop"},
    ],
)
def test_what_reads_checkpoints_grows_from_one(run: Run, tmp_path: Path, others: Hold, keys: dict[str, Any]) -> None:
    job = Watched(tmp_path, **keys)
    with others(1, 2) as hold:

        def act() -> None:
            job.come_to(1)
            hold.free()
            job.come_to(1, 3)

        with job.meanwhile(act):
            result = run(None, **job.keys)
    assert result.world_sizes == [1, 3] and result.interruptions == []
    assert len(job.pids) == 3, "who was there has stayed"
    assert_as_alone(result, run, job.keys)


@pytest.mark.full
@pytest.mark.ray
def test_a_session_grows_while_it_is_idle_and_its_next_job_has_all_workers(
    cluster: Cluster, tmp_path: Path, others: Hold
) -> None:
    """Also one whose workers could not take others in."""
    elastic = {"min": 1, "max": 3}
    keys: dict[str, Any] = {**SLOW, "storage": str(tmp_path), "quiet": True, "workers": elastic}
    with others(1, 2) as hold:
        before = hold.groups()
        with dp_ray.session(address=cluster.address, workers=elastic) as session:
            first = session.run(None, **keys, name="first")
            hold.free()
            assert within(SECONDS, lambda: hold.groups() == before + 2)
            # They start meanwhile.
            names = map("probe-{}".format, itertools.count())
            assert within(SECONDS, lambda: session.run(None, **keys, name=next(names)).world_sizes == [3])
            rest = [session.run(None, **keys, name=how, on_lost_worker=how) for how in ("restart", "go_on")]
        assert within(30, lambda: hold.groups() == before)
    assert [one.world_sizes for one in (first, *rest)] == [[1], [3], [3]]
    assert {one.weights_sha256 for one in rest} == {first.weights_sha256}
