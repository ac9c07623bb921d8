"""scatter and gather against torch.chunk, torch.cat and nn.DataParallel's own scatter_gather."""

import dataclasses
import doctest
import json
import math
import sys
import types
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn.parallel import scatter_gather

from dp_ray.errors import DataError, Error, ModelError
from dp_ray.replica import tree
from dp_ray.replica.tree import Spec, flatten, gather, map_leaves, num_rows, rows_dim, scatter, sizes, unflatten


class Named(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen:
    x: Any
    y: Any = None
    late: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "late", 0)


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

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Words(UserDict[str, Any]):
    pass


def assert_same(one: Any, two: Any) -> None:
    """The same nesting of the same types, and the same bits in it."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype and torch.equal(one, two)
    elif isinstance(one, np.ndarray):
        assert one.dtype.kind == two.dtype.kind and np.array_equal(one, two)
    elif isinstance(one, Mapping):
        assert list(one) == list(two)
        assert_same(list(one.values()), list(two.values()))
    elif isinstance(one, tuple | list):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(one):
        assert_same(vars(one), vars(two))
    else:
        assert one == two or (math.isnan(one) and math.isnan(two))


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


# --- any nesting, cut and put together again ---

TORCH = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
NUMPY = ["float32", "int64", "bool", "<U3", "complex128", "i4,f8"]
constants = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
keys = st.text(max_size=3) | st.integers(-3, 3)


def make_leaf(rows: int, dim: int, other: list[int], dtype: Any, start: int) -> Any:
    shape = (other[:dim] + [rows] + other[dim:]) if len(other) >= dim else [rows]
    values = torch.arange(start, start + math.prod(shape)).reshape(shape)
    return values.to(dtype) if isinstance(dtype, torch.dtype) else values.numpy().astype(dtype)


def leaves(rows: int, dim: int) -> st.SearchStrategy[Any]:
    other = st.lists(st.integers(0, 3), max_size=2)
    return st.builds(make_leaf, st.just(rows), st.just(dim), other, st.sampled_from(TORCH + NUMPY), st.integers(0, 9))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, inner, max_size=3)
    several = st.lists(inner, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda items: defaultdict(list, items)),
        dicts.map(Words),
        st.builds(Named, inner, inner),
        st.builds(Frozen, inner, inner),
        st.builds(Output, inner, inner, inner),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int, int]:
    """A batch, the rows of it and their dimension."""
    rows, dim = draw(st.integers(0, 20)), draw(st.integers(0, 1))
    batch = draw(st.recursive(leaves(rows, dim) | constants, containers, max_leaves=6))
    return batch, rows, dim


@given(batches(), st.integers(1, 9))
def test_gather_is_the_inverse_of_scatter(batch: tuple[Any, int, int], shards: int) -> None:
    whole, rows, dim = batch
    pieces = scatter(whole, shards, dim)
    assert_same(gather(pieces, dim=dim), whole)
    if num_rows(whole, dim) is not None:
        counts = [count for piece in pieces if (count := num_rows(piece, dim)) is not None]
        assert sum(counts) == rows
        assert_same(gather(pieces, counts, dim), whole)


@given(batches(), st.integers(1, 9))
def test_every_leaf_is_cut_as_torch_chunk_cuts_it(batch: tuple[Any, int, int], shards: int) -> None:
    whole, rows, dim = batch
    assume(rows > 0)
    pieces = [flatten(piece)[0] for piece in scatter(whole, shards, dim)]
    for index, leaf in enumerate(flatten(whole)[0]):
        at = 0 if leaf.ndim == 1 else dim
        positions = torch.arange(rows).chunk(shards)
        assert len(pieces) == len(positions)
        for piece, where in zip(pieces, positions, strict=True):
            expected = leaf.index_select(at, where) if isinstance(leaf, torch.Tensor) else leaf.take(where, at)
            assert_same(piece[index], expected)
        if isinstance(leaf, torch.Tensor):
            assert_same([piece[index] for piece in pieces], list(leaf.chunk(shards, at)))


@given(batches())
def test_flatten_and_json_lose_nothing(batch: tuple[Any, int, int]) -> None:
    found, spec = flatten(batch[0])
    assert len(spec.paths) == len(found)
    assert_same(unflatten(spec, found), batch[0])
    read = Spec.from_json(json.loads(json.dumps(spec.to_json())))
    assert read == spec
    rebuilt = unflatten(read, found)
    assert_same(rebuilt, batch[0])


# --- against nn.DataParallel ---


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's scatter_gather with chunk and cat in place of copies between GPUs."""

    def chunk(devices: Sequence[int], _sizes: None, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.chunk(len(devices), dim)

    def cat(_device: str, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        if all(tensor.ndim == 0 for tensor in tensors) and dim == 0:
            warnings.warn("gather along dimension 0, but all input tensors were scalars", stacklevel=1)
            tensors = tuple(tensor.view(1) for tensor in tensors)
        return torch.cat(tensors, dim)

    monkeypatch.setattr(scatter_gather, "Scatter", types.SimpleNamespace(apply=chunk))
    monkeypatch.setattr(scatter_gather, "Gather", types.SimpleNamespace(apply=cat))


INPUTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], int, int]] = {
    "one": ((t(30, 5),), {}, 8, 0),
    "one device": ((t(30, 5),), {}, 1, 0),
    "fewer shards than devices": ((t(10, 5),), {}, 8, 0),
    "rows fewer than devices": ((t(2, 5), t(2)), {"mask": t(2, 1)}, 8, 0),
    "several": ((t(7, 2), t(7), t(7, 1, 3)), {}, 3, 0),
    "nested": ((t(6, 2), [t(6), (t(6, 3),)], {"a": t(6, 1), "b": [t(6)]}), {}, 4, 0),
    "kwargs only": ((), {"input": t(9, 2)}, 2, 0),
    "kwargs nested": ((), {"input": {"data": [t(9, 2), t(9)], "more": (t(9),)}}, 2, 0),
    "empty list": ((t(9, 2),), {"input": {"data": t(9), "none": []}}, 2, 0),
    "empty dict": ((t(9, 2),), {"input": {"data": t(9), "none": {}}}, 2, 0),
    "empty tuple": ((t(9, 2),), {"input": {"data": t(9), "none": ()}}, 2, 0),
    "constants": ((t(9, 2), 3, None, "mode", 0.5), {"flag": True, "names": ["x", "y"]}, 3, 0),
    "named tuple": ((Named(t(5, 2), [t(5)]),), {}, 2, 0),
    "ordered": ((OrderedDict(b=t(5), a=t(5, 2)),), {}, 2, 0),
    "dtypes": ((t(5, dtype=torch.int64), t(5, dtype=torch.bool), t(5, dtype=torch.bfloat16)), {}, 2, 0),
    "dim 1": ((t(3, 10, 2), (t(2, 10),)), {"hidden": t(1, 10, 4)}, 4, 1),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("args", "kwargs", "devices", "dim"), INPUTS.values(), ids=INPUTS)
