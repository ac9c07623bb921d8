"""The cases of torch's own tests of nn.DataParallel (test/distributed/test_data_parallel.py), on workers of Ray.

`CASES` lists them all by their names there: each has a check here, or the reason why there is none.
"""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.errors import ModelError, cause_of
from dp_ray.parallel.exchange import SharedWorkers
from dp_ray.tensors.tree import flatten, map_leaves
from tests.support import parallel_models as models
from tests.support.cluster import ROOT, Cluster

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def workers(cluster: Cluster) -> Iterator[None]:
    """Two workers, which all modules of these tests share."""
    with contextlib.chdir(ROOT), dp_ray.DataParallel(nn.Identity(), 2, address=cluster.address, quiet=True):
        yield
        for one in list(SharedWorkers.by_owner.values()):
            one.close()


def parallel(module: nn.Module, **keys: Any) -> dp_ray.DataParallel:
    return dp_ray.DataParallel(module, 2, quiet=True, **keys)


def check(bare: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Outputs, and gradients of inputs and parameters, are the bare module's."""
    model = parallel(copy.deepcopy(bare))
    found = []
    for one in (model, bare):
        own_args, own_kwargs = map_leaves(fresh, (args, kwargs))
        outputs = one(*own_args, **own_kwargs)
        ends: list[Any] = flatten(outputs)[0]
        torch.stack([end.abs().sum() for end in ends]).sum().backward()  # type: ignore[no-untyped-call]
        inputs: list[Any] = flatten((own_args, own_kwargs))[0]
        found.append((outputs, [leaf.grad for leaf in inputs], [each.grad for each in one.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def fresh(leaf: Any) -> torch.Tensor:
    copied: torch.Tensor = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copied


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(10, 5)


def wanting(*size: int, **keys: Any) -> torch.Tensor:
    return torch.randn(*size, requires_grad=True, **keys)


def buffers_requiring_grad() -> None:
    bare = models.WithBuffers(torch.randn(6, requires_grad=True, dtype=torch.double))
    model, inputs = parallel(bare), torch.randn(2, 6, dtype=torch.double)
    assert torch.autograd.gradcheck(lambda _: model(inputs), (bare.t_rg,))


def rnn() -> None:
    torch.manual_seed(0)
    check(models.Recurrent(), torch.randint(0, 9, (6, 7)))


def lazy_linear() -> None:
    with pytest.raises(ModelError, match="weight has no shape yet: run one forward of the bare module first"):
        parallel(nn.LazyLinear(3))


def passes_exception() -> None:
    with pytest.raises(ModelError, match="LookupError: too large") as found:
        parallel(models.RaisesFrom(0.0))(torch.ones(4, 1))
    assert isinstance(cause_of(found.value), LookupError)


def autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert parallel(module())(torch.randn(4, 10)).dtype == torch.bfloat16
    assert parallel(module())(torch.randn(4, 10)).dtype == torch.float32


def no_refcycles() -> None:
    model = parallel(module())
    gone = weakref.ref(model)
    gc.disable()
    try:
        model(torch.randn(4, 10)).sum().backward()
        del model
        assert gone() is None
    finally:
        gc.enable()


def no_grad() -> None:
    model = parallel(models.TellsGrad())
    with torch.no_grad():
        assert model(torch.ones(4, requires_grad=True)).tolist() == [0.0] * 4
    assert model(torch.ones(4, requires_grad=True)).tolist() == [1.0] * 4


def sparse() -> None:
    torch.manual_seed(0)
    bare = nn.Embedding(10, 3, sparse=True)
    model, inputs = parallel(copy.deepcopy(bare)), torch.tensor([[1, 2], [3, 1], [9, 1]])
    model(inputs).sum().backward()
    bare(inputs).sum().backward()
    (got,) = [one.grad for one in model.parameters()]
    assert got is not None and got.is_sparse and bare.weight.grad is not None
    torch.testing.assert_close(got.to_dense(), bare.weight.grad.to_dense())


def zero_inputs() -> None:
    outputs = parallel(models.NoInputs())()
    assert outputs.tolist() == [1.0, 1.0]


def module_kwargs_only() -> None:
    check(models.Keywords(), input=wanting(20, 10))
    several: list[Any] = [[], {}, ()]
    for empty in several:
        check(models.Keywords(), input=wanting(20, 10), unused=empty)


def parameter_lists() -> None:
    check(models.Lists(), wanting(4, 3))


def strided_layout() -> None:
    bare = nn.Conv2d(3, 4, 3)
    bare.weight.data = bare.weight.data.contiguous(memory_format=torch.channels_last)
    model = parallel(bare)
    model(torch.randn(4, 3, 5, 5)).sum().backward()
    assert bare.weight.grad is not None and bare.weight.grad.stride() == bare.weight.stride()


def saved_and_loaded() -> None:
    model = parallel(module())
    again = copy.deepcopy(model)
    assert torch.equal(again(torch.ones(4, 10)), model(torch.ones(4, 10)))
    other = nn.Linear(10, 5)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(torch.ones(4, 10)), model.module(torch.ones(4, 10)))


def zero_grad() -> None:
    model = parallel(module())
    model(torch.randn(4, 10)).sum().backward()
    model.zero_grad()
    assert all(one.grad is None for one in model.parameters())


def dicts_of_different_lengths() -> None:
    with pytest.raises(ModelError, match="all shards must give the same structure"):
        parallel(models.DictOfRows())(torch.tensor([1, 1, 2]))


GPUS = "a worker has one device, its own: there are no device_ids"
PARTS = "scatter and gather of nn.DataParallel have no counterpart: tests/tensors/test_tree_and_scatter.py"

CASES: dict[str, Callable[[], None] | str] = {
    "data_parallel_buffers_requiring_grad": buffers_requiring_grad,
    "data_parallel_rnn": rnn,
    "data_parallel_lazy_linear": lazy_linear,
    "parallel_apply": "workers run what each call sends; the function of this name has no counterpart",
    "parallel_apply_autocast": autocast,
    "parallel_apply_passes_exception": passes_exception,
    "data_parallel_multiple_input": lambda: check(models.TwoInputs(), wanting(4, 3), wanting(4, 3)),
    "data_parallel_small_back": lambda: check(module(), torch.randn(20, 10)),
    "data_parallel_model_device": GPUS,
    "data_parallel_model_no_refcycles": no_refcycles,
    "data_parallel_no_grad": no_grad,
    "data_parallel": lambda: check(module(), wanting(20, 10)),
    "data_parallel_sparse": sparse,
    "data_parallel_nested_output": lambda: check(models.NestedOutput(), wanting(4, 3)),
    "data_parallel_nested_input": lambda: check(models.NestedInput(), [wanting(4, 3), (wanting(4, 3),)]),
    "data_parallel_module_zero_inputs": zero_inputs,
    "data_parallel_device_args": GPUS,
    "data_parallel_function_deletion": "it is about the backward of Broadcast over CUDA devices",
    "data_parallel_complex": lambda: check(nn.Linear(3, 2, dtype=torch.cfloat), wanting(5, 3, dtype=torch.cfloat)),
    "scatter_cpu": PARTS,
    "scatter_gpu": PARTS,
    "gather_cpu": PARTS,
    "gather_gpu": PARTS,
    "gather_different_len_dicts": dicts_of_different_lengths,
    "replicate": "workers have copies of their own: test_data_parallel.py::test_only_what_has_changed_is_sent",
    "replicate_buffers": "test_data_parallel.py::test_buffers_are_those_of_shard_0_and_draws_are_by_seed",
    "data_parallel_module": lambda: check(module(), wanting(20, 10)),
    "data_parallel_module_kwargs_only": module_kwargs_only,
    "data_parallel_module_kwargs_only_empty_list": module_kwargs_only,
    "data_parallel_module_kwargs_only_empty_dict": module_kwargs_only,
    "data_parallel_module_kwargs_only_empty_tuple": module_kwargs_only,
    "zero_grad": zero_grad,
    "autocast": autocast,
    "save_replica_module": saved_and_loaded,
    "strided_grad_layout": strided_layout,
    "parameter_list_dict_replica": parameter_lists,
}


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if not isinstance(one, str)])
def test_the_case_of_torch(name: str) -> None:
    case = CASES[name]
    assert not isinstance(case, str)
    case()


def test_each_case_that_is_left_out_has_a_reason() -> None:
    left_out = [one for one in CASES.values() if isinstance(one, str)]
    assert len(left_out) == 10 and all(len(one) > 20 for one in left_out)
