"""Each JSON file and each growing table of a run: its form, what is made of a bad one, kills while it is written."""

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dp_ray
from dp_ray.engine.clock import PARTS
from dp_ray.engine.loads.bad_samples import Reference
from dp_ray.engine.world import World
from dp_ray.errors import StorageError
from dp_ray.messages import Sizes, TimedSteps
from dp_ray.outputs.files import FILE_JSON, MANIFEST_JSON, FileRecord
from dp_ray.outputs.previews import PREVIEWS_JSON, Preview
from dp_ray.places.kuberay import LAST_END_JSON, LastEnd
from dp_ray.records import FAIL, IGNORE, Record
from dp_ray.rundir import history
from dp_ray.rundir.content import CONTENT_JSON, FETCHED_JSON, Content, Entry, Fetched
from dp_ray.rundir.files import ABOUT_JSON, RESULT_JSON, RUN_JSON, SWEEP_JSON, About, Sweep, SweepTrial
from dp_ray.rundir.incidents import INCIDENTS_JSON, IncidentKind, IncidentLog, Interruption
from dp_ray.rundir.lease import LEASE_JSON, REQUEST_JSON, Lease, StopRequest
from dp_ray.rundir.ledger import LEDGER_JSON, Ledger
from dp_ray.rundir.listing import PROGRESS_JSON
from dp_ray.rundir.numerics import Computed, Kind
from dp_ray.rundir.quarantine import RECORDS_JSON
from dp_ray.rundir.start import PIN_JSON, Start
from dp_ray.rundir.weights import INDEX_JSON, WeightsIndex
from dp_ray.storage import Storage
from dp_ray.system.process import Process
from dp_ray.tables import PartTable, read_table, write_table
from dp_ray.tasks.audits import AUDITS_JSON, Noted
from dp_ray.tasks.preflight import FACTS_JSON
from dp_ray.tasks.setup import PINS_JSON, REFERENCE_JSON
from dp_ray.telemetry import reports
from dp_ray.telemetry.shapes import shape_table
from dp_ray.telemetry.times import read_step_times, step_time_parts, times_table
from dp_ray.trackers.feed import TRACKED_JSON, TrackedRun


class Case(NamedTuple):
    """A record, a value, and the text that every version has written for it; `other` is another value."""

    record: Record[Any]
    value: Any
    text: str
    other: Any

    @property
    def name(self) -> str:
        return self.record.name or "some.json"


