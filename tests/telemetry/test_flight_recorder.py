"""torch's flight recorder: where each rank stands in its collectives, and who writes it where."""

import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import ray
import torch
import torch.distributed as dist

from dp_ray.cluster import heartbeat, worker
from dp_ray.cluster.channel import WorkerConfig
from dp_ray.engine.clock import DevicePlace, Part, StepClock
from dp_ray.engine.world import World, everyone
from dp_ray.messages import Beat, Collective, Interrupted, Note, Started, StepControl, WorkerReady
from dp_ray.monitor.watchdog import collectives_behind
from dp_ray.rundir.claim import RunDir
from dp_ray.rundir.incidents import IncidentKind
from dp_ray.storage import Storage
from dp_ray.system.threads import note_call
from dp_ray.tasks.setup import Context
from dp_ray.telemetry.flight_recorder import current_collectives, recorded_collectives
from tests.support.builders import monitor_of
from tests.support.group import run_group
from tests.support.trainings import job_of


def entry(number: int, state: str, retired: bool = False, **keys: Any) -> dict[str, Any]:
    """What torch records of a collective, as far as it is read."""
    kept = {
        "profiling_name": "nccl:all_reduce",
        "process_group": ["dp_ray-1", "all"],
        "input_sizes": [[1024, 3]],
    }
    return {**kept, "collective_seq_id": number, "state": state, "retired": retired, "is_p2p": False, **keys}


def stands(*entries: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(collective.group, collective.number, collective.state) for collective in current_collectives(entries)]


def test_a_group_stands_at_its_oldest_collective_that_is_not_over() -> None:
    done = [entry(number, "completed", True) for number in (1, 2)]
    assert stands() == []
    assert stands(*done) == [("nccl dp_ray-1 all", 2, "over")]
    ahead = entry(3, "started"), entry(4, "scheduled"), entry(5, "scheduled")
    assert stands(*done, *ahead) == [("nccl dp_ray-1 all", 3, "started")]
    timed_out = entry(3, "started", retired=True)  # as NCCL leaves one that has timed out
    assert stands(*done, timed_out) == [("nccl dp_ray-1 all", 3, "started")]
    (collective,) = current_collectives([*done, entry(3, "scheduled", input_sizes=[[4], [2, 2]])])
    assert collective == Collective("nccl dp_ray-1 all", 3, "all_reduce", "[4] [2, 2]", "scheduled")
    assert str(collective) == "all_reduce 3 of [4] [2, 2], scheduled"


def test_gloo_only_retires_what_is_over() -> None:
    name: dict[str, Any] = {"profiling_name": "gloo:barrier", "process_group": ["1", "undefined"]}
    recorded = entry(1, "scheduled", True, **name), entry(2, "scheduled", False, **name)
    assert stands(recorded[0]) == [("gloo 1 undefined", 1, "over")]
    assert stands(*recorded) == [("gloo 1 undefined", 2, "scheduled")]


def test_each_group_stands_alone_and_messages_of_two_ranks_do_not_count() -> None:
    other: dict[str, Any] = {"process_group": ["1", "undefined"]}
    recorded = [entry(1, "completed"), entry(1, "started", **other), entry(9, "started", is_p2p=True)]
    assert stands(*recorded) == [("nccl dp_ray-1 all", 1, "over"), ("nccl 1 undefined", 1, "started")]


def test_a_job_of_a_session_begins_to_count_anew() -> None:
    left = entry(7, "scheduled")  # by the job before, in the same process
    assert stands(left, entry(1, "completed"), entry(2, "started")) == [("nccl dp_ray-1 all", 2, "started")]


class StaysAway(StepControl):
    """Instead of a task: rank 1 comes to a sum only after both have read their recorders."""

    @staticmethod
    def task(context: Context) -> None:
        run, rank = context.run, context.world.rank
        dist.all_reduce(torch.ones(5), group=everyone())
        work = dist.all_reduce(torch.ones(2, 4), group=everyone(), async_op=True) if rank == 0 else None
        end = time.monotonic() + 60
        text, found = recorded_collectives()
        # gloo wakes who waits for a collective a moment before it notes that this is over.
        while found[0].sizes != "[2, 4]" and (rank == 0 or found[0].state != "over") and time.monotonic() < end:
            text, found = recorded_collectives()
        run.write_text(f"told-{rank}", json.dumps([json.loads(text), found]))
        while not run.exists("told-0") and time.monotonic() < end:
            time.sleep(0.05)
        if work is None:
            dist.all_reduce(torch.ones(2, 4), group=everyone())
        else:
            work.wait()


