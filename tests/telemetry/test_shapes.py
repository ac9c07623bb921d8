"""What the probe sees, how sizes are written down and shown, and the way of the reports to the end of the run.

Reports are compared with lists of what was recorded, and with a collector that is one dictionary.
"""

import dataclasses
import io
import math
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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

from dp_ray.engine.world import World
from dp_ray.errors import ModelError
from dp_ray.messages import Report, ShardSpan, Sizes
from dp_ray.plan.split import Done, Range, Shard
from dp_ray.storage import Storage
from dp_ray.telemetry import reports
from dp_ray.telemetry.reports import (
    Collector,
    ReportColumns,
    ReportFile,
    read_journal,
    read_reports,
    read_spans,
)
from dp_ray.telemetry.shapes import (
    Probe,
    Recorder,
    ShardReport,
    decode_sizes,
    encode_sizes,
    report_interval,
    shape_lines,
)
from dp_ray.tensors.tree import sizes

Size = torch.Size


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Data:
    x: Any
    y: Any = None


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
    assert see(lambda given: features, features)[0] == tuple(one.shape for one in features), "no row in each"
    slow_first = [torch.ones(time, 4, 2) for time in (7, 3, 2, 1)]
    assert see(lambda given: given, slow_first, batch_dim=1)[0] == tuple(one.shape for one in slow_first)
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


class Row(NamedTuple):
    """One shard of one step, in plain values; `milliseconds` tells records apart."""

    step: int
    shard: int
    seen: Sizes
    milliseconds: float


def spelled(report: Report, seen: dict[int, Sizes]) -> list[Row]:
    """A report's rows one by one, with the sizes that this and earlier reports named."""
    seen.update(report.seen)
    rows = []
    for span in report.spans:
        assert len(span.milliseconds) == span.num_steps
        numbered = enumerate(span.milliseconds.tolist(), span.first_step)
        rows += [Row(step, span.shard, seen[span.seen], time) for step, time in numbered]
    return rows


def record(recorder: Recorder, row: Row) -> None:
    recorder.on_shard(Shard(row.step, row.shard, 0, row.seen.rows), row.seen, row.milliseconds)


@contextmanager
def recording(interval: float = NEVER) -> Iterator[tuple[Recorder, list[Report]]]:
    sent: list[Report] = []
    with Recorder(World(), sent.append, interval) as recorder:
        yield recorder, sent


def test_equal_steps_are_one_run() -> None:
    with recording() as (recorder, sent):
        for step in range(10):
            for shard in (3, 4):
                record(recorder, Row(step, shard, SEEN[shard - 3], step + shard / 8))
            recorder.on_step(step)
    (report,) = sent
    assert report.world == World() and report.through == 9
    assert report.seen == {0: SEEN[0], 1: SEEN[1]}
    assert [span[:4] for span in report.spans] == [(0, 10, 3, 0), (0, 10, 4, 1)]
    assert [span.milliseconds.tolist() for span in report.spans] == [
        [step + shard / 8 for step in range(10)] for shard in (3, 4)
    ]


@pytest.mark.parametrize(
    ("steps", "sizes", "spans"),
    [
        ([0, 1, 2], [0, 0, 1], [(0, 2), (2, 1)]),
        ([0, 1, 2], [0, 1, 0], [(0, 1), (1, 1), (2, 1)]),
        ([0, 2, 3], [0, 0, 0], [(0, 1), (2, 2)]),
    ],
)
def test_a_run_ends_where_the_size_changes_or_a_step_is_left_out(
    steps: list[int], sizes: list[int], spans: list[tuple[int, int]]
) -> None:
    with recording() as (recorder, sent):
        for step, size in zip(steps, sizes, strict=True):
            record(recorder, Row(step, 0, SEEN[size], 1.0))
    assert [(span.first_step, span.num_steps) for span in sent[0].spans] == spans


histories = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from(SEEN)), unique_by=lambda one: one[0]), st.booleans()
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
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
    named: dict[int, Sizes] = {}
    assert sorted(row for report in sent for row in spelled(report, named)) == sorted(recorded)
    for report in sent:
        assert [span.first_step for span in report.spans] == sorted(span.first_step for span in report.spans)
    assert len({number for report in sent for number in report.seen}) == len(named) == len(set(named.values()))
    assert not steps or sent[-1].through == len(steps) - 1