LOST = Interruption(IncidentKind.WORKER, "killed", 3, (1,), ("10.0.0.1",), 2, 0.5)
TRIAL = SweepTrial(1, {"lr": 0.1}, "s-1", "done", 0.5, {"loss": 0.5, "other": None}, "", {"lr": 0})
CASES = {
    "run.json": Case(
        RUN_JSON,
        {"token": "t", "rows": {"dataset": 3}},
        '{\n  "token": "t",\n  "rows": {\n    "dataset": 3\n  }\n}\n',
        {},
    ),
    "result.json": Case(
        RESULT_JSON,
        {"status": "failed", "error": "s3://KEY:SECRET@bucket"},
        '{\n  "status": "failed",\n  "error": "s3://bucket"\n}\n',
        {"status": "done"},
    ),
    "about.json": Case(
        ABOUT_JSON,
        About([{"cpus": 2}], [Computed("2026-11-26T00:00:00+00:00", 4, [Kind([0, 1], ["a"], {"torch": "2"}, {})])]),
        '{\n  "drivers": [\n    {\n      "cpus": 2\n    }\n  ],\n  "attempts": [\n    {\n'
        '      "started": "2026-11-26T00:00:00+00:00",\n      "step": 4,\n      "kinds": [\n        {\n'
        '          "ranks": [\n            0,\n            1\n          ],\n          "nodes": [\n'
        '            "a"\n          ],\n          "computes": {\n            "torch": "2"\n          },\n'
        '          "beside": {}\n        }\n      ]\n    }\n  ]\n}\n',
        About(),
    ),
    "sweep.json": Case(
        SWEEP_JSON,
        Sweep("t", {"over": {}}, [TRIAL]),
        '{\n  "token": "t",\n  "definition": {\n    "over": {}\n  },\n  "trials": [\n    {\n      "number": 1,\n'
        '      "values": {\n        "lr": 0.1\n      },\n      "run": "s-1",\n      "state": "done",\n'
        '      "metric": 0.5,\n      "metrics": {\n        "loss": 0.5,\n        "other": null\n      },\n'
        '      "error": "",\n      "picked": {\n        "lr": 0\n      }\n    }\n  ]\n}\n',
        Sweep("u", {}, []),
    ),
    "story.json": Case(
        INCIDENTS_JSON,
        IncidentLog((2, 1), (LOST,)),
        '{\n  "world_sizes": [\n    2,\n    1\n  ],\n  "interruptions": [\n    {\n      "kind": "worker",\n'
        '      "what": "killed",\n      "step": 3,\n      "ranks": [\n        1\n      ],\n      "nodes": [\n'
        '        "10.0.0.1"\n      ],\n      "resumed_step": 2,\n      "seconds": 0.5,\n'
        '      "level": "restart",\n      "why": ""\n    }\n  ]\n}\n',
        IncidentLog((4,)),
    ),
    "lease.json": Case(
        LEASE_JSON,
        Lease(Process("h", "m", 1, "2"), "t", 3, 4),
        '{"driver": {"host": "h", "machine": "m", "pid": 1, "started": "2"}, "token": "t", "renewals": 3, '
        '"step": 4}\n',
        Lease(Process("h", "m", 1, "2"), "t"),
    ),
    "stop.json": Case(
        REQUEST_JSON,
        StopRequest("t", "p"),
        '{"token": "t", "by": "p", "again": false}\n',
        StopRequest("u", "p", again=True),
    ),
    "attempt.json": Case(
        LEDGER_JSON, Ledger("a", ["p.arrow"]), '{"attempt": "a", "parts": ["p.arrow"]}\n', Ledger("b", [])
    ),
    "init_from.json": Case(
        PIN_JSON,
        Start("checkpoints", "step-2.safetensors", "5f"),
        '{\n  "folder": "checkpoints",\n  "name": "step-2.safetensors",\n  "sha256": "5f",\n  "is_strict": true\n}\n',
        Start("", "weights.safetensors", "5e", False),
    ),
    "the index of weights": Case(
        INDEX_JSON,
        WeightsIndex(metadata={"total_size": 4}, weight_map={"a": "f"}),
        '{\n  "metadata": {\n    "total_size": 4\n  },\n  "weight_map": {\n    "a": "f"\n  }\n}\n',
        WeightsIndex(weight_map={}),
    ),
    "a listing of files": Case(
        CONTENT_JSON,
        Content({"r/run.json": Entry(3, 5, "5f")}, ["r"]),
        '{"files": {"r/run.json": {"size": 3, "modified": 5, "sha256": "5f"}}, "running": ["r"]}\n',
        Content({}),
    ),
    "fetched.json": Case(
        FETCHED_JSON,
        Fetched("s3://bucket/runs", None, {"run.json": Entry(3, 5)}, ["page"]),
        '{"place": "s3://bucket/runs", "address": null, "files": {"run.json": {"size": 3, "modified": 5, '
        '"sha256": ""}}, "lacks": ["page"]}\n',
        Fetched("/runs", "http://head:8265", {}),
    ),
    "kuberay.json": Case(LAST_END_JSON, LastEnd("m", 75), '{"manifest": "m", "exit_status": 75}\n', LastEnd("n", 0)),
    "facts.json": Case(
        FACTS_JSON,
        {"training 5f": {"rows": {"0": True}, "flops": None}},
        '{"training 5f": {"rows": {"0": true}, "flops": null}}\n',
        {},
    ),
    "progress.json": Case(PROGRESS_JSON, {"step": 3, "at": 1.5}, '{"step": 3, "at": 1.5}\n', {}),
    "the files of a dataset": Case(PINS_JSON, {"a.csv": None}, '{\n  "a.csv": null\n}\n', {"a.csv": "3 bytes"}),
    "the reference sample": Case(
        REFERENCE_JSON,
        Reference(3, {"api_key": "tensor [3]"}),
        '{\n  "sample": 3,\n  "form": {\n    "api_key": "tensor [3]"\n  }\n}\n',
        Reference(4, None),
    ),
    "a file of outputs": Case(
        FILE_JSON,
        FileRecord("0.parquet", 2, 0, 2, 9, "5f", ("aa", "bb")),
        '{"name": "0.parquet", "rows": 2, "first": 0, "end": 2, "bytes": 9, "sha256": "5f", "steps": ["aa", "bb"], '
        '"layout": ""}\n',
        FileRecord("1.parquet", 0, 2, 2, 0, "", ()),
    ),
    "the manifest of outputs": Case(MANIFEST_JSON, {"rows": 2}, '{\n  "rows": 2\n}\n', {"rows": 3}),
    "samples set aside": Case(
        RECORDS_JSON, [{"sample_index": 3, "type": "E"}], '[{"sample_index": 3, "type": "E"}]', [{"sample_index": 4}]
    ),
    "previews": Case(
        PREVIEWS_JSON, [Preview(3, text="1")], '[{"sample_index": 3, "png": "", "text": "1"}]', [Preview(4)]
    ),
    "what audits know": Case(
        AUDITS_JSON,
        Noted({"n1, cpu 0": 4}, {}, {"n2, cpu 0": 3}),
        '{\n  "clean": {\n    "n1, cpu 0": 4\n  },\n  "suspects": {},\n  "convicted": {\n'
        '    "n2, cpu 0": 3\n  }\n}\n',
        Noted({"n1, cpu 0": 5}, {"n1, cpu 0": [2]}),
    ),
    "a tracker's memory": Case(
        TRACKED_JSON,
        TrackedRun("r", 3),
        '{"run_id": "r", "next_step": 3, "status": null}\n',
        TrackedRun("r", 4, "done"),
    ),
}
of_each_record = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_each_record_has_a_case() -> None:
    """Records of modules that are only imported with an extra would be missed; there are none."""
    modules = [
        module.name for module in pkgutil.walk_packages(dp_ray.__path__, "dp_ray.") if "__main__" not in module.name
    ]
    inside = [
        value for name in modules if "fork" not in name for value in vars(importlib.import_module(name)).values()
    ]
    records = {id(value): value for value in inside if isinstance(value, Record)}
    assert records.keys() == {id(case.record) for case in CASES.values()}


