"""What goes to the workers of a parallel module by value: by content, with its gradient, or refused by its path."""

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, weight_norm

import dp_ray
from dp_ray.errors import DataError, JobError, ModelError
from dp_ray.parallel.exchange import SharedWorkers
from tests.support import parallel_models as models
from tests.support.cluster import ROOT

num_workers = 0  # of the modules of these tests, which share them


@pytest.fixture(scope="module", autouse=True, params=[0, pytest.param(2, marks=[pytest.mark.ray, pytest.mark.full])])
def workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """This process, or two workers on Ray."""
    global num_workers
    num_workers = request.param
    address = request.getfixturevalue("cluster").address if num_workers else None
    with contextlib.chdir(ROOT), dp_ray.DataParallel(nn.Identity(), num_workers, address=address, quiet=True):
        yield
        for one in list(SharedWorkers.by_owner.values()):
            one.close()


def parallel(module: nn.Module, **keys: Any) -> dp_ray.DataParallel:
    return dp_ray.DataParallel(module, num_workers, quiet=True, **{"shards": 2, **keys})


def assert_close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def check(model: nn.Module, bare: nn.Module, *inputs: torch.Tensor, wanting: tuple[torch.Tensor, ...] = ()) -> None:
    """Outputs and gradients are those of the bare module, which may be the wrapped one itself."""
    wanted = [*bare.parameters(), *wanting]
    (got, found), (output, expected) = [
        (one(*inputs), torch.autograd.grad(one(*inputs).square().sum(), wanted, allow_unused=True))
        for one in (model, bare)
    ]
    assert_close(got, output)
    assert_close(found, expected)


def test_a_change_within_an_attribute_is_seen_and_no_change_is_none() -> None:
    torch.manual_seed(0)
    bare = models.Holds()
    model, inputs = parallel(bare), torch.randn(5, 3)
    for what, change in models.CHANGES.items():
        before = model._watch.look(bare)
        change(bare)
        assert model._watch.look(bare) is not before, what
        check(model, bare, inputs, wanting=(bare.hidden[0].weight,))
        assert model._watch.look(bare) is model._watch.look(bare), f"after {what} it changes by itself"


def test_another_module_takes_the_place_of_the_first() -> None:
    model, inputs = parallel(nn.Linear(3, 2)), torch.randn(5, 3)
    model(inputs)
    model.module = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    check(model, model.module, inputs)


def test_a_list_has_the_parameter_that_a_waiting_graph_leaves_behind() -> None:
    bare, inputs = models.Holds(), torch.randn(5, 3)
    model = parallel(bare)
    plain = copy.deepcopy(bare)
    first, wanted = model(inputs), plain(inputs)
    with torch.no_grad():
        bare.weight.mul_(3)
    check(model, bare, inputs)
    (got,) = torch.autograd.grad(first.sum(), bare.weight)
    assert_close(got, torch.autograd.grad(wanted.sum(), plain.weight)[0])


def test_a_tensor_that_is_no_parameter_gets_its_gradient() -> None:
    bare, inputs = models.Holds(), torch.randn(5, 3)
    bare.own.requires_grad_()
    leaf = torch.randn(3, requires_grad=True)
    bare.array = np.array(2.0)
    check(parallel(bare), bare, inputs, wanting=(bare.own,))
    bare.own = leaf * 2  # of a graph
    model = parallel(bare)
    output = model(inputs).sum()
    with pytest.raises(ModelError, match=r"the module's attribute own holds a tensor of a graph, .*functional_call"):
        output.backward()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_graph_that_is_freed_may_have_left_a_tensor_in_an_attribute() -> None:
    torch.manual_seed(0)
    bare: Any = nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.Tanh())
    bare.last = bare(torch.randn(2, 3))
    bare.last.sum().backward()
    model, inputs = parallel(bare), torch.randn(5, 3)
    for _ in range(3):
        wanted = torch.autograd.grad(bare(inputs).sum(), list(bare.parameters()))
        assert_close(torch.autograd.grad(model(inputs).sum(), list(bare.parameters())), wanted)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_graph_in_an_object_is_refused_by_its_path(shards: int) -> None:
    model, inputs = parallel(models.MakesObject(), shards=shards), torch.randn(4, 3)
    with pytest.raises(
        ModelError, match=r"output 'policy\.\S+' has a graph, .* in a Categorical.* return the tensor"
    ):
        model(inputs)
    takes = parallel(models.TakesObject(), shards=shards)
    given = models.Config()
    given.scale = torch.ones(3, requires_grad=True)  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"input '1\.scale' wants a gradient, .* in a Config.* pass the tensor"):
        takes(inputs, given)
    with pytest.raises(DataError, match=r"input 'given\.0\.weight' wants a gradient, .* in a Sequential"):
        takes(inputs, given=nn.Sequential(nn.Linear(3, 3)))
    teacher = nn.Linear(3, 3).requires_grad_(False)
    assert_close(takes(inputs, teacher), teacher(inputs))
    with torch.no_grad():
        assert_close(takes(inputs, given), inputs)