def test_scatter_as_data_parallel(args: Any, kwargs: Any, devices: int, dim: int) -> None:
    expected = scatter_gather.scatter_kwargs(args, kwargs, range(devices), dim)
    if not args:  # torch drops the empty tuple's copies and fills up
        assert expected[0] == ((),) * len(expected[1])
    assert_same(scatter((args, kwargs), devices, dim), [*zip(*expected, strict=True)])


@pytest.mark.usefixtures("on_cpu")
def test_scatter_without_leaves_goes_to_all_as_data_parallel() -> None:
    batch = ["x", {"n": 3}]
    expected = scatter_gather.scatter(batch, range(3))
    assert scatter(batch, 3) == expected == [batch] * 3


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x.sin()),
    "list": lambda x: [x, x > 3],
    "dict": lambda x: {"b": x, "a": [x.cos()]},
    "nested": lambda x: [x, (x.sin(), [x + 1]), OrderedDict(a=x, b=[x.sin()])],
    "ordered": lambda x: OrderedDict(b=x, a=x.long()),
    "named": lambda x: Named(x, (x * 2,)),
    "none": lambda x: (x, None),
    "half": lambda x: x.bfloat16(),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("model", OUTPUTS.values(), ids=OUTPUTS)
def test_gather_as_data_parallel(model: Callable[[torch.Tensor], Any], dim: int) -> None:
    whole = t(11, 10)
    pieces = whole.chunk(4, dim)
    merged = gather([model(piece) for piece in pieces], [piece.shape[dim] for piece in pieces], dim)
    assert_same(merged, model(whole))
    assert_same(merged, scatter_gather.gather([model(piece) for piece in pieces], "cpu", dim))