@of_each_record
def test_the_form_of_each_file_stays(case: Case) -> None:
    assert case.record.text(case.value) == case.text


@of_each_record
def test_each_file_gives_the_value_that_was_written(case: Case, tmp_path: Path) -> None:
    folder = Storage(str(tmp_path))
    for value in (case.other, case.value):
        assert case.record.write(folder, value, case.name)
        assert case.record.parse(case.record.text(value)) == case.record.read(folder, case.name)
    if case is not CASES["result.json"]:  # whose error has a secret
        assert case.record.read(folder, case.name) == case.value


@of_each_record
def test_what_a_later_version_writes_beside_is_left_out(case: Case, tmp_path: Path) -> None:
    folder = Storage(str(tmp_path))
    values = json.loads(case.text)
    if isinstance(values, list) or isinstance(case.value, dict):
        return  # plain JSON: each reader takes the keys that it knows
    folder.write_text(case.name, json.dumps({**values, "of_a_later_version": [1]}))
    assert case.record.read(folder, case.name) == case.value


NO_VALUES = ("", "{", "null", "3", '"x"', "[3]", "[" * 100_000, "\udcff")
OF_SOME = ("{}", "[]", '{"driver": null}')  # values of some records, and damage of the others


def check_damage(case: Case, text: str, folder: Path) -> None:
    record = case.record
    (folder / case.name).write_bytes(text.encode(errors="surrogateescape"))
    if record.damaged is IGNORE:
        assert record.read(Storage(str(folder)), case.name) == record.missing
        return
    with pytest.raises(StorageError, match=f"{case.name}: is damaged: .") as raised:
        record.read(Storage(str(folder)), case.name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", [*NO_VALUES, *OF_SOME])
@of_each_record
def test_a_damaged_file_is_told_or_as_good_as_missing(case: Case, text: str, tmp_path: Path) -> None:
    with suppress(ValueError, RecursionError):
        case.record.parse(text)
        assert text in OF_SOME and isinstance(json.loads(text), type(json.loads(case.text)))
        return
    check_damage(case, text, tmp_path)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if isinstance(json.loads(case.text), dict)])
