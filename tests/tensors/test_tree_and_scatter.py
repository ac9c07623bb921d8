"""cut and gather against torch.chunk, torch.cat and nn.DataParallel's own scatter_gather."""

import dataclasses
import doctest
import json
import math
import sys
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn.parallel import scatter_gather

from dp_ray.errors import DataError, Error, ModelError
from dp_ray.plan.split import chunk_bounds, num_filled
from dp_ray.tensors import scatter as scattering
from dp_ray.tensors import tree
from dp_ray.tensors.scatter import cut, gather, num_rows, rows_dim
from dp_ray.tensors.tree import TreeSpec, flatten, map_leaves, sizes, unflatten
from tests.support import models


class Named(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen:
    x: Any
    y: Any = None
    late: Any = dataclasses.field(init=False, default=0)


@dataclasses.dataclass(eq=False)
class Output(OrderedDict[str, Any]):
    """Like the transformers library's ModelOutput: fields that are None are no keys."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


def assert_same(got: Any, wanted: Any) -> None:
    """The same nesting of the same types, and the same bits in it."""
    assert type(got) is type(wanted)
    if isinstance(got, torch.Tensor):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    elif isinstance(got, np.ndarray):
        assert got.dtype == wanted.dtype and np.array_equal(got, wanted)
    elif isinstance(got, Mapping):
        assert_same(list(got.items()), list(wanted.items()))
    elif isinstance(got, tuple | list):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(got):
        assert_same(*([getattr(node, field.name) for field in dataclasses.fields(got)] for node in (got, wanted)))
    else:
        assert got == wanted or (math.isnan(got) and math.isnan(wanted))


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def scatter(whole: Any, shards: int, dim: int = 0) -> list[Any]:
    """The shards of a batch that have rows, cut where the split says; of one without rows, itself."""
    rows = num_rows(whole, dim)
    bounds = [chunk_bounds(rows or 0, shards, shard) for shard in range(num_filled(rows or 0, shards))]
    return [cut(whole, *each, dim) for each in bounds] or [whole] * (1 if rows == 0 else shards)


A, B = t(2, 3), t(1, 3)
TORCH = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
NUMPY = ["float32", "int64", "bool", "<U3", "complex128", "i4,f8"]


@st.composite
def leaves(draw: st.DrawFn, rows: int, dim: int) -> Any:
    other = draw(st.lists(st.integers(0, 3), max_size=2))
    shape = [*other[:dim], rows, *other[dim:]] if len(other) >= dim else [rows]
    values = t(*shape, dtype=torch.int64) + draw(st.integers(0, 9))
    dtype: Any = draw(st.sampled_from(TORCH + NUMPY))
    return values.to(dtype) if isinstance(dtype, torch.dtype) else values.numpy().astype(dtype)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts: st.SearchStrategy[Any] = st.dictionaries(st.text(max_size=3) | st.integers(-3, 3), inner, max_size=3)
    several = st.lists(inner, max_size=3)
    makers: list[Callable[[Any], Any]] = [OrderedDict, UserDict, lambda items: defaultdict(list, items)]
    classes = (st.builds(Named, inner, inner), st.builds(Frozen, inner, inner), st.builds(Output, inner, inner))
    return st.one_of(several, several.map(tuple), dicts, *map(dicts.map, makers), *classes)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int, int]:
    """A batch, the rows of it and their dimension."""
    rows, dim = draw(st.integers(0, 20)), draw(st.integers(0, 1))
    constants = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    return draw(st.recursive(leaves(rows, dim) | constants, containers, max_leaves=6)), rows, dim


@pytest.mark.slow
@given(batches(), st.integers(1, 9))
def test_gather_is_the_inverse_of_scatter(batch: tuple[Any, int, int], shards: int) -> None:
    whole, rows, dim = batch
    pieces = scatter(whole, shards, dim)
    assert_same(gather(pieces, dim=dim), whole)
    if num_rows(whole, dim) is not None:
        counts = [num_rows(piece, dim) or 0 for piece in pieces]
        assert sum(counts) == rows
        assert_same(gather(pieces, counts, dim), whole)


@pytest.mark.slow
@given(batches(), st.integers(1, 9))
def test_every_leaf_is_cut_as_torch_chunk_cuts_it(batch: tuple[Any, int, int], shards: int) -> None:
    whole, rows, dim = batch
    assume(rows > 0)
    pieces = [flatten(piece)[0] for piece in scatter(whole, shards, dim)]
    for index, leaf in enumerate(flatten(whole)[0]):
        at = 0 if leaf.ndim == 1 else dim
        got = [piece[index] for piece in pieces]
        if isinstance(leaf, torch.Tensor):
            assert_same(got, list(leaf.chunk(shards, at)))
        else:
            assert_same(got, [leaf.take(where, at) for where in torch.arange(rows).chunk(shards)])


@pytest.mark.slow
@given(batches())
def test_flatten_and_json_lose_nothing(batch: tuple[Any, int, int]) -> None:
    found, spec = flatten(batch[0])
    assert len(spec.paths) == len(found)
    assert_same(unflatten(spec, found), batch[0])
    read = TreeSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert read == spec
    assert_same(unflatten(read, found), batch[0])


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's scatter_gather with chunk and cat in place of copies between GPUs."""

    def chunk(devices: Any, _sizes: None, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.chunk(len(devices), dim)

    def cat(_device: Any, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat(tensors, dim)

    monkeypatch.setattr(scatter_gather, "Scatter", types.SimpleNamespace(apply=chunk))
    monkeypatch.setattr(scatter_gather, "Gather", types.SimpleNamespace(apply=cat))


INPUTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], int, int]] = {
    "one": ((t(10, 5),), {}, 8, 0),
    "few rows": ((t(2, 5), t(2)), {"mask": t(2, 1)}, 8, 0),
    "several": ((t(7, 2), t(7), t(7, 1, 3)), {}, 3, 0),
    "nested": ((t(6, 2), [t(6), (t(6, 3),)], {"a": t(6, 1), "b": [t(6)]}), {}, 4, 0),
    "kwargs only": ((), {"input": t(9, 2)}, 2, 0),
    "kwargs nested": ((), {"input": {"data": [t(9, 2), t(9)], "more": (t(9),)}}, 2, 0),
    "empty": ((t(9, 2), (), [], {}), {"input": {"data": t(9), "list": [], "dict": {}, "tuple": ()}}, 2, 0),
    "constants": ((t(9, 2), 3, None, "mode", 0.5), {"flag": True, "names": ["x", "y"]}, 3, 0),
    "no leaves": (("x", {"n": 3}), {}, 3, 0),
    "named tuple": ((Named(t(5, 2), [t(5)]),), {}, 2, 0),
    "ordered": ((OrderedDict(b=t(5), a=t(5, 2)),), {}, 2, 0),
    "dtypes": ((t(5, dtype=torch.int64), t(5, dtype=torch.bool), t(5, dtype=torch.bfloat16)), {}, 2, 0),
    "dim 1": ((t(3, 10, 2), (t(2, 10),)), {"hidden": t(1, 10, 4)}, 4, 1),
}


