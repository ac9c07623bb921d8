"""`dp_ray.DataParallel` on real workers, against the bare module in this process."""

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dp_ray
from dp_ray.errors import ClusterError, DataError, JobError, ModelError, cause_of
from dp_ray.parallel.exchange import Workers
from tests.support import parallel_models as models
from tests.support.cluster import ROOT, Cluster

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def workers(cluster: Cluster) -> Iterator[Workers]:
    """Three workers, which all modules of these tests share."""
    with contextlib.chdir(ROOT):
        first = dp_ray.DataParallel(nn.Identity(), 3, address=cluster.address, quiet=True)
        assert Workers.current is not None
        yield Workers.current
        first.close()
        if Workers.current is not None:  # a test that has failed may hold a module
            Workers.current.close()


def parallel(module: nn.Module, workers: int = 3, **keys: Any) -> dp_ray.DataParallel:
    """The module on the workers; `close` is left to the garbage collector, as users do."""
    return dp_ray.DataParallel(module, workers, quiet=True, **keys)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: one.grad for name, one in module.named_parameters()}


def assert_close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@settings(max_examples=25)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.integers(0, 2**32))
def test_outputs_and_gradients_are_the_bare_modules(
    rows: int, shards: int, workers: int, bitwise: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    bare = models.Elementwise()  # each row by the same kernel, however many there are
    model = parallel(copy.deepcopy(bare), workers, shards=shards, bitwise=bitwise)
    inputs = torch.randn(rows, 4)
    weights = torch.randn(rows, 4)
    ours, theirs = (one.clone().requires_grad_() for one in (inputs, inputs))
    got, wanted = model(ours), bare(theirs)
    assert torch.equal(got, wanted)
    (got * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
    for name, gradient in gradients(bare).items():
        assert_close(gradients(model.module)[name], gradient)
    assert [one.input[0] for one in model.shapes] == [len(one) for one in inputs.chunk(shards)]


def test_a_named_batch_of_everything_is_cut_and_merged() -> None:
    model = parallel(models.Nested())
    inputs = {"x": torch.arange(8.0).view(4, 2), "pair": (torch.ones(4), [torch.arange(4)])}
    with torch.no_grad():
        got = model(inputs, scale=torch.tensor(2.0), name="odd", only=None)
    assert torch.equal(got["scaled"], torch.arange(8.0).view(4, 2) * 2)
    assert torch.equal(got["pair"].first, torch.arange(4) + 1)
    assert got["name"] == "odd"
    assert got["whole"].tolist() == [4.0, 4.0]  # 2, 2 rows: a scalar of each shard
    assert [one.rank for one in model.shapes] == [0, 1]


def test_another_dimension_holds_the_rows() -> None:
    torch.manual_seed(0)
    bare = nn.LSTM(3, 4)
    model = parallel(copy.deepcopy(bare), dim=1)
    inputs = torch.randn(5, 7, 3)
    got, (hidden, _) = model(inputs)
    wanted, (last, _) = bare(inputs)
    assert_close(got, wanted)
    assert_close(hidden, last)
    got.sum().backward()
    wanted.sum().backward()
    assert_close(gradients(model.module), gradients(bare))


def test_rows_that_differ_are_an_error_that_names_both() -> None:
    with pytest.raises(DataError, match=r"input '0' has 4 \(size \[4\]\) and input '1' has 3"):
        parallel(models.Adds())(torch.ones(4), torch.ones(3))


def test_an_error_of_the_model_names_the_shard_and_its_sizes() -> None:
    model = parallel(models.RaisesFrom(8.0))
    with pytest.raises(
        ModelError, match=r"call 0, shard 2 of 3 \(rank 2 .*LookupError: too large.* float32 \[2, 2\]"
    ) as found:
        model(torch.arange(12.0).view(6, 2))
    assert isinstance(cause_of(found.value), LookupError)
    assert "in forward" in found.value.__notes__[0]
    assert model(torch.zeros(6, 2)).sum() == 0, "the workers go on"


def test_states_have_no_prefix_and_both_kinds_are_loaded() -> None:
    bare = nn.Linear(2, 3)
    own = nn.Linear(2, 3)
    model = parallel(own)
    theirs = nn.DataParallel(bare).state_dict()
    assert list(model.state_dict()) == list(bare.state_dict()) == ["weight", "bias"]
    for state in (bare.state_dict(), theirs):
        nn.init.zeros_(own.weight)
        model.load_state_dict(state)
        assert torch.equal(own.weight, bare.weight)
    other = nn.Linear(2, 3)
    outer = nn.Sequential(model)
    assert list(outer.state_dict()) == list(nn.Sequential(other).state_dict())
    outer.load_state_dict(nn.Sequential(other).state_dict())
    assert torch.equal(own.weight, other.weight)
    outer.load_state_dict(nn.Sequential(nn.DataParallel(bare)).state_dict())
    assert torch.equal(own.weight, bare.weight)
    with pytest.raises(AttributeError):
        model.weight  # noqa: B018


def test_what_the_model_prints_comes_in_order() -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        outputs = parallel(models.Tutorial(5, 2))(torch.zeros(10, 5))
    lines = [
        f"\tIn Model: input size torch.Size([{rows}, 5]) output size torch.Size([{rows}, 2])" for rows in (4, 4, 2)
    ]
    assert text.getvalue().splitlines() == lines
    assert outputs.shape == (10, 2)


def test_a_second_derivative_and_a_second_backward_are_errors() -> None:
    model = parallel(nn.Linear(2, 1))
    output = model(torch.ones(3, 2)).sum()
    output.backward(retain_graph=True)
    first = copy.deepcopy(gradients(model.module))
    output.backward()
    assert_close(gradients(model.module)["weight"], 2 * first["weight"])  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="a second time"):
        output.backward()
    with pytest.raises(ModelError, match="create_graph=True"):
        torch.autograd.grad(model(torch.ones(3, 2)).sum(), list(model.parameters()), create_graph=True)


def test_too_many_calls_that_wait_are_an_error_that_names_calls_and_bytes() -> None:
    model = parallel(nn.Sequential(nn.Linear(2, 100), nn.Tanh()), max_waiting=3)
    outputs = [model(torch.ones(3, 2)) for _ in range(3)]
    with pytest.raises(
        ModelError, match=r"3 calls .* hold 72 bytes of inputs here, and graphs of up to 1,2\d\d bytes"
    ):
        model(torch.ones(3, 2))
    outputs.pop()
    model(torch.ones(3, 2))


def test_fewer_workers_are_shared_and_more_are_an_error() -> None:
    assert len(parallel(nn.Identity(), 2)(torch.ones(6, 1))) == 6
    with pytest.raises(JobError, match=r"workers: this module asks for 4, .* share 3 workers"):
        parallel(nn.Identity(), 4)
    closed = parallel(nn.Identity())
    closed.close()
    with pytest.raises(ClusterError, match="it was closed"):
        closed(torch.ones(1))


def test_a_module_that_cannot_be_pickled_is_an_error_that_names_the_attribute() -> None:
    with pytest.raises(JobError, match=r"the module's attribute 0\.lock: cannot be pickled .* TypeError"):
        parallel(nn.Sequential(models.Locked()))