def test_the_recorder_of_gloo_tells_who_has_not_come_to_a_collective(tmp_path: Path) -> None:
    run_group(job_of("mlp", workers=2), tmp_path, StaysAway())
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
    (waits,), (is_away,) = ([Collective(*values) for values in found] for _, found in told)
    assert waits == Collective("gloo dp_ray-1 all", is_away.number + 1, "all_reduce", "[2, 4]", "scheduled")
    assert (is_away.sizes, is_away.state) == ("[5]", "over")
    assert collectives_behind({0: waits, 1: is_away}) == (1,)
    ((dump,), _) = told[0]
    assert dump["entries"][-1]["profiling_name"] == "gloo:all_reduce"


NEW = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "FILE"}
OLD = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "FILE"}


@pytest.mark.parametrize(
    ("backend", "version", "user", "names"),
    [
        ("gloo", "2.13.0", (), set()),
        ("nccl", "2.13.0", (), set(NEW)),
        ("cpu:gloo,cuda:nccl", "2.12.1+cu130", (), set(NEW)),
        ("nccl", "2.11.0+cu128", (), set(OLD)),
        ("nccl", "2.13.0", ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"), {"TORCH_FR_DUMP_TEMP_FILE"}),
        ("nccl", "2.11.0", ("TORCH_NCCL_TRACE_BUFFER_SIZE",), set(OLD) - {"TORCH_NCCL_TRACE_BUFFER_SIZE"}),
        ("nccl", "2.13.0", ("TORCH_NCCL_TRACE_BUFFER_SIZE",), set(NEW) - {"TORCH_FR_BUFFER_SIZE"}),
        ("nccl", "2.13.0", ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",), set(NEW) - {"TORCH_FR_DUMP_TEMP_FILE"}),
    ],
)
def test_nccl_writes_its_recorder_where_the_user_has_not_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: str,
    version: str,
    user: tuple[str, ...],
    names: set[str],
) -> None:
    for name in {*NEW, *OLD, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}:
        monkeypatch.delenv(name, raising=False)
    for name in user:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    found = worker.recorder_variables(backend, Storage(str(tmp_path)), "a-1")
    file = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/a-1-nccl-rank-"}
    assert found == {name: {**NEW, **OLD, **file}[name] for name in names}


def test_nccl_writes_to_no_object_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Storage(str(tmp_path))
    monkeypatch.setattr(folder, "fs", pafs.SubTreeFileSystem("/", folder.fs))  # any other than that of the machine
    assert "TORCH_FR_DUMP_TEMP_FILE" not in worker.recorder_variables("nccl", folder, "a-1")


class Channel:
    """Takes what a worker sends; a call is its own answer."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.put = self

    def remote(self, message: bytes, _: int, name: str) -> str:
        self.sent.append(pickle.loads(message))
        return ""


class Gpu(StepClock):
    """A clock whose GPU is in the exchange."""

    def place(self) -> DevicePlace:
        return DevicePlace(6, Part.EXCHANGE)


SUM = Collective("gloo dp_ray-1 all", 41, "all_reduce", "[4]", "scheduled")


class Worker:
    """A worker's heartbeat at a time of its own; each beat is taken by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, limit: float | None) -> None:
        self.now, self.records = 1000.0, 0
        self.channel = Channel()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ray, "get", lambda answer: answer)
        monkeypatch.setattr(heartbeat, "recorded_collectives", self.record)
        config = WorkerConfig(self.channel, False)
        self.heartbeat = heartbeat.Heartbeat(config, "a-1", World(1, 2), Storage(str(folder)), limit)
        self.heartbeat.runs_on(Gpu())

    def record(self) -> tuple[str, tuple[Collective, ...]]:
        self.records += 1
        return f"[{self.records}]", (SUM,)

    def beat(self, seconds: float = 0.0) -> Beat:
        self.now += seconds
        beat = self.heartbeat._state()
        for thread in threading.enumerate():
            if thread.name == "flight recorder":
                thread.join()
        return beat


def test_each_beat_names_the_last_call_of_a_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = Worker(monkeypatch, tmp_path, 100.0)
    note_call(3, "step 1, pass 0")
    try:
        assert worker.beat(1.0).call == (3, "step 1, pass 0")
    finally:
        note_call(0, "")
    assert worker.beat(1.0).call == (0, "")


