"""Measure the sizes of each shard's inputs and outputs, and send them to the driver, on a worker.

`Probe` measures with hooks on the model. `Recorder` collects what was measured, which takes microseconds a shard; a
thread of it sends that. `shape_lines` prints it.
"""

import dataclasses
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from dp_ray.engine.clock import TimedStep
from dp_ray.engine.world import World
from dp_ray.errors import ModelError
from dp_ray.messages import Keep, Report, Sizes
from dp_ray.plan.split import Shard
from dp_ray.system.threads import repeated
from dp_ray.tables import array_of, array_of_named
from dp_ray.telemetry.times import packed_steps
from dp_ray.tensors.tree import sizes

ENTRIES = re.compile(r"\d+ x ")  # how the size of a list begins that has an entry for each row
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("shard", pa.int32()),
        ("rank", pa.int32()),
        ("node", pa.dictionary(pa.int32(), pa.string())),
        ("device", pa.dictionary(pa.int32(), pa.string())),
        ("rows", pa.int32()),
        ("input_size", pa.dictionary(pa.int32(), pa.string())),
        ("output_size", pa.dictionary(pa.int32(), pa.string())),
        ("milliseconds", pa.float32()),
    ]
)
REPORT_SECONDS = 0.5  # as often as a worker beats: what a message costs, the channel and the driver pay
REPORTS_A_SECOND = 1000  # of all workers together: each costs the driver's node the same, however many steps it has


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """One shard of one step, as its worker's model saw it.

    `input_size` and `output_size` are nested like the model's inputs and outputs, with a torch.Size for each tensor.
    `milliseconds` is the forward's time on the host clock; on a GPU, the time to launch it.
    """

    step: int
    shard: int
    rank: int
    node: str
    device: str
    rows: int
    input_size: Any
    output_size: Any
    milliseconds: float


