"""What the probe sees, how sizes are written down and shown, and the way of the reports to the end of the run.

Reports are compared with lists of what was recorded, and with a table that is one dictionary.
"""

import io
import math
import pickle
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dp_ray.engine.clock import PARTS
from dp_ray.engine.world import World
from dp_ray.errors import ModelError, StorageError
from dp_ray.messages import Report, Sizes, TimedSteps, WorkerReady
from dp_ray.monitor.monitor import Monitor
from dp_ray.plan.split import Shard, Split
from dp_ray.rundir.claim import RunDir
from dp_ray.storage import Storage
from dp_ray.tables import PartTable, reading, step_ranges
from dp_ray.telemetry import reports
from dp_ray.telemetry.reports import ReportTables, read_reports, report_files
from dp_ray.telemetry.shapes import (
    Probe,
    Recorder,
    ShardReport,
    decode_sizes,
    encode_sizes,
    report_interval,
    shape_lines,
    shape_table,
)
from dp_ray.tensors.tree import sizes
from tests.support.builders import monitor_of
from tests.support.chance import examples
from tests.support.trees import Data, Pair
from tests.support.within import within

Size = torch.Size


class Calls(nn.Module):
    """A model whose forward is the function it is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def see(function: Callable[..., Any], *args: Any, batch_dim: int = 0, **kwargs: Any) -> tuple[Any, Any, int]:
    """The sizes and rows that the probe saw of one call."""
    model = Calls(function)
    with Probe(model, batch_dim) as probe:
        model(*args, **kwargs)
        seen, milliseconds = probe.take(4)
    assert milliseconds >= 0
    return decode_sizes(seen.input_size), decode_sizes(seen.output_size), seen.rows


X, Y = torch.ones(4, 5), torch.ones(4)


def test_one_tensor_is_seen_as_its_size() -> None:
    linear = nn.Linear(5, 2)
    with Probe(linear) as probe:
        output = linear(X)
        seen, _ = probe.take(4)
    assert seen == Sizes("[4, 5]", "[4, 2]", 4)
    assert (decode_sizes(seen.input_size), decode_sizes(seen.output_size)) == (X.shape, output.shape)


def test_positional_inputs_are_seen_as_a_tuple() -> None:
    assert see(lambda x, y: x, X, Y) == ((X.shape, Y.shape), X.shape, 4)


def test_keyword_inputs_are_seen_by_their_names() -> None:
    assert see(lambda x, mask: x, x=X, mask=Y) == ({"x": X.shape, "mask": Y.shape}, X.shape, 4)


def test_positional_and_keyword_inputs_are_seen_together() -> None:
    assert see(lambda x, mask: x, X, mask=Y) == ({"0": X.shape, "mask": Y.shape}, X.shape, 4)


def test_without_inputs_the_rows_are_the_shards() -> None:
    assert see(lambda: X) == ({}, X.shape, 4)


def test_nested_inputs_and_outputs_are_seen_in_their_nesting() -> None:
    inputs = {"ids": X, "more": [Y, (X, None)], "text": "hello", "array": Y.numpy()}
    seen = see(lambda given: Pair(Data(given["ids"], "c"), {"0": Y, "1": X}), inputs)
    expected = {"ids": Size([4, 5]), "more": (Size([4]), (Size([4, 5]), None)), "text": "'hello'", "array": Size([4])}
    assert seen == (expected, ({"x": Size([4, 5]), "y": "'c'"}, {"0": Size([4]), "1": Size([4, 5])}), 4)


def test_a_list_with_an_entry_for_each_row_is_seen_by_what_its_entries_have_in_common() -> None:
    images = [torch.ones(3, 5, width) for width in (4, 4, 9, 2)]
    found = [{"boxes": torch.ones(many, 4), "n": Y.sum(), "of": ["a"] * many} for many in (0, 3, 4, 1)]
    assert see(lambda given: found, images) == (
        "4 x [3, 5, *]",
        {"boxes": "4 x [*, 4]", "n": "4 x []", "of": "4 x *"},
        4,
    )
    features = [X, Y, torch.ones(4, 2), X]
    assert see(lambda given: features, features)[0] == tuple(feature.shape for feature in features), "no row in each"
    slow_first = [torch.ones(time, 4, 2) for time in (7, 3, 2, 1)]
    assert see(lambda given: given, slow_first, batch_dim=1)[0] == tuple(tensor.shape for tensor in slow_first)
    pair = ([torch.ones(3, 5), torch.ones(2, 5)], [Y, Y])
    model = Calls(lambda *given: given[1][0])
    with Probe(model) as probe:
        model(*pair)
        assert decode_sizes(probe.take(2)[0].input_size) == ("2 x [*, 5]", "2 x [4]"), (
            "a call's arguments are no rows"
        )


def test_the_lines_count_the_entries_of_all_shards() -> None:
    seen = [("3 x [3, *, *]", {"boxes": "3 x [*, 4]"}), ("2 x [3, *, *]", {"boxes": "2 x [5, 4]"})]
    *_, last = shape_lines(seen, 0)
    assert last == "Outside: input size 5 x [3, *, *] output_size {'boxes': '5 x *'}"


def test_a_scalar_output_has_the_empty_size() -> None:
    assert see(lambda x: x.sum(), X) == (Size([4, 5]), Size([]), 4)


def test_the_last_of_several_calls_counts() -> None:
    model = Calls(lambda x: x[:, :1])
    with Probe(model) as probe:
        for rows in (2, 3, 2, 1):
            model(torch.ones(rows, 5))
        assert probe.take(1)[0] == Sizes("[1, 5]", "[1, 1]", 1)


def test_equal_inputs_with_other_outputs_are_told_apart() -> None:
    widths = iter([1, 2, 3])
    model = Calls(lambda x: torch.ones(len(x), next(widths)))
    with Probe(model) as probe:
        outputs = [(model(X), probe.take(4)[0].output_size)[1] for _ in range(3)]
    assert outputs == ["[4, 1]", "[4, 2]", "[4, 3]"]


def test_a_model_that_was_not_called_is_an_error() -> None:
    with Probe(nn.Linear(5, 2)) as probe, pytest.raises(ModelError, match="forward was not called"):
        probe.take(4)


def test_what_was_taken_is_not_seen_again() -> None:
    linear = nn.Linear(5, 2)
    with Probe(linear) as probe:
        linear(X)
        probe.take(4)
        with pytest.raises(ModelError, match="forward was not called"):
            probe.take(4)


def test_a_call_that_raised_is_not_seen() -> None:
    linear = nn.Linear(5, 2)
    with Probe(linear) as probe:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear(Y)
        with pytest.raises(ModelError, match="forward was not called"):
            probe.take(4)


def use_and_fail(model: nn.Module) -> None:
    with Probe(model):
        assert hooks(model) > 0
        raise KeyError


def hooks(model: nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_pre_hooks)


def test_the_hooks_are_gone_at_the_end() -> None:
    model = nn.Linear(5, 2)
    with Probe(model):
        assert hooks(model) == 2
    assert hooks(model) == 0
    with pytest.raises(KeyError):
        use_and_fail(model)
    assert hooks(model) == 0


def test_the_model_is_left_as_it_was() -> None:
    linear = nn.Linear(5, 2)
    expected = linear(X)
    with Probe(linear):
        assert torch.equal(linear(X), expected)


keys = st.text(max_size=3) | st.sampled_from(["0", "1", "2"])
tensors = st.lists(st.integers(0, 3), max_size=4).map(lambda shape: torch.empty(shape))
constants = st.none() | st.text(max_size=60) | st.integers() | st.booleans()
trees = st.recursive(
    tensors | tensors.map(lambda tensor: tensor.numpy()) | constants,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.builds(Data, inner, inner)
    ),
    max_leaves=8,
)


def plainly(tree: Any) -> Any:
    """The sizes by hand: torch.Size for tensors, tuples for sequences, dicts for all that has names."""
    if isinstance(tree, dict):
        return {key: plainly(value) for key, value in tree.items()}
    if isinstance(tree, Data):
        return plainly(vars(tree))
    if isinstance(tree, tuple | list):
        return tuple(plainly(value) for value in tree) or {}
    if hasattr(tree, "shape"):
        return torch.Size(tree.shape)
    return None if tree is None else repr(tree)[:40]


@given(trees)
def test_sizes_come_back_from_json(tree: Any) -> None:
    decoded = decode_sizes(encode_sizes(sizes(tree)))
    assert repr(decoded) == repr(plainly(tree))  # a torch.Size equals a tuple, but does not look like one


def test_the_lines_are_the_tutorials() -> None:
    half = (Size([15, 5]), Size([15, 2]))
    assert list(shape_lines([half, half], 0)) == [
        "\tIn Model: input size torch.Size([15, 5]) output size torch.Size([15, 2])",
        "\tIn Model: input size torch.Size([15, 5]) output size torch.Size([15, 2])",
        "Outside: input size torch.Size([30, 5]) output_size torch.Size([30, 2])",
    ]


def test_the_lines_of_uneven_shards_sum_to_the_batch() -> None:
    shards = torch.ones(10, 5).chunk(8)
    lines = list(shape_lines([(shard.shape, shard[:, :2].shape) for shard in shards], 0))
    assert len(lines) == 6
    assert lines[-1] == "Outside: input size torch.Size([10, 5]) output_size torch.Size([10, 2])"


def test_nested_sizes_sum_leaf_by_leaf() -> None:
    shards = [
        ({"x": Size([rows, 5]), "more": (Size([rows]), None)}, (Size([rows, 2]), {"h": Size([rows, 3, 3])}))
        for rows in (4, 4, 2)
    ]
    assert list(shape_lines(shards, 0))[-1] == (
        "Outside: input size {'x': torch.Size([10, 5]), 'more': (torch.Size([10]), None)} "
        "output_size (torch.Size([10, 2]), {'h': torch.Size([10, 3, 3])})"
    )


def test_sizes_sum_along_the_batch_dimension() -> None:
    shards = [((Size([7, rows, 5]), Size([rows])), Size([2, rows])) for rows in (3, 1)]
    assert list(shape_lines(shards, 1))[-1] == (
        "Outside: input size (torch.Size([7, 4, 5]), torch.Size([4])) output_size torch.Size([2, 4])"
    )


def test_scalars_of_one_row_each_sum_to_a_vector() -> None:
    assert list(shape_lines([(Size([1, 5]), Size([]))] * 3, 0))[-1] == (
        "Outside: input size torch.Size([3, 5]) output_size torch.Size([3])"
    )


@given(rows=st.integers(1, 40), shards=st.integers(1, 9), batch_dim=st.integers(0, 1))
def test_the_sum_is_what_torch_cat_gives(rows: int, shards: int, batch_dim: int) -> None:
    pieces = torch.empty(rows, rows, 2).chunk(shards, batch_dim)
    line = list(shape_lines([(piece.shape, piece.shape) for piece in pieces], batch_dim))[-1]
    whole = torch.cat(pieces, batch_dim).shape
    assert line == f"Outside: input size {whole} output_size {whole}"


SEEN = [Sizes(f"[{rows}, 5]", f"[{rows}, 2]", rows) for rows in range(1, 5)]
NEVER = 3600.0  # seconds between two reports that nobody asked for
WAIT = 30.0
ALL = 1 << 40  # more steps than any run here has


class Row(NamedTuple):
    """One shard of one step, in plain values; `milliseconds` tells records apart."""

    step: int
    shard: int
    seen: Sizes
    milliseconds: float


def spelled(report: Report) -> list[Row]:
    """A report's rows one by one."""
    rows = [] if report.shapes is None else report.shapes.to_pylist()
    sizes = [Sizes(row["input_size"], row["output_size"], row["rows"]) for row in rows]
    return [Row(row["step"], row["shard"], seen, row["milliseconds"]) for row, seen in zip(rows, sizes, strict=True)]


