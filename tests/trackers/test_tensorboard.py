"""What TensorBoard gets: one event a step, repeated steps replaced, nothing that keeps the driver waiting."""

import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from dp_ray.storage import Storage
from dp_ray.trackers import tensorboard
from dp_ray.trackers.tensorboard import TENSORBOARD, TensorBoardWriter


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "loss": step / 2, "rows": 8, "eval_loss": None, **values}


def events(run: Path) -> list[list[Any]]:
    """The events of each file, in the order of their making."""
    files = sorted((run / TENSORBOARD).iterdir(), key=lambda path: int(path.suffix[1:]))
    return [list(_events(path.read_bytes())) for path in files]


def _events(data: bytes) -> Any:
    while data:  # a record: its length, a checksum, an event, a checksum
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def told(event: Any) -> tuple[int, dict[str, float]]:
    return event.step, {value.tag: value.simple_value for value in event.summary.value}


def test_a_step_is_one_event_with_all_of_its_values(tmp_path: Path) -> None:
    before = threading.active_count()
    writer = TensorBoardWriter(Storage(str(tmp_path)))
    writer.add([row(3), row(4, **{"the right": 1, "nan": float("nan")})])
    assert threading.active_count() == before, "a thread would take time from the driver's others"
    writer.close()
    ((version, start, first, second),) = events(tmp_path)
    assert version.file_version.startswith("brain.Event:")
    assert (start.step, start.session_log.status) == (3, SessionLog.START), "replaces what an earlier driver wrote"
    assert told(first) == (3, {"loss": 1.5})
    assert told(second)[1].keys() == {"loss", "the_right", "nan"}
    assert abs(second.wall_time - first.wall_time) < 1


def test_a_repeated_step_replaces_the_ones_from_it_on(tmp_path: Path) -> None:
    writer = TensorBoardWriter(Storage(str(tmp_path)))
    writer.add([row(0), row(1), row(2)])
    writer.add([row(1), row(2)])
    writer.close()
    _, (_, start, *again) = events(tmp_path)
    assert (start.step, start.session_log.status) == (1, SessionLog.START)
    assert [event.step for event in again] == [1, 2]


def test_what_is_written_is_there_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "FLUSH_SECONDS", 0.0)
    writer = TensorBoardWriter(Storage(str(tmp_path)))
    writer.add([row(0)])
    assert [event.step for event in events(tmp_path)[0][2:]] == [0]
    writer.close()


def test_a_full_disk_ends_only_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    writer = TensorBoardWriter(Storage(str(tmp_path)))
    writer.add([row(0)])
    monkeypatch.setattr(EventsWriter, "write_event", fails)
    writer.add([row(1)])
    writer.add([row(2)])
    writer.close()
    assert [event.step for event in events(tmp_path)[0][2:]] == [0]