def test_a_key_of_another_type_is_damage(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if isinstance(case.value, dict) and case.record is not PINS_JSON:
        return  # plain JSON, of which each reader checks the keys that it needs
    values = json.loads(case.text)
    for key in values.keys() - {"form"}:  # of a reference sample, any JSON
        odd: Any = 3 if isinstance(values[key], dict) else {"odd": [None, {}]}
        check_damage(case, json.dumps({**values, key: odd}), tmp_path)


@of_each_record
def test_a_missing_file_has_the_records_value_or_is_an_error(case: Case, tmp_path: Path) -> None:
    record = case.record
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "none", tmp_path / "file"):
        if record.missing is FAIL:
            with pytest.raises(StorageError, match=f"cannot read {case.name}"):
                record.read(Storage(str(place)), case.name)
        else:
            assert record.read(Storage(str(place)), case.name) == record.missing
    if isinstance(record.missing, dict | list):
        record.read(Storage(str(tmp_path)), case.name)
        assert record.read(Storage(str(tmp_path)), case.name) is not record.missing, "each reader has its own"


@of_each_record
def test_a_storage_that_fails_is_an_error_unless_the_file_only_informs(case: Case, tmp_path: Path) -> None:
    record = case.record
    folder = Storage(str(tmp_path))
    record.write(folder, case.value, case.name)
    failing = folder.guarded(lambda: None)
    failing.fs = Failing(folder.fs, 0, partial(OSError, "the storage does not answer"))
    if record.unreachable is FAIL:
        with pytest.raises(StorageError, match="does not answer"):
            record.write(failing, case.other, case.name)
        with pytest.raises(StorageError, match="does not answer"):
            record.read(failing, case.name)
    else:
        assert not record.write(failing, case.other, case.name)
        assert record.read(failing, case.name) == record.missing
    assert (tmp_path / case.name).read_text() == case.text, "the old file stays"


# Kills.


class Killed(BaseException):
    """The process is gone: nothing that it does after this has an effect."""


