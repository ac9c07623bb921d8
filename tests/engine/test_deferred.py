"""A recorded constructor gives the bits of the constructor, and holds one tensor at a time."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.engine.sharded import deferred
from dp_ray.engine.sharded.deferred import CannotDefer, perform, record
from tests.support import training
from tests.support.patchwork import Patchwork


class Pieces(nn.Module):
    """What constructors do: ties, views, tables, initialisers that draw again or factorise, and a second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32, padding_idx=0)
        self.places = nn.Parameter(torch.zeros(1, 20, 32))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64) for _ in range(2))
        self.register_buffer("mask", torch.tril(torch.ones(20, 20)))
        self.register_buffer("numbers", torch.arange(20).expand(1, -1))
        self.turn = nn.Linear(32, 32)
        self.normed = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.words.weight
        self.apply(self._initialise)
        nn.init.orthogonal_(self.turn.weight)
        nn.init.trunc_normal_(self.places, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(4))

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.02)
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)
            module.weight.data[0].zero_()


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def replayed(build: Callable[[], nn.Module]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The tensors of a model that is recorded and made later, and the bytes of each memory in turn."""
    torch.manual_seed(0)
    model, recording = record(build)
    names: dict[int, list[Any]] = {}
    made = {name: tensor for name, tensor in tensors_of(model).items() if not tensor.is_meta}
    for name, tensor in tensors_of(model).items():
        if tensor.is_meta:
            names.setdefault(recording.memory_of(tensor), []).append((name, recording.ref(tensor)))
    sizes = []
    for memory, storage in perform(recording, list(names)):
        sizes.append(storage.nbytes())
        made.update({name: ref.of(storage).clone() for name, ref in names[memory]})
    return made, sizes


BUILT: dict[str, Callable[[], nn.Module]] = {
    "pieces": Pieces,
    "conv": training.conv,
    "blocks": training.Blocks,
    "patchwork": lambda: Patchwork(["channels_last", "complex", "double", "half", "scalar", "sparse", "transposed"]),
}


@pytest.mark.parametrize("what", list(BUILT))
def test_a_recorded_constructor_gives_the_same_bits(what: str) -> None:
    torch.manual_seed(0)
    expected, after = tensors_of(BUILT[what]()), torch.get_rng_state()
    made, _ = replayed(BUILT[what])
    assert made.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(made[name], value) and made[name].dtype == value.dtype, name
    assert torch.equal(torch.get_rng_state(), after), "as many numbers are drawn"


def test_one_tensor_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are made before `apply` initialises the first: their first numbers are not kept."""
    most = 0

    class Counted(deferred.Memories):
        def __setitem__(self, key: int, value: Any) -> None:
            nonlocal most
            super().__setitem__(key, value)
            most = max(most, sum(one.nbytes() for one in self.values()))

    monkeypatch.setattr(deferred, "Memories", Counted)
    _, sizes = replayed(training.Blocks)
    assert most <= 2 * max(sizes), f"{most} bytes of {sum(sizes)}; the largest tensor has {max(sizes)}"


class Draws(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        if how == "own generator":
            self.weight = nn.Parameter(torch.empty(3).normal_(generator=generator))
        elif how == "reads":
            self.weight = nn.Parameter(torch.randn(3) / torch.randn(3).norm().item())
        else:
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]).normal_())


@pytest.mark.parametrize("how", ["own generator", "reads", "plain values"])
def test_what_cannot_be_recorded_is_told(how: str) -> None:
    with pytest.raises(CannotDefer):
        record(lambda: Draws(how))
