"""What a parallel module sees of its bare module's changes, and how that one takes what a forward has written."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ray.cloudpickle import CloudPickler
from torch import nn
from torch.nn.utils import parametrizations

from dp_ray.engine.forward.call_state import Written
from dp_ray.errors import ModelError
from dp_ray.parallel.weights import ModuleWatch, Version
from dp_ray.serving.shipped import made
from dp_ray.serving.wire import packed
from tests.support import parallel_models as models


def shipped(version: Version) -> nn.Module:
    """The module as a worker makes it."""
    pairs = zip(version.structure.forms, version.tensors, strict=True)
    tensors = [nn.Parameter(one) if form.is_parameter and one.is_floating_point() else one for form, one in pairs]
    return made(version.structure.pickled, tensors).module


@pytest.mark.parametrize("what", models.CHANGES)
def test_a_change_within_an_attribute_is_seen(what: str) -> None:
    torch.manual_seed(0)
    bare, watch, inputs = models.Holds(), ModuleWatch(CloudPickler), torch.randn(5, 3)
    before = watch.look(bare)
    assert torch.equal(shipped(before)(inputs), bare(inputs))
    models.CHANGES[what](bare)
    after = watch.look(bare)
    assert after is not before
    assert torch.equal(shipped(after)(inputs), bare(inputs))
    assert watch.look(bare) is after


def test_equal_values_of_other_types_differ() -> None:
    bare: Any = nn.Linear(2, 2)
    watch = ModuleWatch(CloudPickler)
    values: list[Any] = [
        1,
        True,
        1.0,
        0.0,
        -0.0,
        [1],
        (1,),
        {1},
        {"a": 1},
        {"a": True},
        "1",
        b"1",
        None,
        [0.0],
        [-0.0],
    ]
    for value in values:
        bare.given = value
        before = watch.look(bare)
        assert watch.look(bare) is before
        bare.given = copy.deepcopy(value)
        assert watch.look(bare) is before, f"another {value!r}"
        bare.given = object
        assert watch.look(bare) is not before
    versions = []
    for value in values:
        bare.given = value
        versions.append(watch.look(bare))
    assert len(set(map(id, versions))) == len(values)


def test_modules_in_a_circle_and_twice_in_a_module_are_one() -> None:
    bare = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    bare.add_module("again", bare[0])
    bare[1].above = bare
    watch = ModuleWatch(CloudPickler)
    version = watch.look(bare)
    assert len(version.tensors) == 2
    module: Any = shipped(version)
    assert module.again is module[0]
    assert module[1].above is module
    bare.add_module("again", nn.Linear(2, 2))
    assert len(watch.look(bare).tensors) == 4


def test_tied_parameters_that_part_are_another_structure() -> None:
    bare: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    bare[1].weight = bare[0].weight
    watch = ModuleWatch(CloudPickler)
    before = watch.look(bare)
    assert len(before.tensors) == 3
    bare[1].weight = nn.Parameter(bare[0].weight.detach().clone())
    assert len(watch.look(bare).tensors) == 4


def test_another_parameter_of_the_same_form_is_other_elements_alone() -> None:
    bare, watch = nn.Linear(2, 2), ModuleWatch(CloudPickler)
    before = watch.look(bare)
    bare.weight = nn.Parameter(torch.ones(2, 2))
    assert watch.look(bare).changed_since(before) == (0,)


def test_each_change_of_a_tensor_in_place_is_seen() -> None:
    bare, watch, inputs = nn.Linear(3, 2), ModuleWatch(CloudPickler), torch.randn(5, 3)
    before = watch.look(bare)
    for _ in range(3):  # as by three steps of an optimizer
        with torch.no_grad():
            bare.weight.mul_(2)
        after = watch.look(bare)
        assert after.changed_since(before) == (0,)
        assert torch.equal(shipped(after)(inputs), bare(inputs))
        before = after


def test_a_parametrized_module_is_seen_as_itself() -> None:
    bare, watch = parametrizations.spectral_norm(nn.Linear(3, 3)).eval(), ModuleWatch(CloudPickler)
    version = watch.look(bare)
    inputs = torch.randn(2, 3)
    assert torch.equal(shipped(version).eval()(inputs), bare(inputs))
    assert watch.look(bare) is version


def test_an_object_whose_pickle_makes_tensors_is_told_by_their_content() -> None:
    bare: Any = nn.Linear(2, 2)
    bare.draws, bare.others = torch.Generator(), [torch.ones(2)]
    watch = ModuleWatch(CloudPickler)
    changes: list[Callable[[], Any]] = [lambda: bare.draws.manual_seed(3), lambda: bare.others[0].data.mul_(2)]
    for change in changes:
        before = watch.look(bare)
        assert watch.look(bare) is before
        change()
        module: Any = shipped(watch.look(bare))
        assert torch.equal(module.draws.get_state(), bare.draws.get_state())
        assert torch.equal(module.others[0], bare.others[0])


def test_a_tensor_of_a_class_that_goes_by_value_is_refused_if_it_wants_a_gradient() -> None:
    class Local(nn.Module):
        scale = torch.ones(2, requires_grad=True)

    with pytest.raises(ModelError, match=r"the module, of class .*Local: holds a tensor that wants a gradient"):
        ModuleWatch(CloudPickler).look(Local())
    Local.scale = torch.ones(2)
    assert torch.equal(shipped(ModuleWatch(CloudPickler).look(Local())).scale, torch.ones(2))  # type: ignore[arg-type]


class Writes(nn.Module):
    """A forward for each way to write."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.tied = self.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.inner: Any = nn.Module()
        for name in ("in_place", "anew", "larger", "gone", "shared"):
            self.inner.register_buffer(name, torch.ones(2))
        shared: Any = self.inner.shared
        self.inner.register_buffer("twin", shared)
        self.inner.register_buffer("empty", None, persistent=False)

    def forward(self) -> None:
        inner = self.inner
        with torch.no_grad():
            self.weight.mul_(2)
        self.frozen.data = self.frozen.data * 3
        inner.in_place.add_(1)
        inner.anew = inner.anew + 2
        inner.larger = torch.ones(3)
        inner.gone = None
        inner.shared.add_(3)
        inner.empty = torch.full((2,), 4.0)


