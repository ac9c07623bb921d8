"""What the probe sees against torch's own sizes, how sizes are written down, and the tutorial's lines."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dp_ray.errors import ModelError
from dp_ray.steps.shapes import Probe, Sizes, decode_sizes, encode_sizes, shape_lines

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
        seen, milliseconds = probe.take()
    assert milliseconds >= 0
    return decode_sizes(seen.input_size), decode_sizes(seen.output_size), seen.rows


X, Y = torch.ones(4, 5), torch.ones(4)


def test_one_tensor_is_seen_as_its_size() -> None:
    linear = nn.Linear(5, 2)
    with Probe(linear) as probe:
        output = linear(X)
        seen, _ = probe.take()
    assert seen == Sizes("[4, 5]", "[4, 2]", 4)
    assert (decode_sizes(seen.input_size), decode_sizes(seen.output_size)) == (X.shape, output.shape)


def test_positional_inputs_are_seen_as_a_tuple() -> None:
    assert see(lambda x, y: x, X, Y) == ((X.shape, Y.shape), X.shape, 4)


def test_keyword_inputs_are_seen_by_their_names() -> None:
    assert see(lambda x, mask: x, x=X, mask=Y) == ({"x": X.shape, "mask": Y.shape}, X.shape, 4)


def test_positional_and_keyword_inputs_are_seen_together() -> None:
    assert see(lambda x, mask: x, X, mask=Y) == ({"0": X.shape, "mask": Y.shape}, X.shape, 4)


def test_no_inputs_are_no_rows() -> None:
    assert see(lambda: X) == ({}, X.shape, 0)


def test_nested_inputs_and_outputs_are_seen_in_their_nesting() -> None:
    inputs = {"ids": X, "more": [Y, (X, None)], "text": "hello", "array": Y.numpy()}
    seen = see(lambda given: Pair(Data(given["ids"], "c"), {"0": Y, "1": X}), inputs)
    expected = {"ids": Size([4, 5]), "more": (Size([4]), (Size([4, 5]), None)), "text": "'hello'", "array": Size([4])}
    assert seen == (expected, ({"x": Size([4, 5]), "y": "'c'"}, {"0": Size([4]), "1": Size([4, 5])}), 4)


def test_rows_are_counted_along_the_batch_dimension() -> None:
    assert see(lambda x, y: x, torch.ones(7, 4, 2), Y, batch_dim=1)[2] == 4


def test_a_scalar_output_has_the_empty_size() -> None:
    assert see(lambda x: x.sum(), X) == (Size([4, 5]), Size([]), 4)


def test_the_last_of_several_calls_counts() -> None:
    model = Calls(lambda x: x[:, :1])
    with Probe(model) as probe:
        for rows in (2, 3, 2, 1):
            model(torch.ones(rows, 5))
        assert probe.take()[0] == Sizes("[1, 5]", "[1, 1]", 1)


def test_equal_inputs_with_other_outputs_are_told_apart() -> None:
    widths = iter([1, 2, 3])
    model = Calls(lambda x: torch.ones(len(x), next(widths)))
    with Probe(model) as probe:
        outputs = [(model(X), probe.take()[0].output_size)[1] for _ in range(3)]
    assert outputs == ["[4, 1]", "[4, 2]", "[4, 3]"]


def test_a_model_that_was_not_called_is_an_error() -> None:
    with Probe(nn.Linear(5, 2)) as probe, pytest.raises(ModelError, match="forward was not called"):
        probe.take()


def test_what_was_taken_is_not_seen_again() -> None:
    linear = nn.Linear(5, 2)
    with Probe(linear) as probe:
        linear(X)
        probe.take()
        with pytest.raises(ModelError, match="forward was not called"):
            probe.take()


def test_a_call_that_raised_is_not_seen() -> None:
    linear = nn.Linear(5, 2)
    with Probe(linear) as probe:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear(Y)
        with pytest.raises(ModelError, match="forward was not called"):
            probe.take()


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
    decoded = decode_sizes(encode_sizes(tree))
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