def test_a_parallel_module_goes_as_its_bare_module() -> None:
    torch.manual_seed(0)
    bare, inputs = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(5, 3)
    model = parallel(bare)
    again = parallel(model)
    assert again.module is bare
    check(again, bare, inputs)
    handle = bare.register_forward_hook(lambda _, args, output: output * len(list(model.parameters())))
    check(model, bare, inputs)
    check(again, bare, inputs)
    handle.remove()
    outer = nn.Sequential(model, nn.Linear(3, 1))
    plain = nn.Sequential(bare, outer[1])
    check(parallel(outer), plain, inputs)
    takes = parallel(models.TakesObject())
    with torch.no_grad():
        assert_close(takes(inputs, model), bare(inputs))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal, weight_norm])
def test_a_parametrized_module_runs(wrap: Any) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(wrap(nn.Linear(3, 3)), nn.Tanh())
    check(parallel(bare), bare, torch.randn(5, 3))


def test_spectral_norm_runs_with_the_buffers_of_shard_0() -> None:
    torch.manual_seed(0)
    bare, inputs = parametrizations.spectral_norm(nn.Linear(3, 3)), torch.randn(4, 3)
    model = parallel(bare)
    state = copy.deepcopy(bare.state_dict())
    got = model(inputs)
    found = torch.autograd.grad(got.sum(), list(bare.parameters()))
    after = copy.deepcopy(bare.state_dict())
    bare.load_state_dict(state)
    wanted = bare(inputs)
    assert_close(got, wanted)
    assert_close(found, torch.autograd.grad(wanted.sum(), list(bare.parameters())))
    assert_close(after, bare.state_dict())