def written_by(module: nn.Module, forward: Any) -> Iterator[Written]:
    """What a worker tells of a forward; here all that is there, written or not."""

    def named() -> dict[str, Any]:
        found: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        for prefix, one in module.named_modules():
            found |= {f"{prefix}.{key}".removeprefix("."): value for key, value in one._buffers.items()}
        return found

    before = named()
    forward()
    after = named()
    firsts: dict[int, str] = {}
    for name, one in after.items():
        first = name if one is None else firsts.setdefault(id(one), name)
        value = packed(one) if one is not None and first == name else None
        yield Written(name, first, value, one is not before.get(name))


def test_the_bare_module_takes_all_that_a_forward_has_written() -> None:
    bare, watch = Writes(), ModuleWatch(CloudPickler)
    worker = copy.deepcopy(bare)
    watch.look(bare)
    inner = bare.inner
    weight, anew, in_place, shared = bare.weight, inner.anew, inner.in_place, inner.shared
    wants = torch.ones(2, requires_grad=True)
    loss = (wants * anew).sum()
    watch.take_written(bare, list(written_by(worker, worker)))
    torch.testing.assert_close(bare.state_dict(), worker.state_dict(), rtol=0, atol=0)
    assert list(bare.state_dict()) == list(worker.state_dict())
    torch.testing.assert_close(dict(bare.named_buffers()), dict(worker.named_buffers()), rtol=0, atol=0)
    assert bare.weight is bare.tied is weight
    assert inner.in_place is in_place
    assert inner.shared is inner.twin is shared
    assert inner.gone is None
    loss.backward()
    assert wants.grad is not None and torch.equal(wants.grad, torch.ones(2)), "a graph of the caller's had it saved"
    assert len(watch.look(bare).structure.forms) == len([*worker.parameters(), *worker.buffers()])