@pytest.mark.parametrize(("args", "kwargs", "devices", "dim"), INPUTS.values(), ids=INPUTS)
def test_scatter_as_data_parallel(on_cpu: None, args: Any, kwargs: Any, devices: int, dim: int) -> None:
    expected = scatter_gather.scatter_kwargs(args, kwargs, range(devices), dim)
    assert_same(scatter((args, kwargs), devices, dim), [*zip(*expected, strict=True)])


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "dict": lambda x: {"b": x, "a": [x.cos()]},
    "nested": lambda x: [x, (x.sin(), [x > 1]), OrderedDict(b=x.long(), a=[x.sin()])],
    "named": lambda x: Named(x, (x * 2,)),
    "none": lambda x: (x, None),
    "return type": lambda x: x.cummax(dim=-1),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("model", OUTPUTS.values(), ids=OUTPUTS)
def test_gather_as_data_parallel(on_cpu: None, model: Callable[[torch.Tensor], Any], dim: int) -> None:
    whole = t(11, 10, 2)
    pieces = whole.chunk(4, dim)
    merged = gather([model(piece) for piece in pieces], [piece.shape[dim] for piece in pieces], dim)
    assert_same(merged, model(whole))
    assert_same(merged, scatter_gather.gather([model(piece) for piece in pieces], 0, dim))


