"""Copies of a caller's objects: what a plain training of the object itself would have, on 0 and on N workers."""

import pickle
import threading
import tracemalloc
import types
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.hooks import RemovableHandle

import dp_ray
from dp_ray.cluster.workers import check_can_be_shipped
from dp_ray.engine.ship import pickled_copy, shipment
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from tests.support import training

PICKLER = ray.cloudpickle.CloudPickler


def shipped(value: Any) -> Any:
    """Return what a worker on Ray gets of an object."""
    packed = pickle.dumps(shipment(value, PICKLER), protocol=5)
    tracker = ray.cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    known = dict(tracker)
    tracker.clear()  # another process knows none of the classes that a function has made
    try:
        return pickle.loads(packed).load()
    finally:
        tracker.clear()
        tracker.update(known)


WAYS = {"workers: 0": pickled_copy, "a worker on Ray": shipped}


def gradients(net: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    net(inputs).square().sum().backward()
    found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad()
    return found


def linear(inputs: int = 3, outputs: int = 2) -> Any:
    """Return a layer; Any, since torch's own hooks have no types."""
    return nn.Linear(inputs, outputs)


class Masked(nn.Parameter):
    """A kind of parameter of a user's."""


def masked() -> Any:
    net, mask = linear(), torch.tensor([[1.0], [0.0]])
    net.weight.register_hook(lambda gradient: gradient * mask)
    net.bias.register_hook(lambda gradient: gradient * 3)
    net.bias.register_hook(lambda gradient: gradient + 1)
    return net


def halved_in_place() -> Any:
    net = linear()

    def halve(parameter: Any) -> None:
        assert parameter is net.weight, "the hook's own net is the copy"
        parameter.grad.div_(2)

    net.weight.register_post_accumulate_grad_hook(halve)
    return net


def with_features() -> Any:
    """The second layer takes what a hook keeps of the first."""
    net, kept = nn.Sequential(nn.Linear(3, 3), linear()), []  # type: ignore[var-annotated]

    def keep(_: nn.Module, __: Any, outputs: torch.Tensor) -> None:
        kept[:] = [outputs.detach()]

    net[0].register_forward_hook(keep)
    net[1].register_forward_pre_hook(lambda _, inputs: (inputs[0] + kept[0],))
    net.kept = kept  # type: ignore[assignment]
    return net


def made_in_a_function() -> Any:
    """A method of a local class and a hook share a variable."""
    kept: list[torch.Tensor] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = linear()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.body(inputs)
            return kept.pop() * 2

    net = Net()
    net.body.register_forward_hook(lambda _, __, outputs: kept.append(outputs))
    return net


def with_hooks_of_modules() -> Any:
    net, scale = linear(), torch.tensor(2.0)
    net.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * scale,))
    net.register_forward_hook(lambda _, __, outputs: outputs * scale)
    net.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({prefix + "more": scale}))
    return net


def with_attributes() -> Any:
    net: Any = nn.Sequential(nn.Linear(3, 3), linear())
    net[0].weight.no_decay = True
    net[0].weight.owner = net
    net[1].weight = Masked(torch.randn(2, 3))
    net[1].bias.requires_grad = False
    net[1].bias._is_hf_initialized = True
    net[0].eval()
    net.register_buffer("seen", torch.arange(3), persistent=False)
    return net


def in_shared_memory() -> Any:
    memory = torch.randn(40)
    net = linear()
    net.weight = nn.Parameter(memory[4:10].view(3, 2).t())
    net.bias = nn.Parameter(memory[8:10])
    net.register_buffer("all", memory)
    net.tied = net.weight
    return net


def channels_last() -> Any:
    return nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 2, 1), nn.Flatten()).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]
    )


def used_weight_norm() -> Any:
    net = nn.utils.weight_norm(linear())
    net(torch.ones(1, 3))  # its weight is now no leaf, and deepcopy refuses it
    return net


def lazy() -> Any:
    return nn.Sequential(linear(), nn.LazyBatchNorm1d())