@pytest.mark.parametrize("model", [lambda x: x.max(dim=1), lambda x: {"top": x.topk(2)}])
def test_torch_return_types_are_tuples(model: Callable[[torch.Tensor], Any]) -> None:
    whole = t(7, 4).sin()
    merged = gather([model(piece) for piece in whole.chunk(3)], [3, 3, 1])
    assert_same(merged, model(whole))
    found, spec = flatten(whole.max(dim=1))
    assert_same(unflatten(Spec.from_json(spec.to_json()), found), tuple(whole.max(dim=1)))


# --- where nn.DataParallel is quiet or breaks ---


@pytest.mark.usefixtures("on_cpu")
def test_unequal_rows_are_an_error_and_not_cut_off() -> None:
    batch = ({"x": t(8, 2)}, t(3))
    quiet = scatter_gather.scatter(batch, range(4))
    assert sum(len(piece[0]["x"]) for piece in quiet) == 6
    with pytest.raises(DataError, match=r"'0\.x' has 8 \(size \[8, 2\]\) and input '1' has 3 \(size \[3\]\)"):
        scatter(batch, 4)


@pytest.mark.usefixtures("on_cpu")
def test_constants_beside_few_rows_make_no_shards() -> None:
    args, kwargs = (t(2, 4),), {"mode": "sum"}
    broken = scatter_gather.scatter_kwargs(args, kwargs, range(8))
    assert broken[0][2:] == ((),) * 6
    assert_same(scatter((args, kwargs), 8), [((t(2, 4)[:1],), kwargs), ((t(2, 4)[1:],), kwargs)])


@pytest.mark.usefixtures("on_cpu")
def test_scalars_are_merged_only_where_a_shard_is_a_row() -> None:
    losses = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}]
    with pytest.warns(UserWarning, match="scalars"):
        assert scatter_gather.gather(losses, "cpu")["loss"].shape == (2,)
    assert_same(gather(losses, [1, 1]), {"loss": torch.tensor([1.0, 2.0])})
    assert_same(gather([np.array(3), np.array(4)], [1, 1], dim=1), np.array([3, 4]))
    for rows in ([1, 2], None):
        with pytest.raises(ModelError, match=r"'loss' is a scalar per shard, not per row: return one value"):
            gather(losses, rows)