def test_rows_are_not_cut_off_in_silence_and_constants_make_no_shards(on_cpu: None) -> None:
    batch = ({"x": t(8, 2)}, t(3))
    assert sum(len(piece[0]["x"]) for piece in scatter_gather.scatter(batch, range(4))) == 6
    with pytest.raises(DataError, match=r"'0\.x' has 8 \(size \[8, 2\]\) and input '1' has 3 \(size \[3\]\)"):
        scatter(batch, 4)
    args, kwargs = (t(2, 4),), {"mode": "sum"}
    assert scatter_gather.scatter_kwargs(args, kwargs, range(8))[0][2:] == ((),) * 6
    assert_same(scatter((args, kwargs), 8), [((t(2, 4)[:1],), kwargs), ((t(2, 4)[1:],), kwargs)])


def test_scalars_are_merged_only_where_a_shard_is_a_row() -> None:
    losses = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}]
    assert_same(gather(losses, [1, 1]), {"loss": torch.tensor([1.0, 2.0])})
    assert_same(gather([np.array(3), np.array(4)], [1, 1], dim=1), np.array([3, 4]))
    for outputs, rows in ((losses, [1, 2]), (losses, None), (losses[:1], [2])):
        with pytest.raises(ModelError, match=r"'loss' is a scalar per shard, not per row: return one value"):
            gather(outputs, rows)


UNLIKE: dict[str, tuple[list[Any], list[int] | None, str]] = {
    "missing key": ([{"a": A, "b": A}, {"a": B}], None, "shard 1: output 'b' is nothing, .* is a tensor"),
    "extra key": ([{"a": A}, {"a": B, "b": B}], None, "shard 1: output 'b' is a tensor .* is nothing"),
    "length": ([[A], [A], [B, B]], None, "shard 2: output is a list of 2, that of shard 0 is a list of 1"),
    "type": ([{"h": (A,)}, {"h": [B]}], None, "'h' is a list of 1, that of shard 0 is a tuple of 1"),
    "mapping": ([{"h": A}, OrderedDict(h=B)], None, "a OrderedDict of 1, that of shard 0 is a dict of 1"),
    "None": ([(A, A), (B, None)], None, "shard 1: output '1' is None, that of shard 0 is a tensor"),
    "None first": ([(A, None), (B, B)], None, "shard 1: output '1' is a tensor or array, .* None"),
    "constant": ([(A, "x"), (B, "y")], None, "shard 1: output '1' is 'y', that of shard 0 is 'x'"),
    "dtype": ([[A], [B.double()]], None, "'0' is a tensor of torch.float64, .* a tensor of torch.float32"),
    "array": ([A, B.numpy()], None, "output is an array of float32, .* a tensor of torch.float32"),
    "shape": ([A, t(2, 4)], None, r"size \[rows, 4\], that of shard 0 a tensor .* \[rows, 3\]"),
    "dimensions": ([A, t(2)], None, r"size \[rows\], that of shard 0 a tensor .* \[rows, 3\]"),
    "scalar": ([A, t()], None, r"shard 1: output of size \[\] has no dimension 0"),
    "scalar first": ([t(), A], None, r"shard 0: output of size \[\] has no dimension 0"),
    "rows": ([{"h": A}, {"h": A}], [2, 1], r"shard 1: output 'h' has 2 rows \(size \[2, 3\]\), not 1"),
    "rows of one": ([A], [3], r"shard 0: output has 2 rows \(size \[2, 3\]\), not 3"),
    "objects": ([object(), object()], None, "output is <object"),
    "none at all": ([], [], "nothing to gather"),
}