def record(recorder: Recorder, row: Row) -> None:
    recorder.on_shard(Shard(row.step, row.shard, 0, row.seen.rows), row.seen, row.milliseconds)


@contextmanager
def recording(interval: float = NEVER) -> Iterator[tuple[Recorder, list[Report]]]:
    sent: list[Report] = []
    with Recorder(World(), sent.append, interval) as recorder:
        yield recorder, sent


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [(range(10), [0] * 10), ([0, 1, 2], [0, 0, 1]), ([0, 1, 2], [0, 1, 0]), ([0, 2, 3], [0, 0, 0])],
    ids=["alike", "changed", "changed back", "one left out"],
)
def test_a_report_has_each_shard_in_the_order_of_its_run(steps: Sequence[int], sizes: Sequence[int]) -> None:
    rows = [
        Row(step, shard, SEEN[size + shard - 3], step + shard / 8)
        for step, size in zip(steps, sizes, strict=True)
        for shard in (3, 4)
    ]
    with recording() as (recorder, sent):
        for row in rows:
            record(recorder, row)
            recorder.on_step(row.step)
    (report,) = sent
    assert (report.world, report.through, report.times) == (World(), steps[-1], None)
    assert spelled(report) == rows


histories = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from(SEEN)), unique_by=lambda drawn: drawn[0]), st.booleans()
    ),
    max_size=20,
)