def test_functional_call_has_the_gradient_of_its_tensors() -> None:
    torch.manual_seed(0)
    bare, inputs = nn.Linear(3, 2), torch.randn(5, 3)
    model, leaf = parallel(bare), torch.randn(2, 3, requires_grad=True)

    def run(one: nn.Module, name: str) -> Any:
        output = torch.func.functional_call(one, {name: leaf * 2}, (inputs,))
        return output, torch.autograd.grad(output.square().sum(), [leaf, bare.bias])

    for _ in range(2):
        assert_close(run(model, "module.weight"), run(bare, "weight"))
        check(model, bare, inputs)


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"0\.weight is a tensor of the meta device"):
        parallel(nn.Sequential(nn.Linear(2, 2, device="meta")))
    bare = nn.Linear(2, 2)
    bare.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(ModelError, match=r"edges is a tensor of layout torch\.sparse_coo"):
        parallel(bare)
    model = parallel(nn.Identity())
    with pytest.raises(DataError, match="input '0' is a tensor of the meta device"):
        model(torch.ones(2, device="meta"))
    with pytest.raises(DataError, match=r"input '0' is a tensor of layout torch\.sparse_coo"):
        model(torch.eye(2).to_sparse())
    with pytest.raises(DataError, match="input '0' is a nested tensor"):
        model(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    with pytest.raises(DataError, match="input '0': cannot be pickled for the workers: TypeError: cannot pickle"):
        model(threading.Lock())
    with pytest.raises(JobError, match="batch_size: is a key of a job, not of workers alone; theirs are workers, "):
        parallel(nn.Identity(), batch_size=3)
    with pytest.raises(JobError, match="shards: must be a number of 1 or more, got 'auto'"):
        parallel(nn.Identity(), shards="auto")
    with pytest.raises(JobError, match="got the class Linear"):
        parallel(nn.Linear)  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(JobError, match="TorchScript"):
        parallel(nn.Sequential(scripted))


@pytest.mark.parametrize("way", ["to_sparse", "meta"])
def test_an_output_that_cannot_be_sent_is_refused_by_its_path(way: str) -> None:
    with pytest.raises(ModelError, match=r"output 'odd\.0' is a tensor of (the meta device|layout torch.sparse_coo)"):
        parallel(models.Odd(way))(torch.ones(4, 2))


def test_a_transform_of_torch_func_is_refused() -> None:
    model = parallel(nn.Linear(2, 2))
    for run in (torch.vmap(model), torch.func.grad(lambda one: model(one).sum())):
        with pytest.raises(DataError, match=r"input '0' is a tensor within a transform of torch\.func"):
            run(torch.ones(4, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of what torch imports for it
def test_forward_mode_derivatives_are_refused() -> None:
    model = parallel(nn.Linear(2, 2))
    with forward_ad.dual_level():
        inputs = forward_ad.make_dual(torch.ones(4, 2), torch.ones(4, 2))  # type: ignore[no-untyped-call]
        with pytest.raises(DataError, match=r"input '0' is a tensor with a tangent of forward-mode derivatives"):
            model(inputs)


class Turns(nn.Module):
    """Gives its rows, of dimension 1, in dimension 0 of its second output."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return inputs, inputs.transpose(0, 1), inputs.sum((0, 2))


def test_an_output_without_rows_in_the_dimension_that_holds_them_is_named() -> None:
    says = r"shard 0: output '1' has size \[4, 3, 2\], without the shard's 4 rows in dimension 1"
    with pytest.raises(DataError, match=says):
        parallel(Turns(), dim=1)(torch.ones(3, 7, 2))


def test_a_sparse_attribute_goes_by_value_and_by_content() -> None:
    bare = models.Holds()
    bare.own = torch.eye(3).to_sparse()
    model = parallel(bare)
    assert model._watch.look(bare) is model._watch.look(bare)
    before = model._watch.look(bare)
    bare.own = (torch.eye(3) * 2).to_sparse()
    assert model._watch.look(bare) is not before


def test_inference_tensors_are_usual_parameters_and_inputs() -> None:
    with torch.inference_mode():
        bare = nn.BatchNorm1d(3)
        inputs = torch.randn(6, 3)
    plain, model = copy.deepcopy(bare), parallel(bare)
    scale = torch.randn(6, 3, requires_grad=True)
    with torch.inference_mode():
        assert_close(model(inputs), torch.cat([copy.deepcopy(plain)(one) for one in inputs.chunk(2)]))
    adds = parallel(models.Adds())
    adds(scale, inputs).sum().backward()
    assert scale.grad is not None


def test_torch_compile_goes_on_around_the_call() -> None:
    torch.manual_seed(0)
    bare, inputs = nn.Linear(3, 2), torch.randn(5, 3)
    model = parallel(bare)
    check(torch.compile(model, backend="eager"), bare, inputs)  # type: ignore[arg-type]
    around: Any = torch.compile(nn.Sequential(model, nn.Tanh()), backend="eager")
    check(around, nn.Sequential(bare, nn.Tanh()), inputs)


def test_a_copy_is_a_module_of_its_own() -> None:
    torch.manual_seed(0)
    model, inputs = parallel(nn.Linear(3, 2)), torch.randn(5, 3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.module.get_parameter("weight").mul_(2)
    check(other, other.module, inputs)
    check(model, model.module, inputs)
    assert not torch.equal(other(inputs), model(inputs))