def test_a_late_worker_writes_its_recorder_once_a_step_and_tells_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = Worker(monkeypatch, tmp_path, 100.0)
    file = tmp_path / "flight_recorder" / "a-1-rank-1.json"
    assert late.beat(500.0) == Beat("a-1", 1, None, 500.0, ""), "before its first step nobody is late"
    late.heartbeat.before(7)
    assert late.beat(100.0) == Beat("a-1", 1, 7, 100.0, "")
    assert not file.exists()
    first, second = late.beat(1.0), late.beat(1.0)
    assert (first.device, second.device) == (DevicePlace(6, Part.EXCHANGE),) * 2
    assert second.collectives == (SUM,), "of the first beat they may be told already: it waits for no storage"
    assert "test_a_late_worker" in first.stack
    assert (late.records, file.read_text()) == (1, "[1]")
    late.heartbeat.before(8)
    assert late.beat(1.0) == Beat("a-1", 1, 8, 1.0, ""), "the next step has told nothing yet"
    late.beat(100.0)
    assert (late.records, file.read_text()) == (2, "[2]")
    late.heartbeat.through()
    beat = late.beat(1e6)
    assert (beat.step, beat.stack, beat.device, beat.collectives) == (None, "", None, ())


def test_without_a_limit_the_recorder_is_written_after_half_an_hour(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = Worker(monkeypatch, tmp_path, None)
    late.heartbeat.before(7)
    late.beat(1800.0)
    assert late.records == 0
    late.beat(1.0)
    beat = late.beat(1.0)
    assert (late.records, beat.stack, beat.collectives) == (1, "", (SUM,)), "it counts as no hang"


def test_a_recorder_that_cannot_be_kept_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flight_recorder").write_text("a file in the folder's place")
    late = Worker(monkeypatch, tmp_path, 100.0)
    late.heartbeat.before(7)
    late.beat(101.0)
    assert late.beat(1.0).collectives == (SUM,)
    (note,) = (message for message in late.channel.sent if isinstance(message, Note))
    assert note.text.startswith("rank 1 on localhost: its flight recorder cannot be kept: StorageError: ")


def test_a_worker_that_records_nothing_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    late = Worker(monkeypatch, tmp_path, 100.0)
    monkeypatch.setattr(heartbeat, "recorded_collectives", lambda: ("", ()))
    late.heartbeat.before(7)
    late.beat(101.0)
    assert late.beat(1.0).collectives == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("died", "records", "blamed"),
    [
        ((0, 1), [1], (0,)),  # rank 0 was killed; NCCL ended rank 1, which had lost its peer
        ((0, 1, 2), [0, 2], (1,)),
        ((0, 1), [0, 1], (0, 1)),  # both waited too long for nobody that died
        ((0, 1), [], (0, 1)),
        ((1,), [], (1,)),
    ],
)
def test_a_survivor_that_nccl_ended_is_not_blamed(
    tmp_path: Path, died: tuple[int, ...], records: list[int], blamed: tuple[int, ...]
) -> None:
    monitor = monitor_of(job={"workers": 3}, run=RunDir(Storage(str(tmp_path)), "", False))
    for rank in range(3):
        monitor.take(WorkerReady("a", World(rank, 3, node=f"10.0.0.{rank}"), 100 + rank, ()))
    (tmp_path / "flight_recorder").mkdir()
    for rank in records:
        (tmp_path / "flight_recorder" / f"a-nccl-rank-{rank}").write_bytes(b"")
        (tmp_path / "flight_recorder" / f"before-nccl-rank-{1 - rank % 2}").write_bytes(b"")  # of an earlier attempt
    monitor.take(Interrupted(IncidentKind.WORKER, "its process was killed, or crashed", died))
    (told,) = monitor.incidents.log.interruptions
    assert told.ranks == blamed
    assert told.nodes == tuple(f"10.0.0.{rank}" for rank in blamed)
    assert ("NCCL then ended rank" in told.what) == (blamed != died)


def test_what_late_workers_told_stands_in_the_incident_that_somebody_else_makes() -> None:
    """No step is too long here: the user, or NCCL's own watchdog, ends a process."""
    workers = [WorkerReady("a", World(rank, 2), 1, ()) for rank in range(2)]
    over = SUM._replace(number=40, state="over")
    beats = [Beat("a", rank, 7, 1900.0, "", collectives=(collective,)) for rank, collective in enumerate([SUM, over])]
    lost = Interrupted(IncidentKind.WORKER, "its process was killed, or crashed", (0,))
    monitor = monitor_of(*workers, *beats, lost, job={"timeouts": {"step": None}}, quiet=True)
    (interruption,) = monitor.incidents.log.interruptions
    assert interruption.kind is IncidentKind.WORKER
    assert interruption.what == (
        "its process was killed, or crashed; in the collectives of gloo dp_ray-1 all rank 1 is behind: "
        "rank 0: all_reduce 41 of [4], scheduled, rank 1: all_reduce 40 of [4], over (more in flight_recorder/)"
    )
    monitor.take(Started("a", 0, 7))
    monitor.take(lost)
    assert monitor.incidents.log.interruptions[-1].what == "its process was killed, or crashed", "told once"