@settings(max_examples=examples(60), deadline=None)
@given(histories)
def test_all_that_was_recorded_is_sent(steps: list[tuple[list[tuple[int, Sizes]], bool]]) -> None:
    """Whatever shards a step has, whenever what there is is sent, also in the middle of a step."""
    recorded: list[Row] = []
    with recording() as (recorder, sent):
        for step, (shards, flush) in enumerate(steps):
            for shard, seen in shards:
                recorded.append(Row(step, shard, seen, float(len(recorded))))
                record(recorder, recorded[-1])
                if flush and shard % 2:
                    recorder.flush()
            recorder.on_step(step)
            if flush:
                recorder.flush()
                assert sent[-1].through == step
    assert [row for report in sent for row in spelled(report)] == recorded
    assert not steps or sent[-1].through == len(steps) - 1


def test_the_sizes_of_a_report_are_named_once() -> None:
    """Also if each is a text of its own: a report of many steps is not longer for long sizes."""
    lengths = []
    for long in (9, 9_000):
        with recording() as (recorder, sent):
            for step in range(100):
                record(recorder, Row(step, 0, Sizes("[5]" + " " * long, f"[{step % 2}]" + " " * long, 5), 1.0))
        lengths.append(len(pickle.dumps(sent[0])))
    assert lengths[1] < lengths[0] + 5 * 9_000


def test_a_step_without_rows_is_told_too() -> None:
    with recording() as (recorder, sent):
        recorder.flush()
        recorder.on_step(0)
        recorder.flush()
        recorder.flush()
        recorder.on_step(1)
    assert [(report.through, report.shapes) for report in sent] == [(0, None), (1, None)]


def record_and_fail(sent: list[Report]) -> None:
    with Recorder(World(), sent.append, NEVER) as recorder:
        record(recorder, Row(0, 0, SEEN[0], 1.0))
        recorder.on_step(0)
        record(recorder, Row(1, 0, SEEN[0], 2.0))
        raise KeyError


def test_an_error_in_the_block_loses_nothing() -> None:
    sent: list[Report] = []
    with pytest.raises(KeyError):
        record_and_fail(sent)
    assert sent[0].through == 0
    assert spelled(sent[0]) == [Row(0, 0, SEEN[0], 1.0), Row(1, 0, SEEN[0], 2.0)]


def test_reports_are_sent_in_the_background() -> None:
    arrived = threading.Event()
    with Recorder(World(), lambda report: arrived.set(), 0.001) as recorder:
        record(recorder, Row(0, 0, SEEN[0], 1.0))
        assert arrived.wait(WAIT)