def with_odd_tensors() -> Any:
    net = linear()
    net.register_buffer("sparse", torch.eye(3).to_sparse())
    net.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
    net.register_buffer("steps", torch.tensor(4))
    net.register_buffer("short", torch.randn(3).bfloat16())
    net.register_buffer("nothing", torch.empty(0, 3))
    net.generator = torch.Generator().manual_seed(4)
    return net


def with_own_method() -> Any:
    net = linear()
    net.forward = types.MethodType(lambda self, inputs: nn.functional.linear(inputs, self.weight) * 2, net)
    net.itself = weakref.ref(net)
    return net


def of_linear(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return wrap(linear())


KINDS: list[Callable[[], nn.Module]] = [
    *(masked, halved_in_place, with_features, made_in_a_function, with_hooks_of_modules, with_attributes),
    *(in_shared_memory, channels_last, used_weight_norm, lazy, with_odd_tensors, with_own_method),
    *(partial(of_linear, wrap) for wrap in (parametrizations.weight_norm, parametrizations.orthogonal)),
    *(partial(of_linear, wrap) for wrap in (parametrizations.spectral_norm, nn.utils.spectral_norm, nn.DataParallel)),
]


def told(net: nn.Module) -> Any:
    """Return what a module is, apart from its identity."""
    modules = list(net.named_modules())
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
    return (
        [(name, type(module).__name__, module.training, len(module._forward_hooks)) for name, module in modules],
        [list(module.state_dict()) for _, module in modules],
        [(name, type(tensor), attributes(tensor), content(tensor)) for name, tensor in tensors],
        [(tensor.requires_grad, tensor.is_leaf, tensor.dtype, tensor.layout) for _, tensor in tensors],
    )


def content(tensor: torch.Tensor) -> Any:
    if nn.parameter.is_lazy(tensor):
        return "lazy"
    return tensor.shape, strides(tensor), tensor.is_conj(), tensor.detach().resolve_conj().to_dense().tolist()


def memory(net: nn.Module) -> set[int]:
    tensors = [parameter for parameter in (*net.parameters(), *net.buffers()) if not nn.parameter.is_lazy(parameter)]
    return {
        tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout is torch.strided and tensor.numel()
    }


def strides(tensor: torch.Tensor) -> Any:
    return tensor.stride() if tensor.layout is torch.strided else None


def attributes(tensor: torch.Tensor) -> Any:
    return {name: value if isinstance(value, bool) else type(value) for name, value in vars(tensor).items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: (kind.args[0] if isinstance(kind, partial) else kind).__name__
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:Full backward hook is firing")
def test_a_copy_is_what_the_object_is(kind: Callable[[], nn.Module], way: str) -> None:
    torch.manual_seed(5)
    net, inputs = kind(), torch.randn(4, 3)
    before = told(net)
    copy = WAYS[way](net)
    assert told(copy) == before == told(net)
    assert memory(net).isdisjoint(memory(copy))
    # The copy first: what it does must not be seen by the object, which still does the same.
    state = torch.get_rng_state()
    ours = gradients(copy, inputs)
    assert told(net) == before
    torch.set_rng_state(state)
    assert [gradient.tolist() for gradient in ours] == [gradient.tolist() for gradient in gradients(net, inputs)]
    assert ours


@pytest.mark.parametrize("way", WAYS)
def test_what_objects_share_their_copies_share_and_nothing_with_the_originals(way: str) -> None:
    first, second = WAYS[way]([net := in_shared_memory(), net.all])
    assert first.tied is first.weight and first.all is second
    with torch.no_grad():
        second[8] = 7  # of the memory of all three
    assert first.bias[0] == 7 and first.weight[0, 2] == 7 and net.bias[0] != 7

    net = with_features()
    copy = WAYS[way](net)
    copy(torch.ones(1, 3))
    assert copy.kept and not net.kept

    copy = WAYS[way](with_own_method())
    assert copy.itself() is copy and copy.forward.__self__ is copy
    net = with_attributes()
    assert WAYS[way](net)[0].weight.owner is not net

    net = parametrizations.weight_norm(linear())
    parametrize.remove_parametrizations(WAYS[way](net), "weight")
    net(torch.ones(1, 3))


@pytest.mark.parametrize("way", WAYS)
def test_a_handle_removes_the_copys_hook_and_a_new_hook_takes_no_ones_place(way: str) -> None:
    net = linear()
    net.handle = net.weight.register_hook(torch.zeros_like)
    net.register_forward_hook(lambda _, __, outputs: outputs * 2)
    before = RemovableHandle.next_id
    packed = pickle.dumps(shipment(net, PICKLER))
    try:
        RemovableHandle.next_id = min(net._forward_hooks)  # as in a worker, which has set fewer hooks
        copy = pickle.loads(packed).load() if way != "workers: 0" else pickled_copy(net)
        copy.register_forward_hook(lambda _, __, outputs: outputs * 3)
    finally:
        RemovableHandle.next_id = max(before, RemovableHandle.next_id)
    assert len(copy._forward_hooks) == (2 if way != "workers: 0" else 1)
    copy.handle.remove()
    assert not copy.weight._backward_hooks and len(net.weight._backward_hooks or ()) == 1


@pytest.mark.parametrize("way", ["copied", "packed"])
def test_tensors_take_no_memory_but_the_copys_own(way: str) -> None:
    net = nn.Linear(1000, 20_000, bias=False)  # 80 MB
    tracemalloc.start()  # it sees Python's bytes and numpy's arrays, not the memory of tensors
    try:
        made: Any = pickled_copy(net) if way == "copied" else shipment(net, PICKLER)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    if way == "copied":
        assert made.weight.untyped_storage().nbytes() == net.weight.nbytes
        return
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(made, 5, buffer_callback=buffers.append)  # as Ray does
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    assert len(head) < 2**14 and [array.nbytes for array in arrays] == [net.weight.nbytes]
    assert np.shares_memory(arrays[0], net.weight.detach().numpy())
    arrays[0].flags.writeable = False  # as what Ray hands out
    copy = pickle.loads(head, buffers=arrays).load()
    with torch.no_grad():
        copy.weight.zero_()
    assert net.weight.any()


def run(folder: Path, name: str, **keys: Any) -> dp_ray.Result:
    given = {"task": "train", "batch_size": 10, "shards": 2, "workers": 0, "loss": nn.CrossEntropyLoss()}
    sgd = {"target": torch.optim.SGD, "args": {"lr": 0.5}}
    places = {"storage": str(folder), "name": name, "quiet": True}
    return dp_ray.run(**{**given, "dataset": training.Pairs(40), "optimizer": sgd, **places, **keys})


def batches() -> Any:
    data = training.Pairs(40)
    return zip(torch.split(data.inputs, 10), torch.split(data.targets, 10), strict=True)


def test_a_gradients_mask_freezes_the_rows_that_it_freezes_in_plain_torch(tmp_path: Path) -> None:
    net, mask = linear(6, 3), torch.tensor([[1.0], [0.0], [1.0]])
    net.weight.register_hook(lambda gradient: gradient * mask)
    before = net.weight.detach().clone()
    trained = run(tmp_path, "here", model=net).weights
    again = run(tmp_path, "shipped", model=shipped(net)).weights
    assert torch.equal(net.weight, before) and net.weight.grad is None and len(net.weight._backward_hooks or ()) == 1
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for inputs, targets in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert torch.equal(trained["weight"][1], before[1]) and not torch.equal(trained["weight"][0], before[0])
    for weights in (trained, again):
        torch.testing.assert_close(dict(weights), net.state_dict())


def test_a_step_reads_what_the_hook_of_the_same_copy_keeps(tmp_path: Path) -> None:
    def parts() -> Any:
        torch.manual_seed(4)
        net, features, seen = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), {}, []  # type: ignore[var-annotated]
        net.temperature = nn.Parameter(torch.tensor(2.0))
        net[1].register_forward_hook(lambda _, __, outputs: features.update(middle=outputs))

        def step(model: nn.Module, batch: Any) -> Any:
            loss = nn.functional.cross_entropy(model(batch[0]) * net.temperature, batch[1])
            seen.append(1)
            return (loss + features.pop("middle").square().mean()) * 10, 10

        return net, step, seen

    net, step, seen = parts()
    weights = run(tmp_path, "here", model=net, step=step, loss=None, shards=1).weights
    assert not seen, "the step is a copy too, as on workers"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for batch in batches():
        optimizer.zero_grad()
        (step(net, batch)[0] / 10).backward()
        optimizer.step()
    torch.testing.assert_close(dict(weights), net.state_dict())


def test_what_shares_nothing_with_the_model_is_the_callers_own(tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(len(outputs))
        return nn.functional.cross_entropy(outputs, target, reduction="none")

    run(tmp_path, "here", model=linear(6, 3), loss=loss)
    assert len(seen) >= 8


def test_what_cannot_be_pickled_is_named_on_any_number_of_workers(tmp_path: Path) -> None:
    lock = threading.Lock()
    net: Any = nn.Sequential(linear(6, 3))
    net[0].weight.register_hook(lambda gradient: gradient if lock.locked() else None)
    says = r"model: a hook of the parameter 0\.weight cannot be pickled: TypeError: .*lock.*; give a function that"
    with pytest.raises(JobError, match=says):
        run(tmp_path, "here", model=net)
    job = {"model": net, "dataset": training.Pairs(4), "batch_size": 1}
    with pytest.raises(JobError, match=says):
        check_can_be_shipped(Job.make(job, "run"))
    shared: list[int] = []
    net = nn.Sequential(linear(6, 3))
    net.register_forward_hook(lambda *_: shared.append(1))
    with pytest.raises(JobError, match="loss: cannot be pickled: TypeError"):
        run(tmp_path, "loss", model=net, loss=lambda outputs, target: (shared, lock))
    assert not any(tmp_path.iterdir())


def test_a_class_whose_code_reads_a_module_of_torch_or_what_cannot_be_pickled() -> None:
    """torch.backends.mkldnn is a module of a class of its own, which cloudpickle refuses."""
    names: dict[str, Any] = {"__name__": "__main__", "nn": nn, "mkldnn": torch.backends.mkldnn}
    names["lock"] = threading.Lock()
    exec("class Net(nn.Linear):\n def forward(self, x): return super().forward(x) * mkldnn.is_available()\n", names)
    exec("class Locked(nn.Linear):\n def forward(self, x): return x if lock else None\n", names)
    net = shipment(names["Net"], PICKLER).load()
    assert net.forward.__globals__["mkldnn"] is torch.backends.mkldnn
    job = {"dataset": training.Pairs(4), "batch_size": 1, "model": names["Locked"]}
    with pytest.raises(
        JobError, match=r"model: Locked, with what its code reads, cannot be pickled: TypeError: .*lock"
    ):
        check_can_be_shipped(Job.make({**job, "model_args": {"in_features": 6, "out_features": 3}}, "run"))
    job["model"] = {"target": Opened, "args": {"inner": {"lock": names["lock"]}}}
    with pytest.raises(JobError, match=r"model: its attribute args\['inner'\]\['lock'\] cannot be pickled"):
        check_can_be_shipped(Job.make(job, "run"))


class Opened(nn.Identity):
    def __init__(self, inner: Any) -> None:
        super().__init__()


@pytest.mark.full
@pytest.mark.ray
def test_workers_on_ray_get_the_hooks_of_a_callers_object(run_in_session: Any) -> None:
    net, mask = linear(6, 3), torch.tensor([[1.0], [0.0], [1.0]])
    net.weight.register_hook(lambda gradient: gradient * mask)
    sgd = {"target": torch.optim.SGD, "args": {"lr": 0.5}}
    given = {"dataset": training.Pairs(20), "loss": nn.CrossEntropyLoss(), "optimizer": sgd, "batch_size": 10}
    weights = run_in_session(model=net, task="train", workers=2, **given).weights
    assert torch.equal(weights["weight"][1], net.weight[1]) and not torch.equal(weights["weight"][0], net.weight[0])