class Failing:
    """A file system, or a stream of it, that fails after so many calls; a write that fails does half of its work.

    Each error is a new one: it holds the frames, and with them the open files, of what it ended.
    """

    def __init__(
        self, inner: Any, after: int, error: Callable[[], BaseException], calls: list[str] | None = None
    ) -> None:
        self._inner = inner
        self._after = after
        self._error = error
        self.calls: list[str] = [] if calls is None else calls

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if not callable(inner):
            return inner

        def call(*args: Any, **keys: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) > self._after:
                if name == "write" and len(self.calls) == self._after + 1:
                    inner(bytes(args[0])[: len(bytes(args[0])) // 2])
                raise self._error()
            got = inner(*args, **keys)
            return Failing(got, self._after, self._error, self.calls) if "stream" in name else got

        return call

    def __enter__(self) -> "Failing":
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()


class Scene(NamedTuple):
    """What writes files of a run: `before` makes the old state, `act` the new one, `look` reads what there is."""

    before: Callable[[Storage], object]
    act: Callable[[Storage], object]
    look: Callable[[Storage], Any]


def rows(first: int, end: int, loss: float = 1.0) -> pa.Table:
    steps = list(range(first, end))
    return pa.table({"step": steps, "rows": [1] * len(steps), "loss": [loss] * len(steps)})


def steps_of(run: Storage) -> list[int]:
    table = history.history_of(run)
    return [] if table is None else table.column("step").to_pylist()


def grown(run: Storage, first: int, ends: tuple[int, ...]) -> None:
    """A part table that gets rows up to each end, and is written after each; its files are full with four rows."""
    table = PartTable(run.child("grows"), "part-{}.parquet", 4)
    for begin, end in zip((first, *ends), ends, strict=False):
        table.add(rows(begin, end))
        table.write()


def parts_of(run: Storage) -> list[int]:
    folder = run.child("grows")
    return [
        step for name in folder.numbered("part-{}.parquet") for step in read_table(folder, name)["step"].to_pylist()
    ]


def timed(run: Storage, attempt: int, first: int, end: int) -> None:
    seconds = np.zeros((end - first, len(PARTS)), np.float32)
    steps = TimedSteps(np.arange(first, end), np.full(end - first, 4, np.int32), seconds)
    parts = step_time_parts(run)
    parts.add(times_table(attempt, World(), steps))
    parts.write()


def times_of(run: Storage) -> list[tuple[int, int]]:
    table = read_step_times(run)
    return list(zip(table["step"].to_pylist(), table["attempt"].to_pylist(), strict=True))


def reported(run: Storage, first: int, end: int) -> None:
    """Shape reports that come step by step, and are kept after each; a second worker is one step behind."""
    parts = PartTable(run.child(reports.REPORTS), reports.PIECE, 4)
    for step in range(first, end):
        for rank in range(2):
            if step - rank >= first:
                parts.add(shape_table(World(rank, 2), [(step - rank, rank, Sizes("[5]", "[5]", 5), 1.0)]))
        parts.write()


def merged(run: Storage, first: int, end: int) -> None:
    """The same, put in order at the end of a run."""
    reported(run, first, end)
    reports.merge_reports(run, 99)


def reports_of(run: Storage) -> list[int]:
    steps: set[int] = set()
    for folder, name in reports.report_files(run):
        steps |= {*read_table(folder, name)["step"].to_pylist()}
    return sorted(steps)


def pieces(run: Storage, *ends: int) -> None:
    folder = run.child(history.HISTORY)
    folder.create()
    for first, end in pairwise(ends):
        write_table(folder, history.SEGMENT.format(first, end), rows(first, end))


def pieces_and_recent(run: Storage) -> None:
    pieces(run, 0, 2)
    recent(run, 0, 4)


def finished(run: Storage) -> None:
    write_table(run, history.METRICS, rows(0, 6))
    RESULT_JSON.write(run, {"status": "done"})


def recent(run: Storage, first: int, end: int) -> None:
    writer = history.RecentHistory(run)
    writer.add(rows(first, end).to_pylist())
    writer.save()


SCENES = {
    "a piece of the history": Scene(lambda run: pieces(run, 0, 2), lambda run: pieces(run, 2, 4), steps_of),
    "the recent rows": Scene(pieces_and_recent, lambda run: recent(run, 0, 6), steps_of),
    "the merged history": Scene(
        lambda run: pieces(run, 0, 2, 4),
        lambda run: history.merge_history(run.child(history.HISTORY), run, 4),
        steps_of,
    ),
    "the history in pieces again": Scene(
        finished,
        lambda run: history.unmerge_history(run, [2, 4]),
        steps_of,
    ),
    "a table in parts": Scene(lambda run: grown(run, 0, (2, 5)), lambda run: grown(run, 5, (6, 8, 9, 10)), parts_of),
    "the times of steps": Scene(lambda run: timed(run, 0, 0, 5), lambda run: timed(run, 1, 3, 7), times_of),
    "the shape reports": Scene(lambda run: reported(run, 0, 2), lambda run: reported(run, 2, 5), reports_of),
    "the merged shape reports": Scene(lambda run: merged(run, 0, 2), lambda run: merged(run, 2, 5), reports_of),
    **{
        name: Scene(
            lambda run, case=case: case.record.write(run, case.value, case.name),  # type: ignore[misc]
            lambda run, case=case: case.record.write(run, case.other, case.name),  # type: ignore[misc]
            lambda run, case=case: case.record.read(run, case.name),  # type: ignore[misc]
        )
        for name, case in CASES.items()
    },
}


OF_MANY_CALLS = ("the shape reports", "the merged shape reports", "a table in parts", "the times of steps")


def killed_at_each_point(
    scene: Scene, folder: Path, error: Callable[[], BaseException]
) -> Iterator[tuple[Storage, Any]]:
    """Run a scene once for each of its calls of the file system, which fails; yield the folder and its old look."""
    for after in range(1000):
        run = Storage(str(folder / str(after)))
        run.create()
        scene.before(run)
        old = scene.look(run)
        acting = run.guarded(lambda: None)
        acting.fs = failing = Failing(run.fs, after, error)
        with suppress(Killed, StorageError):
            scene.act(acting)
        if len(failing.calls) <= after:
            assert after >= 3, "a write opens a stream, writes, closes and renames"
            return
        yield run, old


def is_whole(look: Any, old: Any, new: Any) -> bool:
    """Whether what is read is the old or the new; of rows, the old ones and some of the new ones, in order."""
    if isinstance(new, list) and new and not isinstance(new[0], dict | Preview):
        return bool(look == old or (len(old) <= len(look) and look == new[: len(look)]))
    return bool(look in (old, new))


@pytest.mark.parametrize("error", [Killed, partial(OSError, 28, "the disk is full")], ids=["killed", "full"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in OF_MANY_CALLS else name for name in SCENES]
)
def test_a_write_that_ends_at_any_point_leaves_the_old_or_the_new(
    name: str, error: Callable[[], BaseException], tmp_path: Path
) -> None:
    scene = SCENES[name]
    whole = Storage(str(tmp_path / "whole"))
    whole.create()
    scene.before(whole)
    scene.act(whole)
    new = scene.look(whole)
    points = 0
    for run, old in killed_at_each_point(scene, tmp_path, error):
        points += 1
        assert is_whole(scene.look(run), old, new), (points, scene.look(run))
        run.remove_unfinished(recursive=True)
        scene.act(run)  # the next driver does it again
        again = scene.look(run)
        assert again == new or (name == "a table in parts" and set(again) == set(new))
    assert points >= 3


TABLES = [name for name in SCENES if name not in CASES]


@pytest.mark.parametrize("name", TABLES)
def test_a_damaged_file_of_a_table_is_named(name: str, tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    SCENES[name].before(run)
    path = next(path for path in sorted(tmp_path.rglob("*.parquet")))
    for data in (b"", b"no", path.read_bytes()[:-9]):
        path.write_bytes(data)
        with pytest.raises(StorageError, match=f"{path.relative_to(tmp_path)}: is damaged"):
            SCENES[name].look(run)


def test_a_part_is_replaced_until_it_is_full(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    grown(run, 0, (2, 3, 5, 6))
    grown(run, 6, (7,))
    folder = tmp_path / "grows"
    read = {path.name: pq.read_table(path)["step"].to_pylist() for path in sorted(folder.iterdir())}
    assert read == {"part-0.parquet": [0, 1, 2, 3, 4], "part-1.parquet": [5], "part-2.parquet": [6]}


def test_rows_that_a_storage_refused_are_written_with_the_next(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    table = PartTable(run, "part-{}.parquet", 4)
    table.add(rows(0, 5))
    fs, run.fs = run.fs, Failing(run.fs, 0, partial(OSError, "no answer"))
    with pytest.raises(StorageError, match="no answer"):
        table.write()
    assert table.num_new == 5
    run.fs = fs
    table.add(rows(5, 6))
    table.write()
    assert read_table(run, "part-0.parquet")["step"].to_pylist() == list(range(6)) and table.num_new == 0