A, B = t(2, 3), t(1, 3)
UNLIKE: dict[str, tuple[list[Any], list[int] | None, str]] = {
    "missing key": ([{"a": A, "b": A}, {"a": B}], None, "shard 1: output 'b' is nothing, .* is a tensor"),
    "extra key": ([{"a": A}, {"a": B, "b": B}], None, "shard 1: output 'b' is a tensor .* is nothing"),
    "other key": ([{"a": A}, {"b": B}], None, "shard 1: output 'a' is nothing"),
    "length": ([[A], [A], [B, B]], None, "shard 2: output is a list of 2, that of shard 0 is a list of 1"),
    "type": ([{"h": (A,)}, {"h": [B]}], None, "'h' is a list of 1, that of shard 0 is a tuple of 1"),
    "None": ([(A, A), (B, None)], None, "shard 1: output '1' is None, that of shard 0 is a tensor"),
    "None first": ([(A, None), (B, B)], None, "shard 1: output '1' is a tensor or array, .* None"),
    "constant": ([(A, "x"), (B, "y")], None, "shard 1: output '1' is 'y', that of shard 0 is 'x'"),
    "number": ([{"n": 1}, {"n": 2}], None, "shard 1: output 'n' is 2, that of shard 0 is 1"),
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


class Odd:
    """Compares as tables and arrays do: not with a bool."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __eq__(self, other: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [[True], "yes", np.array([True]), np.array([1, 1]), RuntimeError("no")])
def test_constants_without_a_plain_equality_compare_by_identity(answer: Any) -> None:
    odd = Odd(answer)
    assert gather([odd, odd]) is odd
    with pytest.raises(ModelError, match="Odd"):
        gather([odd, Odd(answer)])


def test_equal_constants_stay() -> None:
    nan = float("nan")
    merged = gather([{"n": nan, "m": np.float32(2)}, {"m": np.float32(2), "n": -nan}])
    assert list(merged) == ["n", "m"] and math.isnan(merged["n"]) and merged["m"] == 2


def test_keys_may_come_in_another_order() -> None:
    assert_same(gather([{"a": A, 1: A}, {1: B + 1, "a": B}]), {"a": torch.cat([A, B]), 1: torch.cat([A, B + 1])})
    assert flatten({"a": A, "b": B})[1] != flatten({"b": B, "a": A})[1]


def test_keys_that_look_alike_are_told_apart() -> None:
    merged = gather([{"1": A, 1: A + 9, "1.0": A}, {"1.0": B, 1: B + 9, "1": B}])
    assert_same(merged[1], torch.cat([A, B]) + 9)


# --- rows ---


def test_scatter_gives_views_that_may_be_written_to() -> None:
    x, y = t(6, 2).requires_grad_() * 1, np.arange(6)
    first, _ = scatter((x, y), 2)
    first[0].mul_(2)
    first[1][:] = 7
    assert x.tolist()[:2] == [[0, 2], [4, 6]] and y.tolist() == [7, 7, 7, 3, 4, 5]


def test_constants_are_the_same_object_on_every_shard() -> None:
    thing = object()
    assert all(piece["o"] is thing for piece in scatter({"x": A, "o": thing}, 2))


def test_one_tree_gives_its_own_tensors() -> None:
    weight = torch.nn.Parameter(A)
    assert gather([[weight]], [2])[0] is weight


def test_a_batch_without_rows_is_one_shard() -> None:
    assert_same(scatter([t(0, 3), "x"], 4), [[t(0, 3), "x"]])


def test_string_arrays_may_differ_in_width() -> None:
    words = np.array(["a", "bb", "cccc"])
    assert_same(gather([words[:2].astype("U2"), words[2:]]), words)


def test_gradients_flow_through() -> None:
    x = t(5, 2).requires_grad_()
    gather([piece * (index + 1) for index, piece in enumerate(scatter(x, 2))], [3, 2]).sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [1, 1, 1, 2, 2]


def test_rows_dim() -> None:
    assert [rows_dim(t(4, 3), 0), rows_dim(t(4, 3), 1), rows_dim(t(4, 3), -1), rows_dim(t(4), 1)] == [0, 1, 1, 0]
    for leaf in (t(), t(2, 2), np.array(1)):
        with pytest.raises(DataError, match="has no dimension 2"):
            rows_dim(leaf, 2)


def test_num_rows() -> None:
    assert num_rows({"x": t(3, 5, 2), "labels": t(5)}, dim=1) == 5
    assert num_rows([None, "x"]) is None
    with pytest.raises(DataError, match=r"input 'x\.0': size \[\] has no dimension 0"):
        num_rows({"x": [t()]})
    with pytest.raises(ValueError, match="at least 1"):
        scatter(A, 0)


# --- the nesting ---


def test_paths() -> None:
    batch = {"h": (A, [A]), 3: Named(A, "s"), "o": Output(logits=A), "f": Frozen(A)}
    assert flatten(batch)[1].paths == ["h.0", "h.1.0", "3.x", "o.logits", "f.x"]
    assert flatten(A)[1].paths == [""]


def test_sizes_are_plain() -> None:
    seen = sizes((A, {"m": [np.zeros((2, 1)), None, "s"]}, Output(loss=t()), Named(A, torch.Size([1])), 10**60))
    plain = {"m": [torch.Size([2, 1]), None, "'s'"]}
    assert seen == (A.shape, plain, {"loss": torch.Size([])}, Named(A.shape, ("1",)), "1" + "0" * 39)
    assert isinstance(seen[0], torch.Size)


def test_map_leaves() -> None:
    assert_same(map_leaves(lambda leaf: leaf[:1], Frozen(A, [None, A])), Frozen(A[:1], [None, A[:1]]))
    with pytest.raises(ValueError, match="got 1 leaves for the 2 places"):
        unflatten(flatten((A, A))[1], [A])


def test_what_is_set_after_init_stays() -> None:
    frozen = Frozen(A)
    object.__setattr__(frozen, "late", A + 1)
    assert_same(gather(scatter(frozen, 2)).late, A + 1)


def test_fields_that_are_none_stay_none() -> None:
    piece, _ = scatter(Output(logits=A), 2)
    assert list(piece) == ["logits"] and piece.loss is None


class Locked(dict[str, Any]):
    def __init__(self) -> None:
        super().__init__()


def test_a_class_that_cannot_be_rebuilt_is_named() -> None:
    with pytest.raises(Error, match="a Locked cannot be made again from what it holds"):
        scatter(Locked(), 2)


# --- JSON ---


@pytest.mark.parametrize("value", [object(), torch.float32, {1, 2}, np.float32(1), b"x"])
def test_json_holds_plain_constants_only(value: Any) -> None:
    with pytest.raises(ModelError, match=rf"output 'a\.0' holds a {type(value).__qualname__}"):
        flatten({"a": [value]})[1].to_json()
    with pytest.raises(ModelError, match="holds a tuple"):
        flatten({(1, 2): A})[1].to_json()


def read_with_type(value: Any, name: str) -> Any:
    found, spec = flatten(value)
    return unflatten(Spec.from_json(spec.to_json() | {"type": name}), found)


@pytest.fixture
def lazy_module() -> Iterator[str]:
    """A module that imports on access to what it lacks, as large libraries do."""

    def fail(name: str) -> Any:
        raise AssertionError(f"{name} was looked up with getattr")

    module = types.ModuleType("lazy_module")
    module.__dict__["__getattr__"] = fail
    sys.modules["lazy_module"] = module
    yield "lazy_module:Output"
    del sys.modules["lazy_module"]


def test_json_never_imports(lazy_module: str) -> None:
    for name in ("this:Output", lazy_module):
        assert_same(read_with_type(Output(logits=A), name), {"logits": A})
    assert "this" not in sys.modules


@pytest.mark.parametrize("name", ["subprocess:Popen", "builtins:eval", "no:No", "a.b", f"{__name__}:Named.x"])
def test_json_takes_no_class_of_another_sort(name: str) -> None:
    for value in (Frozen(A, B), Words(x=A, y=B, late=0), Output(logits=A)):
        items = value if isinstance(value, Mapping) else vars(value)
        assert_same(read_with_type(value, name), dict(items))


def test_json_makes_named_tuples_that_are_not_there() -> None:
    local = namedtuple("local", "x y")  # noqa: PYI024
    found, spec = flatten([local(A, 1), local(B, 2)])
    made = unflatten(Spec.from_json(spec.to_json()), found)
    assert made[0]._fields == ("x", "y") and type(made[0]).__name__ == "local" and made[0].y == 1
    assert type(made[0]) is type(made[1]) is not local
    assert Spec.from_json(spec.to_json()) == Spec.from_json(spec.to_json()) == flatten(made)[1]


def test_json_takes_no_class_with_other_fields() -> None:
    assert_same(read_with_type({"x": A}, f"{__name__}:Frozen"), {"x": A})
    changed = flatten(Frozen(A))[1].to_json()
    changed["keys"][0] = "old"
    assert_same(unflatten(Spec.from_json(changed), [A]), {"old": A, "y": None, "late": 0})


def test_docstrings() -> None:
    failed, tried = doctest.testmod(tree)
    assert (failed, tried) == (0, 3)