def test_flush_returns_when_what_was_underway_has_arrived() -> None:
    """Also where the background thread took it: a part may get its name only when its reports are safe."""
    underway, may_arrive = threading.Event(), threading.Event()
    log: list[str] = []

    def send(report: Report) -> None:
        underway.set()
        assert may_arrive.wait(WAIT)
        log.append("arrived")

    def flush(recorder: Recorder) -> None:
        recorder.flush()
        log.append("flushed")

    with Recorder(World(), send, 0.001) as recorder:
        record(recorder, Row(0, 0, SEEN[0], 1.0))
        assert underway.wait(WAIT)
        flushing = threading.Thread(target=flush, args=[recorder])
        flushing.start()
        flushing.join(0.1)
        may_arrive.set()
        flushing.join(WAIT)
    assert log == ["arrived", "flushed"]


def test_the_background_thread_ends_with_the_block() -> None:
    with recording(0.001):
        assert "shape-reports" in {thread.name for thread in threading.enumerate()}
    assert "shape-reports" not in {thread.name for thread in threading.enumerate()}


def test_recording_beside_the_background_thread_loses_nothing() -> None:
    with recording(0.0) as (recorder, sent):
        for step in range(3000):
            record(recorder, Row(step, 0, SEEN[step % 3 == 0], float(step)))
            recorder.on_step(step)
    rows = [row for report in sent for row in spelled(report)]
    assert rows == [Row(step, 0, SEEN[step % 3 == 0], float(step)) for step in range(3000)]
    through = [report.through for report in sent]
    assert through == sorted(through) and through[-1] == 2999


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.5), (8, 0.5), (100, 0.5), (4096, 4.096)])
def test_all_workers_together_send_at_most_a_thousand_reports_a_second(workers: int, seconds: float) -> None:
    assert report_interval(workers) == seconds
    assert workers / seconds <= 1000


class Kept(NamedTuple):
    """A row of `shapes.parquet`, in plain values."""

    step: int
    shard: int
    seen: Sizes
    milliseconds: float
    worker: tuple[int, int]  # attempt and rank


class Naive:
    """The reports in a few plain lines: the newest of each shard; a step is passed on once, in order."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], Kept] = {}
        self.passed_on: list[Kept] = []
        self.through: dict[int, int] = {}
        self.passed = -1

    def begin(self, world_size: int) -> None:
        self.through = dict.fromkeys(range(world_size), -1)

    def take(self, worker: tuple[int, int], rows: Sequence[Row], through: int) -> None:
        for row in rows:
            self.held[row.step, row.shard] = Kept(*row, worker)
        self.through[worker[1]] = through

    def pass_on(self, through: float | None = None) -> None:
        ready = min(self.through.values()) if through is None else through
        wanted = sorted(key for key in self.held if self.passed < key[0] <= ready)
        self.passed_on += [self.held[key] for key in wanted]
        self.passed = int(max(self.passed, min(ready, 1 << 40)))

    @property
    def lines(self) -> list[str]:
        """What `--shapes` prints of the steps that were passed on."""
        lines: list[str] = []
        for _, rows in groupby(self.passed_on, key=lambda row: row.step):
            seen = [(decode_sizes(row.seen.input_size), decode_sizes(row.seen.output_size)) for row in rows]
            lines += shape_lines(seen, 0)
        return lines


def world_of(attempt: int, rank: int, world_size: int) -> World:
    return World(rank, world_size, node=f"node-{attempt}")


def kept_in(run: Storage) -> list[Kept]:
    """The rows of a run's `shapes.parquet`, as another reader reads them."""
    return [
        Kept(
            row["step"],
            row["shard"],
            Sizes(row["input_size"], row["output_size"], row["rows"]),
            row["milliseconds"],
            (int(row["node"].removeprefix("node-")), row["rank"]),
        )
        for row in pq.read_table(Path(run.path) / "shapes.parquet").to_pylist()
    ]


