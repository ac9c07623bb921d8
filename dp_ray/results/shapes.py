"""The sizes of each shard's inputs and outputs, measured by hooks on the model, and how they are written."""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.errors import ModelError
from dp_ray.tensors.nested import sizes
from dp_ray.tensors.scatter import num_rows


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


class Seen(NamedTuple):
    """The sizes as JSON text, and the number of rows of the inputs."""

    input_size: str
    output_size: str
    rows: int


class Probe:
    """Measures the sizes of a module's inputs and outputs with hooks on the module."""

    def __init__(self, model: nn.Module, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]
        self._started = 0.0
        self._depth = 0
        self._cache: dict[Any, Seen] = {}
        self._seen: Seen | None = None
        self._milliseconds = 0.0

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def has_seen(self) -> bool:
        """Whether there was a forward since the last `take`."""
        return self._seen is not None

    def take(self) -> tuple[Seen, float]:
        """The last forward's sizes and milliseconds; raises ModelError if the module was not called."""
        seen, self._seen = self._seen, None
        if seen is None:
            raise ModelError("the model's forward was not called, so there are no shapes to report")
        return seen, self._milliseconds

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1:
            self._started = time.perf_counter()

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._depth -= 1
        if self._depth:  # the model calls itself: only the outermost call counts
            return
        self._milliseconds = (time.perf_counter() - self._started) * 1e3
        inputs = _as_called(args, kwargs)
        if isinstance(inputs, torch.Tensor) and isinstance(output, torch.Tensor):
            key = (inputs.shape, output.shape)
            if key not in self._cache:
                self._cache[key] = self._look(inputs, output)
            self._seen = self._cache[key]
        else:
            self._seen = self._look(inputs, output)

    def _look(self, inputs: Any, output: Any) -> Seen:
        return Seen(encode_sizes(inputs), encode_sizes(output), num_rows(inputs, self.batch_dim) or 0)


def shape_lines(reports: Sequence[tuple[Any, Any]], batch_dim: int) -> Iterator[str]:
    """The `--shapes` lines of one step: one for each shard's (input, output) sizes, then one for the merged sizes."""
    for input_size, output_size in reports:
        yield f"\tIn Model: input size {input_size} output size {output_size}"
    inputs = _sum_rows([input_size for input_size, _ in reports], batch_dim)
    outputs = _sum_rows([output_size for _, output_size in reports], batch_dim)
    yield f"Outside: input size {inputs} output_size {outputs}"


def encode_sizes(tree: Any) -> str:
    """Sizes as JSON: a list of numbers for a tensor, a list of its items' sizes for a tuple or list."""
    return json.dumps(_as_json(sizes(tree)))


def decode_sizes(text: str) -> Any:
    """The inverse of `encode_sizes`: torch.Size for tensors, tuples for sequences, dicts for mappings."""
    return _sized(json.loads(text))


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


def _sized(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sized(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    is_size = all(isinstance(item, int) for item in value)
    return torch.Size(value) if is_size else tuple(_sized(item) for item in value)


def _as_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call's inputs as one tree: a lone argument as itself."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return kwargs if not args else {**{str(number): arg for number, arg in enumerate(args)}, **kwargs}


def _nested_alike(first: Any, other: Any) -> bool:
    if type(first) is not type(other):
        return False
    if isinstance(first, dict):
        return bool(first.keys() == other.keys())
    return not isinstance(first, tuple) or len(first) == len(other)


def _sum_rows(many: Sequence[Any], batch_dim: int) -> Any:
    """The sizes of the concatenated shards."""
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
    return first