class Probe:
    """Hooks on a module that measure the sizes of its inputs and outputs, and the time of its forward."""

    def __init__(self, model: nn.Module, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            # Also after an error, when the output is None: the model may be called once more.
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        self._started = 0.0
        self._depth = 0
        self._cache: dict[tuple[Any, Any, int], Sizes] = {}
        self._seen: tuple[tuple[Any, ...], dict[str, Any], Any] | None = None  # sizes of a call's inputs and outputs
        self._milliseconds = 0.0

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def last(self, rows: int) -> tuple[Sizes | None, float]:
        """Return the sizes and milliseconds of the forward since the last call; no sizes if there was none.

        They are those of a shard of `rows` rows.
        """
        if self._seen is None:
            return None, self._milliseconds
        (args, kwargs, output), self._seen = self._seen, None
        # Writing sizes as JSON takes longer than all else here, and most models map one tensor to one.
        are_tensors = len(args) == 1 and not kwargs and type(args[0]) is type(output) is torch.Size
        key = (args[0], output, rows) if are_tensors else None
        if key in self._cache:
            return self._cache[key], self._milliseconds
        args = tuple(_in_common(arg, rows, self.batch_dim) for arg in args)
        inputs: Any = args[0] if len(args) == 1 else args  # the call's inputs as one tree: a lone argument as itself
        if kwargs:
            kwargs = {name: _in_common(value, rows, self.batch_dim) for name, value in kwargs.items()}
            inputs = kwargs if not args else {**{str(number): arg for number, arg in enumerate(args)}, **kwargs}
        found = Sizes(encode_sizes(inputs), encode_sizes(_in_common(output, rows, self.batch_dim)), rows)
        if key is not None:
            self._cache[key] = found
        return found, self._milliseconds

    def take(self, rows: int) -> tuple[Sizes, float]:
        """Return what `last` does; raise ModelError if the module was not called."""
        seen, _ = self.last(rows)
        if seen is None:
            raise ModelError("the model's forward was not called, so there are no shapes to report")
        return seen, self._milliseconds

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1:
            self._started = time.perf_counter()

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._depth -= 1
        has_failed = output is None and sys.exception() is not None
        if self._depth or has_failed:  # of a model that calls itself only the outermost call counts
            return
        self._milliseconds = (time.perf_counter() - self._started) * 1e3
        self._seen = (
            tuple(map(_sizes_of, args)),
            {name: sizes(value) for name, value in kwargs.items()} if kwargs else kwargs,
            _sizes_of(output),
        )


def _sizes_of(value: Any) -> Any:
    """Return what `sizes` does, of most values at once."""
    return value.shape if type(value) is torch.Tensor and not value.is_nested else sizes(value)


class Recorder:
    """One worker's shape reports, which a thread sends every `interval` seconds."""

    def __init__(
        self, world: World, send: Callable[[Any], None], interval: float | None = None, attempt: str = ""
    ) -> None:
        self._world = world
        self._send = send
        self._attempt = attempt
        interval = report_interval(world.world_size) if interval is None else interval
        self._shards: list[tuple[int, int, Sizes, float]] = []
        self.rows = 0  # of the shards recorded since somebody has set it to 0
        self._times: list[TimedStep] = []
        self._through = -1
        self._sent_through = -1
        self._lock = threading.Lock()  # for what is recorded; never held while sending, which may take long
        self._sending = threading.Lock()  # one report after the other: the driver takes them in order
        self._is_open = ExitStack()
        self._is_open.enter_context(repeated("shape-reports", interval, self.flush))

    def on_shard(self, shard: Shard, seen: Sizes, milliseconds: float) -> None:
        """Record a shard's sizes and the milliseconds of its forward."""
        self.rows += shard.rows
        with self._lock:
            self._shards.append((shard.step, shard.shard, seen, milliseconds))

    def on_step(self, step: int) -> None:
        """Record that this worker has finished `step`, with or without rows in it."""
        self._through = step

    def on_times(self, timed: list[TimedStep]) -> None:
        """Record how long the parts of steps took."""
        with self._lock:
            self._times += timed

    def flush(self) -> None:
        """Send all that is recorded; it has arrived when this returns."""
        with self._sending:
            report = self._take()
            if report:
                self._send(report)

    def keep(self) -> None:
        """Send all that is recorded and have the driver write it, so that a committed step keeps its reports."""
        self.flush()
        self._send(Keep())

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open.close()
        self.flush()

    def _take(self) -> Report | None:
        with self._lock:
            through = self._through  # read once: `on_step` does not take the lock
            shards, self._shards = self._shards, []
            timed, self._times = self._times, []
        if not shards and not timed and through == self._sent_through:
            return None
        self._sent_through = through
        shapes, times = shape_table(self._world, shards) if shards else None, packed_steps(timed) if timed else None
        return Report(self._world, through, shapes, times, self._attempt)


def shape_table(world: World, shards: Sequence[tuple[int, int, Sizes, float]]) -> pa.Table:
    """Return shards that a worker ran, by their steps, shards, sizes and milliseconds, as rows of SCHEMA."""
    steps, numbers, seen, milliseconds = zip(*shards, strict=True)
    places: dict[Sizes, int] = {}
    place = np.array([places.setdefault(sizes, len(places)) for sizes in seen], np.int32)
    rows, here = np.array([sizes.rows for sizes in places], np.int32)[place], np.zeros(len(shards), np.int32)
    columns = [
        array_of(np.array(steps, np.int64)),
        array_of(np.array(numbers, np.int32)),
        array_of(here + np.int32(world.rank)),
        array_of_named(here, [world.node]),
        array_of_named(here, [str(world.device)]),
        array_of(rows),
        array_of_named(place, [sizes.input_size for sizes in places]),
        array_of_named(place, [sizes.output_size for sizes in places]),
        array_of(np.array(milliseconds, np.float32)),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def report_interval(world_size: int) -> float:
    """Return the seconds between two reports of a worker: they grow with the workers, who share one driver."""
    return max(REPORT_SECONDS, world_size / REPORTS_A_SECOND)


def shape_lines(reports: Sequence[tuple[Any, Any]], batch_dim: int) -> Iterator[str]:
    """Yield the `--shapes` lines of one step: one for each shard's sizes (input, output), one for the merged ones."""
    for input_size, output_size in reports:
        yield f"\tIn Model: input size {input_size} output size {output_size}"
    inputs = _sum_rows([input_size for input_size, _ in reports], batch_dim)
    outputs = _sum_rows([output_size for _, output_size in reports], batch_dim)
    yield f"Outside: input size {inputs} output_size {outputs}"


def _sum_rows(many: Sequence[Any], batch_dim: int) -> Any:
    """Return the sizes of the concatenated shards."""
    first = many[0]
    if any(not _nested_alike(first, other) for other in many):
        return "(not nested alike on all shards)"
    if isinstance(first, torch.Size):
        if not first:
            return torch.Size([len(many)])
        dim = batch_dim if len(first) > 1 else 0
        rows = sum(size[dim] for size in many)
        return torch.Size([*first[:dim], rows, *first[dim + 1 :]])
    if isinstance(first, tuple):
        return tuple(_sum_rows(column, batch_dim) for column in zip(*many, strict=True))
    if isinstance(first, dict):
        return {key: _sum_rows([sizes[key] for sizes in many], batch_dim) for key in first}
    if isinstance(first, str) and all(ENTRIES.match(text) for text in many):
        counts, each = zip(*(text.split(" x ", 1) for text in many), strict=True)
        return f"{sum(map(int, counts))} x {each[0] if len({*each}) == 1 else '*'}"
    return first


def _nested_alike(first: Any, other: Any) -> bool:
    if type(first) is not type(other):
        return False
    if isinstance(first, dict):
        return bool(first.keys() == other.keys())
    return not isinstance(first, tuple) or len(first) == len(other)


def encode_sizes(nested: Any) -> str:
    """Write what `sizes` gives as JSON: a list of numbers for a tensor, one of its items' sizes for a tuple or list.

    What a list with an entry for each row has in common is text: `3 x [3, *, *]`.
    """
    return json.dumps(_as_json(nested))


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value] or {}  # an empty list is a scalar's size
    return value


def _in_common(nested: Any, rows: int, batch_dim: int) -> Any:
    """Return the sizes, with what the entries have in common in place of each list with an entry for each row.

    So the different sizes of a run are few, however many images it has.
    """
    if isinstance(nested, dict):
        return {key: _in_common(value, rows, batch_dim) for key, value in nested.items()}
    if isinstance(nested, torch.Size) or not isinstance(nested, tuple | list) or hasattr(nested, "_make"):
        return nested
    are_texts = all(isinstance(value, str) for value in nested)  # of constants
    has_entries = len(nested) == rows and (
        are_texts or not all(_has_rows(value, rows, batch_dim) for value in nested)
    )
    if has_entries and (common := _common(nested, rows)) is not None:
        return common
    return type(nested)(_in_common(value, rows, batch_dim) for value in nested)


def _has_rows(nested: Any, rows: int, batch_dim: int) -> bool:
    """Return whether all tensors have the rows in their dimension for them: so no entry is that of a row alone."""
    if isinstance(nested, torch.Size):
        return bool(nested) and nested[batch_dim if batch_dim < len(nested) > 1 else 0] == rows
    inner = nested.values() if isinstance(nested, dict) else nested if isinstance(nested, tuple | list) else ()
    return all(_has_rows(value, rows, batch_dim) for value in inner)


def _common(entries: Sequence[Any], rows: int) -> Any:
    """Return what the sizes of all entries have in common, with a `*` for other lengths; None if that is nothing."""
    first = entries[0]
    if isinstance(first, torch.Size):
        if not all(isinstance(entry, torch.Size) and len(entry) == len(first) for entry in entries):
            return None
        lengths = [set(column) for column in zip(*entries, strict=True)]
        return f"{rows} x [{', '.join(str(*length) if len(length) == 1 else '*' for length in lengths)}]"
    if isinstance(first, dict) and all(isinstance(entry, dict) and entry.keys() == first.keys() for entry in entries):
        return {key: _common([entry[key] for entry in entries], rows) or f"{rows} x *" for key in first}
    return f"{rows} x *" if all(isinstance(entry, str) for entry in entries) else None


def decode_sizes(text: str) -> Any:
    """Read what `encode_sizes` wrote: torch.Size for tensors, tuples for sequences, dicts for mappings."""
    return _sized(json.loads(text))


def _sized(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sized(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    is_size = all(isinstance(item, int) for item in value)
    return torch.Size(value) if is_size else tuple(_sized(item) for item in value)