@pytest.mark.parametrize(("outputs", "rows", "message"), UNLIKE.values(), ids=UNLIKE)
def test_outputs_that_differ_are_an_error(outputs: Any, rows: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gather(outputs, rows)


@pytest.mark.parametrize("answer", [[True], "yes", np.array([True]), np.array([1, 1]), RuntimeError("no")])
def test_constants_without_a_plain_equality_compare_by_identity(answer: Any) -> None:
    first, second = (MagicMock(__eq__=Mock(side_effect=[answer])) for _ in range(2))
    assert gather([first, first]) is first
    with pytest.raises(ModelError, match="MagicMock"):
        gather([first, second])


def test_equal_constants_stay_and_keys_may_come_in_another_order() -> None:
    merged = gather([{"n": math.nan, "m": np.float32(2)}, {"m": np.float32(2), "n": -math.nan}])
    assert list(merged) == ["n", "m"] and math.isnan(merged["n"]) and merged["m"] == 2
    merged = gather([{"1": A, 1: A + 9, "x": [A + 5]}, {"x": [B + 5], 1: B + 9, "1": B}])
    both = torch.cat([A, B])
    assert_same(merged, {"1": both, 1: both + 9, "x": [both + 5]})
    assert flatten({"a": A, "b": B})[1] != flatten({"b": B, "a": A})[1]
    assert_same(gather([np.array(["a", "bb"]), np.array(["cccc"])]), np.array(["a", "bb", "cccc"]))


def test_scatter_gives_views_that_may_be_written_to() -> None:
    x, y, thing = t(6, 2).requires_grad_() * 1, np.arange(6), np.array([None, 1])
    first, second = scatter((x, y, thing), 2)
    first[0].mul_(2)
    first[1][:] = 7
    assert x.tolist()[:2] == [[0, 2], [4, 6]] and y.tolist() == [7, 7, 7, 3, 4, 5]
    assert first[2] is second[2] is thing


def test_gradients_flow_through_and_one_tree_gives_its_own_tensors() -> None:
    x = torch.nn.Parameter(t(5, 2))
    gather([piece * (index + 1) for index, piece in enumerate(scatter(x, 2))], [3, 2]).sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [1, 1, 1, 2, 2]
    assert gather([[x]], [5])[0] is x


def test_rows() -> None:
    assert [rows_dim(t(4, 3), 0), rows_dim(t(4, 3), 1), rows_dim(t(4, 3), -1), rows_dim(t(4), 1)] == [0, 1, 1, 0]
    assert num_rows({"x": t(3, 5, 2), "labels": t(5)}, dim=1) == 5
    assert num_rows([None, "x"]) is None
    assert_same(scatter([t(0, 3), "x"], 4), [[t(0, 3), "x"]])
    with pytest.raises(DataError, match=r"input 'x\.0': size \[2, 3\] has no dimension 2"):
        num_rows({"x": [A]}, dim=2)
    with pytest.raises(DataError, match=r"size \[\] has no dimension 0"):
        rows_dim(np.array(1), 0)


def test_paths_and_sizes() -> None:
    batch = {"h": (A, [A, None]), 3: Named(A, "s"), "o": Output(loss=t()), "f": Frozen(A, (torch.Size([7]), 10**60))}
    assert flatten(batch)[1].paths == ["h.0", "h.1.0", "3.x", "o.loss", "f.x"]
    assert flatten(A)[1].paths == [""]
    size = torch.Size([2, 3])
    later = {"o": {"loss": torch.Size([])}, "f": {"x": size, "y": (("7",), "1" + "0" * 39), "late": "0"}}
    assert_same(sizes(batch), {"h": (size, [size, None]), 3: Named(size, "'s'"), **later})
    assert sizes(A.numpy()) == size


def test_dataclasses_keep_what_is_set_late_or_none() -> None:
    frozen = Frozen(A, [None, A])
    object.__setattr__(frozen, "late", A + 1)
    assert_same(gather(scatter(frozen, 2)), frozen)
    assert_same(map_leaves(lambda leaf: leaf[:1], frozen).y, [None, A[:1]])
    piece, _ = scatter(Output(logits=A), 2)
    assert list(piece) == ["logits"] and piece.loss is None


def test_what_cannot_be_rebuilt_is_named() -> None:
    locked: Any = type("Locked", (dict,), {"__init__": lambda self: None})
    with pytest.raises(Error, match="a Locked cannot be made again from what it holds"):
        gather([locked()])
    with pytest.raises(ValueError, match="got 1 leaves for the 2 places"):
        unflatten(flatten((A, A))[1], [A])


@pytest.mark.parametrize("value", [object(), torch.float32, {1, 2}, np.float32(1)])
def test_json_holds_plain_constants_only(value: Any) -> None:
    with pytest.raises(ModelError, match=rf"output 'a\.0' holds an? {type(value).__qualname__}"):
        flatten({"a": [value]})[1].to_json()


@pytest.mark.parametrize("name", ["this:Out", "lazy:Out", "subprocess:Popen", "a.b", f"{__name__}:Named.x"])
def test_json_neither_imports_nor_takes_a_class_of_another_sort(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lazy = types.ModuleType("lazy")
    lazy.__dict__["__getattr__"] = Mock(side_effect=AssertionError("looked up with getattr"))
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    for value in (Frozen(A, B), UserDict(x=A, y=B, late=0), Output(A, B, 0)):
        found, spec = flatten(value)
        plain = unflatten(TreeSpec.from_json(spec.to_json() | {"type": name}), found)
        assert_same(plain, dict(zip(spec.keys, (A, B, 0), strict=True)))
    assert "this" not in sys.modules


def test_json_takes_no_class_of_other_fields_but_makes_named_tuples() -> None:
    old, renamed = (flatten(value)[1].to_json() for value in (Frozen(A), Named(A, 1)))
    del old["keys"][0], old["children"][0]
    renamed["keys"][0] = "old"
    assert_same(unflatten(TreeSpec.from_json(old), []), {"y": None, "late": 0})
    made = unflatten(TreeSpec.from_json(renamed), [A])
    assert type(made) is not Named and (type(made).__name__, made._fields) == ("Named", ("old", "y"))
    assert made.y == 1 and TreeSpec.from_json(renamed) == TreeSpec.from_json(renamed) == flatten(made)[1]
    found, spec = flatten(t(3, 2).max(dim=1))
    assert_same(unflatten(TreeSpec.from_json(spec.to_json()), found), (t(3, 2)[:, 1], torch.tensor([1, 1, 1])))


def test_docstrings() -> None:
    assert doctest.testmod(tree) == (0, 4)
    assert doctest.testmod(scattering) == (0, 3)


def test_a_registered_class_is_a_nesting() -> None:
    whole = {"cache": models.Cache([A, t(2, 1)], "mine"), "n": 3}
    first, second = scatter(whole, 2)
    assert (type(first["cache"]), first["cache"].name) == (models.Cache, "mine")
    assert torch.equal(second["cache"].layers[0], A[1:])
    merged = gather([first, second], rows=[1, 1])
    assert torch.equal(merged["cache"].layers[0], A) and torch.equal(merged["cache"].layers[1], t(2, 1))
    assert sizes(whole) == {"cache": {0: [A.shape, torch.Size([2, 1])]}, "n": "3"}
    found, spec = flatten(whole)
    assert spec.paths == ["cache.0.0", "cache.0.1"]
    again = unflatten(TreeSpec.from_json(json.loads(json.dumps(spec.to_json()))), found)
    assert (type(again["cache"]), again["cache"].name) == (models.Cache, "mine")


def test_a_registered_class_that_json_cannot_make_again_becomes_a_dict() -> None:
    found, spec = flatten(models.Cache([A], name=("no", "json")))  # type: ignore[arg-type]
    assert_same(unflatten(TreeSpec.from_json(spec.to_json()), found), {0: [A]})
    known = flatten(models.Cache([A]))[1].to_json()
    assert_same(unflatten(TreeSpec.from_json(known | {"type": "subprocess:Popen"}), found), {0: [A]})