def test_the_sizes_of_a_run_are_named_once() -> None:
    with recording() as (recorder, sent):
        for step in range(4):
            record(recorder, Row(step, 0, SEEN[step % 2], 1.0))
            recorder.flush()
    assert [report.seen for report in sent] == [{0: SEEN[0]}, {1: SEEN[1]}, {}, {}]


def test_a_step_without_rows_is_told_too() -> None:
    with recording() as (recorder, sent):
        recorder.flush()
        recorder.on_step(0)
        recorder.flush()
        recorder.flush()
        recorder.on_step(1)
    assert [(report.through, report.spans) for report in sent] == [(0, []), (1, [])]


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
    assert [(span.first_step, span.num_steps) for span in sent[0].spans] == [(0, 2)]


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
    seen: dict[int, Sizes] = {}
    rows = [row for report in sent for row in spelled(report, seen)]
    assert rows == [Row(step, 0, SEEN[step % 3 == 0], float(step)) for step in range(3000)]
    through = [report.through for report in sent]
    assert through == sorted(through) and through[-1] == 2999


class Emitted(NamedTuple):
    """What a collector passes on, in plain values."""

    step: int
    shard: int
    seen: Sizes
    milliseconds: float
    worker: tuple[int, int]  # attempt and rank


class Naive:
    """A collector in a few plain lines: the newest report of each shard, passed on once, in order."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], Emitted] = {}
        self.emitted: list[Emitted] = []
        self.through: dict[int, int] = {}
        self.passed = -1

    def begin(self, world_size: int) -> None:
        self.through = dict.fromkeys(range(world_size), -1)

    def take(self, worker: tuple[int, int], rows: Sequence[Row], through: int) -> None:
        for row in rows:
            self.held[row.step, row.shard] = Emitted(*row, worker)
        self.through[worker[1]] = through

    def emit(self, through: float | None = None) -> None:
        ready = min(self.through.values()) if through is None else through
        wanted = sorted(key for key in self.held if self.passed < key[0] <= ready)
        self.emitted += [self.held[key] for key in wanted]
        self.passed = int(max(self.passed, min(ready, 1 << 40)))


def world_of(attempt: int, rank: int, world_size: int) -> World:
    return World(rank, world_size, node=f"node-{attempt}")


def keep(kept: list[Emitted]) -> Callable[[Collector, ReportColumns], None]:
    """An `on_rows` that spells the rows out."""

    def on_rows(collector: Collector, rows: ReportColumns) -> None:
        assert len(rows) > 0
        for step, shard, world, seen, time in zip(*(column.tolist() for column in rows), strict=True):
            here = collector.worlds[world]
            worker = (int(here.node.removeprefix("node-")), here.rank)
            kept.append(Emitted(step, shard, collector.seen[seen], time, worker))

    return on_rows


class Play:
    """Attempts of workers that run, report, commit and die in any order, told to a Collector and to Naive."""

    def __init__(self, data: st.DataObject, steps: int, shards: int) -> None:
        self.data, self.steps, self.shards = data, steps, shards
        self.emitted: list[Emitted] = []
        self.collector, self.naive = Collector(keep(self.emitted)), Naive()
        self.sizes = data.draw(st.lists(st.sampled_from([None, *SEEN]), min_size=1, max_size=5), label="sizes")
        self.every = data.draw(st.integers(1, 4), label="steps of one size")
        self.safe: set[tuple[int, int]] = set()
        self.clock = 0

    def seen(self, step: int, shard: int) -> Sizes | None:
        """What a shard of a step looks like; None where it is empty."""
        return self.sizes[(step // self.every * (shard + 1)) % len(self.sizes)]

    def attempt(self, number: int, last: bool) -> None:
        world_size = self.data.draw(st.integers(1, self.shards), label="world size")
        self.collector.begin([world_of(number, rank, world_size) for rank in range(world_size)])
        self.naive.begin(world_size)
        safe = frozenset(self.safe)
        workers = [Worker(self, (number, rank), world_size, safe) for rank in range(world_size)]
        while train_state := [worker for worker in workers if worker.step < self.steps]:
            worker = self.data.draw(st.sampled_from(train_state))
            worker.advance(self.data.draw(st.integers(1, 6)))
            what = self.data.draw(st.sampled_from(["nothing", "report", "report", "commit", "emit", "die"]))
            if what in ("report", "commit"):
                worker.report(commit=what == "commit")
            if what == "emit":
                self.emit()
            if what == "die" and not last:
                break
        for worker in workers:
            worker.end(last)

    def emit(self) -> None:
        self.collector.emit()
        self.naive.emit()

    def close(self) -> None:
        self.collector.close()
        self.naive.emit(math.inf)


class Worker:
    """One worker of an attempt, with a real Recorder."""

    def __init__(self, play: Play, name: tuple[int, int], world_size: int, safe: frozenset[tuple[int, int]]) -> None:
        self.play, self.name, self.safe = play, name, safe
        self.step = 0
        self.sent: list[Report] = []
        self.recorder = Recorder(world_of(*name, world_size), self.sent.append, NEVER)
        self.shards = range(play.shards * name[1] // world_size, play.shards * (name[1] + 1) // world_size)
        self.rows: list[Row] = []
        self.named: dict[int, Sizes] = {}

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
        self.recorder.flush()
        for report in self.sent:
            self.play.collector.take(report)
        if self.sent:
            self.play.naive.take(self.name, self.rows, self.step - 1)
        if commit:
            self.play.safe |= {(step, shard) for step in range(self.step) for shard in self.shards}
        self.sent.clear()
        self.rows = []

    def end(self, last: bool) -> None:
        with self.recorder:
            if last:
                self.report()
        self.sent.clear()  # what a lost worker had not sent never arrives


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps=st.integers(1, 25), shards=st.integers(1, 5), attempts=st.integers(1, 4), data=st.data())
def test_every_shard_is_passed_on_once_in_order(steps: int, shards: int, attempts: int, data: st.DataObject) -> None:
    play = Play(data, steps, shards)
    for number in range(attempts):
        play.attempt(number, last=number == attempts - 1)
    if data.draw(st.booleans(), label="emit before close"):
        play.emit()
    play.close()
    assert play.emitted == play.naive.emitted
    places = [(one.step, one.shard) for one in play.emitted]
    every = [(step, shard) for step in range(steps) for shard in range(shards)]
    assert places == [place for place in every if play.seen(*place)]
    assert [one.seen for one in play.emitted] == [play.seen(*place) for place in places]


def span(first: int, count: int, shard: int, seen: int = 0, time: float = 1.0) -> ShardSpan:
    return ShardSpan(first, count, shard, seen, np.full(count, time, np.float32))


def two_workers(on_rows: Callable[[Collector, ReportColumns], None]) -> tuple[Collector, list[World]]:
    collector, worlds = Collector(on_rows), [world_of(0, rank, 2) for rank in range(2)]
    collector.begin(worlds)
    return collector, worlds


def test_a_step_is_passed_on_when_all_workers_are_through() -> None:
    kept: list[Emitted] = []
    collector, (first, second) = two_workers(keep(kept))
    collector.emit()
    collector.take(Report(first, 3, {0: SEEN[0]}, [span(0, 4, 0)]))
    collector.emit()
    assert kept == []
    collector.take(Report(second, 1, {0: SEEN[1]}, [span(0, 2, 1)]))
    assert kept == []
    collector.emit()
    assert [(one.step, one.shard, one.seen) for one in kept] == [
        (0, 0, SEEN[0]), (0, 1, SEEN[1]), (1, 0, SEEN[0]), (1, 1, SEEN[1])
    ]  # fmt: skip
    collector.take(Report(second, 9, {}, []))
    collector.emit()
    assert [(one.step, one.shard) for one in kept[4:]] == [(2, 0), (3, 0)]
    assert collector.rows_of(1, span(0, 7, 1)) == 7 * SEEN[1].rows


def test_what_is_left_of_a_run_keeps_its_place() -> None:
    kept: list[Emitted] = []
    collector, (first, second) = two_workers(keep(kept))
    collector.take(Report(first, 9, {0: SEEN[0]}, [span(0, 10, 0), span(5, 5, 1)]))
    for through in (3, 4, 9):
        collector.take(Report(second, through, {}, []))
        collector.emit()
    every = [(step, shard) for step in range(10) for shard in (0, 1)]
    assert [(one.step, one.shard) for one in kept] == [place for place in every if place[1] == 0 or place[0] >= 5]


def test_what_never_came_through_is_passed_on_at_the_end() -> None:
    kept: list[Emitted] = []
    collector, (first, _) = two_workers(keep(kept))
    collector.take(Report(first, 3, {0: SEEN[0]}, [span(0, 4, 0)]))
    collector.emit()
    collector.close()
    assert [one.step for one in kept] == [0, 1, 2, 3]


def test_the_newest_attempt_counts_where_a_step_was_run_twice() -> None:
    kept: list[Emitted] = []
    collector, (first, _) = two_workers(keep(kept))
    collector.take(Report(first, 3, {0: SEEN[0]}, [span(0, 4, 0)]))
    alone = world_of(1, 0, 1)
    collector.begin([alone])
    collector.take(Report(alone, 5, {0: SEEN[1]}, [span(2, 4, 0)]))
    collector.emit()
    assert [(one.step, one.worker[0], one.seen) for one in kept] == [
        (0, 0, SEEN[0]), (1, 0, SEEN[0]), *((step, 1, SEEN[1]) for step in range(2, 6))
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 2) | st.none(), min_size=1, max_size=60),
    pieces=st.integers(1, 5),
    behind=st.lists(st.integers(0, 60), max_size=6).map(sorted),
)
def test_a_worker_far_ahead_keeps_sizes_and_the_sum_of_times(
    sizes: list[int | None], pieces: int, behind: list[int]
) -> None:
    """Rank 0 reports two shards in many small reports, while rank 1 is where `behind` says, and then at the end.

    Where there is no size, shard 1 is empty.
    """
    kept: list[Emitted] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "PENDING_SPANS", 2)
        collector, (ahead, late) = two_workers(keep(kept))
        recorded: list[Row] = []
        with Recorder(ahead, collector.take, NEVER) as recorder:
            for step, size in enumerate(sizes):
                for shard in (0,) if size is None else (0, 1):
                    recorded.append(Row(step, shard, SEEN[(size or 0) * shard], float(len(recorded) % 7)))
                    record(recorder, recorded[-1])
                recorder.on_step(step)
                if step % pieces == 0:
                    recorder.flush()
                if behind and step % 9 == 8:
                    collector.take(Report(late, behind.pop(0), {}, []))
                    collector.emit()
        collector.take(Report(late, len(sizes), {}, []))
        collector.emit()
    assert [one[:3] for one in kept] == [row[:3] for row in recorded]
    for shard in (0, 1):
        times = [one.milliseconds for one in kept if one.shard == shard]
        exact = [row.milliseconds for row in recorded if row.shard == shard]
        assert math.fsum(times) == pytest.approx(math.fsum(exact), rel=1e-4)
        assert all(min(exact) - 1e-4 <= time <= max(exact) + 1e-4 for time in times)


def test_times_are_exact_where_no_worker_is_far_ahead() -> None:
    kept: list[Emitted] = []
    collector, worlds = two_workers(keep(kept))
    for world in worlds:
        spans = [span(step, 1, world.rank, 0, step * 2.0 + world.rank) for step in range(1000)]
        collector.take(Report(world, 999, {0: SEEN[0]}, spans))
    collector.emit()
    assert [one.milliseconds for one in kept] == [float(number) for number in range(2000)]


def growth_of(act: Callable[[], None]) -> int:
    """The most bytes, Python's and Arrow's, held in addition at the end of `act` or at the highest point of it."""
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        act()
        return int(tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - before)
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_steps() -> None:
    """300,000 steps of two workers in blocks: as rows, 12 megabytes."""
    count = 0

    def on_rows(collector: Collector, rows: ReportColumns) -> None:
        nonlocal count
        count += len(rows)

    def go() -> None:
        collector, worlds = two_workers(on_rows)
        for first in range(0, 300_000, 1000):
            for world in worlds:
                collector.take(Report(world, first + 999, {0: SEEN[0]}, [span(first, 1000, world.rank)]))
            collector.emit()
        collector.close()

    assert growth_of(go) < 1_000_000
    assert count == 600_000


@pytest.mark.slow
def test_memory_does_not_grow_with_a_worker_that_is_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports 100,000 steps, ten at a time, before the other one is through with the first."""
    monkeypatch.setattr(reports, "PENDING_SPANS", 64)
    count = 0

    def on_rows(collector: Collector, rows: ReportColumns) -> None:
        nonlocal count
        count += len(rows)

    collector, (ahead, late) = two_workers(on_rows)

    def go() -> None:
        for first in range(0, 100_000, 10):
            collector.take(Report(ahead, first + 9, {0: SEEN[0]}, [span(first, 10, 0)]))

    assert growth_of(go) < 500_000
    collector.take(Report(late, 100_000, {}, []))
    collector.emit()
    assert count == 100_000