class Play:
    """Attempts of workers that run, report, commit and die in any order, told to a Monitor and to Naive."""

    def __init__(self, data: st.DataObject, steps: int, shards: int, folder: Path) -> None:
        self.data, self.steps, self.shards = data, steps, shards
        self.run, self.stdout = Storage(str(folder)), io.StringIO()
        self.run.create()
        with redirect_stdout(self.stdout):
            claimed = RunDir(self.run, "", is_resumed=False)
            self.monitor = monitor_of(split=Split(steps, 1, 1), shapes=True, quiet=True, run=claimed)
        self.naive = Naive()
        self.sizes = data.draw(st.lists(st.sampled_from([None, *SEEN]), min_size=1, max_size=5), label="sizes")
        self.every = data.draw(st.integers(1, 4), label="steps of one size")
        self.safe: set[tuple[int, int]] = set()
        self.clock = 0

    def seen(self, step: int, shard: int) -> Sizes | None:
        """What a shard of a step looks like; None where it is empty."""
        return self.sizes[(step // self.every * (shard + 1)) % len(self.sizes)]

    def attempt(self, number: int, last: bool) -> None:
        world_size = self.data.draw(st.integers(1, self.shards), label="world size")
        for rank in range(world_size):
            self.monitor.take(WorkerReady(str(number), world_of(number, rank, world_size), 1, ()))
        self.naive.begin(world_size)
        safe = frozenset(self.safe)
        workers = [Worker(self, (number, rank), world_size, safe) for rank in range(world_size)]
        while train_state := [worker for worker in workers if worker.step < self.steps]:
            worker = self.data.draw(st.sampled_from(train_state))
            worker.advance(self.data.draw(st.integers(1, 6)))
            what = self.data.draw(st.sampled_from(["nothing", "report", "report", "commit", "tick", "die"]))
            if what in ("report", "commit"):
                worker.report(commit=what == "commit")
            if what == "tick":
                self.tick()
            if what == "die" and not last:
                break
        for worker in workers:
            worker.end(last)

    def tick(self) -> None:
        self.monitor.tick()
        self.naive.pass_on()
        assert self.monitor.progress.step == self.naive.passed + 1
        assert self.stdout.getvalue().splitlines() == self.naive.lines

    def close(self) -> None:
        self.monitor.close()
        self.naive.pass_on(math.inf)


class Worker:
    """One worker of an attempt, with a real Recorder."""

    def __init__(self, play: Play, name: tuple[int, int], world_size: int, safe: frozenset[tuple[int, int]]) -> None:
        self.play, self.name, self.safe = play, name, safe
        self.step = 0
        self.sent: list[Any] = []
        self.recorder = Recorder(world_of(*name, world_size), self.sent.append, NEVER, str(name[0]))
        self.shards = range(play.shards * name[1] // world_size, play.shards * (name[1] + 1) // world_size)
        self.rows: list[Row] = []

    def advance(self, steps: int) -> None:
        for _ in range(min(steps, self.play.steps - self.step)):
            for shard in self.shards:
                seen = self.play.seen(self.step, shard)
                if seen and (self.step, shard) not in self.safe:
                    self.play.clock += 1
                    self.rows.append(Row(self.step, shard, seen, float(self.play.clock)))
                    record(self.recorder, self.rows[-1])
            self.recorder.on_step(self.step)
            self.step += 1

    def report(self, commit: bool = False) -> None:
        if commit:
            self.recorder.keep()
            self.play.safe |= {(step, shard) for step in range(self.step) for shard in self.shards}
        self.recorder.flush()
        for message in self.sent:
            self.play.monitor.take(message)
        if self.sent:
            self.play.naive.take(self.name, self.rows, self.step - 1)
        self.sent.clear()
        self.rows = []

    def end(self, last: bool) -> None:
        with self.recorder:
            if last:
                self.report()
        self.sent.clear()  # what a lost worker had not sent never arrives


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(steps=st.integers(1, 25), shards=st.integers(1, 5), attempts=st.integers(1, 4), data=st.data())
def test_every_shard_is_printed_once_and_kept_as_it_ran_last(
    steps: int, shards: int, attempts: int, data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "ROWS_IN_A_PIECE", data.draw(st.integers(1, 20), label="rows in a piece"))
        patch.setattr(reports, "ROWS_IN_A_GROUP", data.draw(st.integers(1, 20), label="rows in a group"))
        patch.setattr(reports, "ROWS_AT_ONCE", data.draw(st.integers(1, 20), label="rows at once"))
        play = Play(data, steps, shards, Path(folder))
        for number in range(attempts):
            play.attempt(number, last=number == attempts - 1)
        if data.draw(st.booleans(), label="tick before close"):
            play.tick()
        play.close()
        kept = kept_in(play.run)
    assert play.stdout.getvalue().splitlines() == play.naive.lines
    assert kept == [row for _, row in sorted(play.naive.held.items())]
    every = [(step, shard) for step in range(steps) for shard in range(shards)]
    assert [(row.step, row.shard) for row in kept] == [place for place in every if play.seen(*place)]
    assert [row.seen for row in kept] == [play.seen(row.step, row.shard) for row in kept]


def alike(steps: range, shard: int, seen: int = 0) -> list[Row]:
    """One shard that is alike in all steps."""
    return [Row(step, shard, SEEN[seen], 1.0) for step in steps]


def ready(attempt: int, world_size: int) -> list[World]:
    return [world_of(attempt, rank, world_size) for rank in range(world_size)]


def following(*worlds: World, run: Storage | None = None) -> Monitor:
    """A monitor of a training of 20 steps of ten rows, whose workers are ready."""
    claimed = RunDir(run, "", is_resumed=False) if run else None
    monitor = monitor_of(split=Split(200, 10, 2), shapes=True, quiet=True, run=claimed)
    begin(monitor, *worlds)
    return monitor


def begin(monitor: Monitor, *worlds: World) -> None:
    for world in worlds:
        monitor.take(WorkerReady(world.node, world, 1, ()))


def report(world: World, through: int, rows: Sequence[Row] = ()) -> Report:
    return Report(world, through, shape_table(world, rows) if rows else None, attempt=world.node)


def test_a_step_is_passed_on_when_all_workers_are_through(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ready(0, 2)
    monitor = following(first, second)
    monitor.tick()
    monitor.take(report(first, 3, alike(range(4), 0)))
    monitor.tick()
    assert (monitor.progress.step, monitor.progress.rows, capsys.readouterr().out) == (0, 0, "")
    monitor.take(report(second, 1, alike(range(2), 1, seen=1)))
    assert monitor.progress.step == 0
    monitor.tick()
    both = [(torch.Size([rows, 5]), torch.Size([rows, 2])) for rows in (1, 2)]
    assert (monitor.progress.step, monitor.progress.rows) == (2, 20)
    assert capsys.readouterr().out.splitlines() == [*shape_lines(both, 0)] * 2
    monitor.take(report(second, 9))
    monitor.tick()
    assert (monitor.progress.step, monitor.progress.rows) == (4, 40)
    assert capsys.readouterr().out.splitlines() == [*shape_lines(both[:1], 0)] * 2
    assert {rank: rows for rank, (_, rows) in monitor.progress.workers.items()} == {0: 4, 1: 4}
    monitor.close()


def test_a_step_with_an_empty_shard_keeps_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ready(0, 2)
    monitor = following(first, second, run=Storage(str(tmp_path)))
    monitor.take(report(first, 9, alike(range(10), 0)))
    monitor.take(report(first, 9, alike(range(5, 10), 1)))
    for through in (3, 4, 9):
        monitor.take(report(second, through))
        monitor.tick()
    assert monitor.progress.step == 10
    shape = torch.Size([1, 5]), torch.Size([1, 2])
    lines = [*shape_lines([shape], 0)] * 5 + [*shape_lines([shape, shape], 0)] * 5
    assert capsys.readouterr().out.splitlines() == lines
    monitor.close()
    every = [(step, shard) for step in range(10) for shard in (0, 1)]
    kept = [(row.step, row.shard) for row in kept_in(Storage(str(tmp_path)))]
    assert kept == [(step, shard) for step, shard in every if shard == 0 or step >= 5]


def test_what_never_came_through_is_passed_on_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ready(0, 2)
    monitor = following(first, second, run=Storage(str(tmp_path)))
    monitor.take(report(first, 3, alike(range(4), 0)))
    monitor.tick()
    monitor.close()
    assert [row.step for row in kept_in(Storage(str(tmp_path)))] == [0, 1, 2, 3]
    assert len(capsys.readouterr().out.splitlines()) == 8
    assert monitor.progress.step == 0, "these steps are not done"


def test_the_newest_attempt_counts_where_a_step_was_run_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one printed two steps; the second one repeats one of these and another."""
    first, second = ready(0, 2)
    monitor = following(first, second, run=Storage(str(tmp_path)))
    monitor.take(report(first, 3, alike(range(4), 0)))
    monitor.take(report(second, 1))
    monitor.tick()
    assert len(capsys.readouterr().out.splitlines()) == 4
    (alone,) = ready(1, 1)
    begin(monitor, alone)
    monitor.take(report(alone, 5, alike(range(1, 6), 0, seen=1)))
    monitor.tick()
    shape = torch.Size([2, 5]), torch.Size([2, 2])
    assert capsys.readouterr().out.splitlines() == [*shape_lines([shape], 0)] * 4, "a step is printed once"
    assert (monitor.progress.step, monitor.progress.rows) == (6, 60)
    monitor.close()
    assert [(row.step, row.worker[0], row.seen) for row in kept_in(Storage(str(tmp_path)))] == [
        (0, 0, SEEN[0]), *((step, 1, SEEN[1]) for step in range(1, 6))
    ]  # fmt: skip


def test_a_resumed_run_prints_what_was_reported_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a prediction, whose second driver runs the shard that was not done, from the first step on."""
    first, second = ready(0, 2)
    with closing(ReportTables(Storage(str(tmp_path)), ALL)) as tables:
        tables.add(report(first, 3, alike(range(4), 0)))
        tables.add(report(second, 1, alike(range(2), 1)))
    (alone,) = ready(1, 1)
    monitor = following(alone, run=Storage(str(tmp_path)))
    monitor.take(report(alone, 3, alike(range(2, 4), 1)))
    monitor.tick()
    shape = torch.Size([1, 5]), torch.Size([1, 2])
    assert capsys.readouterr().out.splitlines() == [*shape_lines([shape, shape], 0)] * 4
    monitor.close()


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(0, 2) | st.none(), min_size=1, max_size=60),
    pieces=st.integers(1, 5),
    full=st.integers(1, 9),
)
def test_a_worker_far_ahead_keeps_sizes_and_times(sizes: list[int | None], pieces: int, full: int) -> None:
    """Rank 0 reports two shards in many small reports, of which many files are made, and then rank 1 its own.

    Where there is no size, shard 1 is empty.
    """
    ahead, late = ready(0, 2)
    recorded: list[Row] = []
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "ROWS_IN_A_PIECE", full)
        patch.setattr(reports, "ROWS_AT_ONCE", full)
        run = Storage(folder)
        with closing(ReportTables(run, ALL)) as tables:
            with Recorder(ahead, tables.add, NEVER) as recorder:
                for step, size in enumerate(sizes):
                    for shard in (0,) if size is None else (0, 1):
                        recorded.append(Row(step, shard, SEEN[(size or 0) * shard], float(len(recorded))))
                        record(recorder, recorded[-1])
                    if step % pieces == 0:
                        recorder.flush()
                        tables.keep()
            tables.add(report(late, len(sizes), alike(range(len(sizes)), 2)))
        kept = kept_in(run)
    recorded += alike(range(len(sizes)), 2)
    assert [Row(*row[:4]) for row in kept] == sorted(recorded)


def test_times_are_exact(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    with closing(ReportTables(run, ALL)) as tables:
        for world in ready(0, 2):
            rows = [Row(step, world.rank, SEEN[0], step * 2.0 + world.rank) for step in range(1000)]
            tables.add(report(world, 999, rows))
    assert [row.milliseconds for row in kept_in(run)] == [float(number) for number in range(2000)]


def growth_of(act: Callable[[], None]) -> int:
    """The most bytes, Python's and Arrow's, held in addition at one time in `act`."""
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        act()
        return int(tracemalloc.get_traced_memory()[1] + (pool.max_memory() or 0))
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


@pytest.mark.full(but=["together"])
@pytest.mark.parametrize("is_ahead", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["together", "apart"])
def test_memory_does_not_grow_with_the_steps(is_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 steps of two workers in blocks, or of one and then of the other: as rows, 8 megabytes.

    With the steps grow only the names of the files.
    """
    monkeypatch.setattr(reports, "ROWS_IN_A_PIECE", 1 << 11)
    monkeypatch.setattr(reports, "ROWS_AT_ONCE", 1 << 12)
    run = Storage(str(tmp_path))
    blocks = [(first, world) for first in range(0, 100_000, 1000) for world in ready(0, 2)]
    if is_ahead:
        blocks.sort(key=lambda block: block[1].rank)

    def go() -> None:
        with closing(ReportTables(run, ALL)) as tables:
            for first, world in blocks:
                tables.add(report(world, first + 999, alike(range(first, first + 1000), world.rank)))
                tables.keep()

    assert growth_of(go) < 3_000_000
    table = pq.read_table(tmp_path / "shapes.parquet")
    assert table["step"].to_pylist() == [step for step in range(100_000) for _ in (0, 1)]
    assert table["shard"].to_pylist() == [0, 1] * 100_000


def test_many_rows_are_written_though_it_is_not_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "WRITE_SECONDS", 0.002)
    monkeypatch.setattr(reports, "SHARE_OF_WRITES", 1e-9)
    monkeypatch.setattr(reports, "ROWS_IN_A_GROUP", 10)
    run = Storage(str(tmp_path))

    def written() -> int:
        return sum(rows for file in report_files(run) for *_, rows in step_ranges(*file))

    with closing(ReportTables(run, ALL)) as tables:
        for rows in (20, 40):  # after the first write, or one of no rows before it, it is not time again for long
            tables.add(report(World(), rows, alike(range(20), 0)))
            assert within(WAIT, lambda rows=rows: written() >= rows)  # type: ignore[misc]


def write(run: Storage, blocks: Sequence[Sequence[ShardReport]]) -> None:
    """Write blocks of reports as the driver does; each report by a worker of its own."""
    with closing(ReportTables(run, ALL)) as tables:
        for block in blocks:
            for told in block:
                world = World(told.rank, node=told.node, device=torch.device(told.device))
                sizes = Sizes(text(told.input_size), text(told.output_size), told.rows)
                row = Row(told.step, told.shard, sizes, told.milliseconds)
                tables.add(report(world, told.step, [row]))
            tables.keep()


def read(run: Storage) -> list[ShardReport]:
    with reading(run, "shapes.parquet") as file:
        return list(read_reports(file))


def text(size: Any) -> str:
    return str(list(size))


def some_reports(count: int) -> list[ShardReport]:
    return [
        ShardReport(
            step=number // 4,
            shard=number % 4,
            rank=number % 3,
            node=f"10.0.0.{number % 2}",
            device=f"cuda:{number % 2}",
            rows=number % 5,
            input_size=torch.Size([number % 5, 7]),
            output_size=torch.Size([number % 5]),
            milliseconds=number / 8,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("blocks", [1, 3, 10])
def test_reports_come_back_from_their_file(tmp_path: Path, blocks: int) -> None:
    run, told = Storage(str(tmp_path)), some_reports(40)
    write(run, [told[number * 40 // blocks : (number + 1) * 40 // blocks] for number in range(blocks)])
    back = read(run)
    assert back == told
    assert {type(report.input_size) for report in back} == {torch.Size}
    assert [path.name for path in tmp_path.iterdir()] == ["shapes.parquet"]


def test_no_reports_come_back_from_their_file(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    write(run, [])
    assert read(run) == []


def test_reports_are_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "ROWS_IN_A_GROUP", 8)
    monkeypatch.setattr(reports, "ROWS_AT_ONCE", 9)
    run, told = Storage(str(tmp_path)), some_reports(26)
    write(run, [told[:3], told[3:8], told[8:17], told[17:]])
    assert [rows for *_, rows in step_ranges(run, "shapes.parquet")] == [8, 8, 8, 2]
    assert read(run) == told


def test_sizes_of_which_some_are_equal_come_back(tmp_path: Path) -> None:
    sizes = [Sizes("[4, 5]", f"[4, {width}]", 4) for width in (1, 2, 1, 3)]
    run = Storage(str(tmp_path))
    with closing(ReportTables(run, ALL)) as tables:
        for first in (0, 4):
            rows = [Row(step, 0, seen, 1.0) for step, seen in enumerate(sizes, first)]
            tables.add(report(World(node="node-0"), first + 3, rows))
    assert [row.seen for row in kept_in(run)] == sizes * 2
    assert [*pd.read_parquet(tmp_path / "shapes.parquet")["input_size"]] == ["[4, 5]"] * 8


def resumed(run: Storage, told: Sequence[ShardReport], rest: Sequence[ShardReport]) -> None:
    """Have another worker run the rest, and check that all else is as it was told."""
    with closing(ReportTables(run, ALL)) as tables, Recorder(World(), tables.add, NEVER) as recorder:
        for report in rest:
            record(recorder, Row(report.step, report.shard, SEEN[0], 0.5))
            recorder.on_step(report.step)
    for was, now in zip(told, read(run), strict=True):
        size, output = torch.Size([1, 5]), torch.Size([1, 2])
        anew = ShardReport(was.step, was.shard, 0, "localhost", "cpu", 1, size, output, 0.5)
        assert now == (anew if was in rest else was)


def test_what_was_reported_of_finished_shards_is_taken_in_again(tmp_path: Path) -> None:
    """Of ten steps in four shards, five are done, and two shards of two more; another worker runs the rest."""
    run, told = Storage(str(tmp_path)), some_reports(40)
    write(run, [told])
    resumed(
        run, told, [report for report in told if report.step in (3, 8, 9) or (report.step >= 6 and report.shard >= 2)]
    )


def test_what_an_earlier_version_has_kept_is_taken_in_again(tmp_path: Path) -> None:
    """Its driver was killed: what all workers had finished is in pieces, and what was ahead of that in a file."""
    run, told = Storage(str(tmp_path)), some_reports(40)
    folder = tmp_path / "reports"
    write(run, [told])
    folder.mkdir()
    table = pq.read_table(tmp_path / "shapes.parquet")
    (tmp_path / "shapes.parquet").unlink()
    for name, first, end in (("piece-0", 0, 12), ("piece-1", 12, 20), ("pending", 16, 37)):
        pq.write_table(table.slice(first, end - first), folder / f"{name}.parquet")
    resumed(run, told, told[24:])
    assert not folder.exists()


def test_steps_that_a_shorter_training_does_not_have_are_left_out(tmp_path: Path) -> None:
    run, told = Storage(str(tmp_path)), some_reports(40)
    write(run, [told])
    ReportTables(run, 7).close()
    assert read(run) == told[:28]


def test_pandas_opens_the_reports(tmp_path: Path) -> None:
    told = some_reports(40)
    write(Storage(str(tmp_path)), [told[:25], told[25:]])
    frame = pd.read_parquet(tmp_path / "shapes.parquet")
    for name in ("step", "shard", "rank", "node", "device", "rows", "milliseconds"):
        assert frame[name].tolist() == [getattr(report, name) for report in told], name
    assert frame["input_size"].tolist() == [f"[{report.rows}, 7]" for report in told]
    assert frame["output_size"].tolist() == [f"[{report.rows}]" for report in told]
    assert frame.groupby("node", observed=True)["milliseconds"].count().to_dict() == {"10.0.0.0": 20, "10.0.0.1": 20}


def test_the_memory_of_many_sizes_in_many_small_blocks_is_what_they_take(tmp_path: Path) -> None:
    """Each of 400 blocks has 16 sizes of its own: no block may hold all earlier ones' too."""

    def go() -> None:
        with closing(ReportTables(Storage(str(tmp_path)), ALL)) as tables:
            for step in range(400):
                sizes = [Sizes(f"[1, {number}]", f"[{number}]", 1) for number in range(16 * step, 16 * step + 16)]
                tables.add(report(World(), step, [Row(step, shard, seen, 1.0) for shard, seen in enumerate(sizes)]))

    assert growth_of(go) < 10_000_000
    sizes = pd.read_parquet(tmp_path / "shapes.parquet")["output_size"].tolist()
    assert sizes == [f"[{number}]" for number in range(6400)]


def test_reports_of_a_worker_that_is_ahead_are_kept_too(tmp_path: Path) -> None:
    """A driver is killed after it was asked to keep them; the next one has them, and those of its own workers."""
    run = Storage(str(tmp_path))
    killed = PartTable(run.child("reports"), reports.PIECE, 8)
    for world, steps in zip(ready(0, 2), (3, 9), strict=True):
        killed.add(shape_table(world, alike(range(steps), world.rank)))
        killed.write()
    (alone,) = ready(1, 1)
    with closing(ReportTables(run, ALL)) as tables:
        tables.add(report(alone, 9, alike(range(3, 10), 0)))
        tables.add(report(alone, 9, alike(range(9, 10), 1)))
    kept = {(row.step, row.shard): row.worker for row in kept_in(run)}
    earlier = {(step, shard): (0, shard) for shard, steps in ((0, 3), (1, 9)) for step in range(steps)}
    assert kept == {**earlier, **{(step, 0): (1, 0) for step in range(3, 10)}, (9, 1): (1, 0)}


@pytest.mark.parametrize("name", ["shapes.parquet", "reports/piece-0.parquet", "reports/pending.parquet"])
def test_a_damaged_file_of_an_earlier_driver_ends_a_run_at_its_start(name: str, tmp_path: Path) -> None:
    write(Storage(str(tmp_path)), [some_reports(40)])
    data = (tmp_path / "shapes.parquet").read_bytes()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data[:-9])
    with pytest.raises(StorageError, match=f"{name}: is damaged"):
        ReportTables(Storage(str(tmp_path)), ALL)


def test_a_storage_that_fails_ends_a_run_at_its_end_for_shapes_and_not_for_times(tmp_path: Path) -> None:
    times = TimedSteps(np.arange(2), np.ones(2, np.int32), np.zeros((2, len(PARTS)), np.float32))
    for name in ("times", "reports"):
        folder = tmp_path / name
        folder.mkdir()
        tables = ReportTables(Storage(str(folder)), ALL)
        (folder / name).touch()  # where a folder is to be made
        tables.add(report(World(), 1, alike(range(2), 0))._replace(times=times))
        tables.keep()
        if name == "times":
            tables.close()
            assert len(read(Storage(str(folder)))) == 2
            continue
        with pytest.raises(StorageError, match="reports"):
            tables.close()