def write(path: Path, blocks: Sequence[Sequence[ShardReport]]) -> None:
    """Write blocks of reports as the driver does; each report by a worker of its own."""
    collector = Collector(lambda collector, rows: None)
    with path.open("wb") as sink:
        file = ReportFile(sink)
        for block in blocks:
            first = len(collector.worlds)
            collector.worlds += [World(one.rank, node=one.node, device=torch.device(one.device)) for one in block]
            collector.seen += [Sizes(text(one.input_size), text(one.output_size), one.rows) for one in block]
            numbers = np.arange(first, first + len(block), dtype=np.int32)
            step, shard = (np.array([getattr(one, name) for one in block]) for name in ("step", "shard"))
            times = np.array([one.milliseconds for one in block], np.float32)
            file.write(collector, ReportColumns(step, shard.astype(np.int32), numbers, numbers, times))
        file.close()


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
    told = some_reports(40)
    write(tmp_path / "x", [told[number * 40 // blocks : (number + 1) * 40 // blocks] for number in range(blocks)])
    back = list(read_reports(pq.ParquetFile(tmp_path / "x")))
    assert back == told
    assert {type(one.input_size) for one in back} == {torch.Size}


def test_no_reports_come_back_from_their_file(tmp_path: Path) -> None:
    write(tmp_path / "x", [])
    assert list(read_reports(pq.ParquetFile(tmp_path / "x"))) == []


def test_reports_are_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "ROWS_IN_A_GROUP", 8)
    told = some_reports(26)
    write(tmp_path / "x", [told[:3], told[3:8], told[8:17], told[17:]])
    footer = pq.read_metadata(tmp_path / "x")
    assert [footer.row_group(number).num_rows for number in range(footer.num_row_groups)] == [8, 9, 9]
    assert list(read_reports(pq.ParquetFile(tmp_path / "x"))) == told


def test_what_was_reported_of_finished_shards_is_taken_in_again(tmp_path: Path) -> None:
    """Of ten steps in four shards, five are done, and two shards of two more; another worker runs the rest."""
    alike: dict[str, Any] = {"rank": 1, "node": "n", "device": "cpu", "rows": 3, "input_size": torch.Size([3, 5])}
    told = [
        dataclasses.replace(one, **alike, output_size=torch.Size([3])) if one.shard else one
        for one in some_reports(40)
    ]
    write(tmp_path / "x", [told])
    done = Done([Range(0, 3, 0, 4), Range(4, 6, 0, 4), Range(6, 8, 0, 2)])
    kept: list[ShardReport] = []
    collector = Collector(lambda collector, rows: kept.extend(shard_reports(collector, rows)))
    spans = read_spans(pq.ParquetFile(tmp_path / "x"), done)
    rest = [one for one in told if one.step in (3, 8, 9) or (one.step >= 6 and one.shard >= 2)]
    assert sum(span.num_steps for _, _, span in spans) == len(told) - len(rest)
    collector.restore(spans)
    collector.begin([World()])
    with Recorder(World(), collector.take, NEVER) as recorder:
        for one in rest:
            record(recorder, Row(one.step, one.shard, SEEN[0], 0.5))
            recorder.on_step(one.step)
    collector.emit()
    for was, now in zip(told, kept, strict=True):
        size, output = torch.Size([1, 5]), torch.Size([1, 2])
        anew = ShardReport(was.step, was.shard, 0, "localhost", "cpu", 1, size, output, 0.5)
        assert now == (anew if was in rest else was)


def shard_reports(collector: Collector, rows: ReportColumns) -> Iterator[ShardReport]:
    for step, shard, number, size, time in zip(*(column.tolist() for column in rows), strict=True):
        world, seen = collector.worlds[number], collector.seen[size]
        sizes = decode_sizes(seen.input_size), decode_sizes(seen.output_size)
        yield ShardReport(step, shard, world.rank, world.node, str(world.device), seen.rows, *sizes, time)


def test_pandas_opens_the_reports(tmp_path: Path) -> None:
    told = some_reports(40)
    write(tmp_path / "x", [told[:25], told[25:]])
    frame = pd.read_parquet(tmp_path / "x")
    for name in ("step", "shard", "rank", "node", "device", "rows", "milliseconds"):
        assert frame[name].tolist() == [getattr(one, name) for one in told], name
    assert frame["input_size"].tolist() == [f"[{one.rows}, 7]" for one in told]
    assert frame["output_size"].tolist() == [f"[{one.rows}]" for one in told]
    assert frame.groupby("node", observed=True)["milliseconds"].count().to_dict() == {"10.0.0.0": 20, "10.0.0.1": 20}


def test_the_memory_of_many_sizes_in_many_small_blocks_is_what_they_take(tmp_path: Path) -> None:
    """Each of 400 blocks has 16 sizes of its own: no block may hold all earlier ones' too."""
    collector = Collector(lambda collector, rows: None)
    collector.worlds.append(World())
    ones, world = np.ones(16, np.float32), np.zeros(16, np.int32)
    shards = np.arange(16, dtype=np.int32)

    def go() -> None:
        for step in range(400):
            numbers = shards + len(collector.seen)
            collector.seen += [Sizes(f"[1, {number}]", f"[{number}]", 1) for number in numbers.tolist()]
            file.write(collector, ReportColumns(np.full(16, step), shards, world, numbers, ones))

    with (tmp_path / "x").open("wb") as sink:
        file = ReportFile(sink)
        assert growth_of(go) < 10_000_000
        file.close()
    sizes = pd.read_parquet(tmp_path / "x")["output_size"].tolist()
    assert sizes == [f"[{number}]" for number in range(6400)]


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.1), (8, 0.1), (100, 0.1), (4096, 4.096)])
def test_all_workers_together_send_at_most_a_thousand_reports_a_second(workers: int, seconds: float) -> None:
    assert report_interval(workers) == seconds
    assert workers / seconds <= 1000


def test_reports_of_a_worker_that_is_ahead_are_kept_too(tmp_path: Path) -> None:
    folder = Storage(str(tmp_path / "reports"))
    file = ReportFile(io.BytesIO(), folder)
    collector, worlds = two_workers(file.write)
    for world, steps in zip(worlds, (3, 9), strict=True):
        with Recorder(world, collector.take, NEVER) as recorder:
            for step in range(steps):
                record(recorder, Row(step, world.rank, SEEN[0], 1.0))
                recorder.on_step(step)
    collector.emit()
    file.save(collector)
    file.save(collector)
    done = Done([Range(0, 2, 0, 2), Range(2, 7, 1, 2)])
    found = [(step, run.shard) for _, _, run in read_journal(folder, done) for step in steps_of(run)]
    assert sorted(found) == sorted([*((step, 0) for step in range(2)), *((step, 1) for step in range(7))])


def steps_of(run: Any) -> range:
    return range(run.first_step, run.first_step + run.num_steps)
