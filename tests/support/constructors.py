"""What constructors do with drawn numbers, a step each: those that need no memory, those that do, and mistakes."""

import copy
import io
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

Step = Callable[[torch.Tensor, Any], Any]  # gets a matrix of 6 x 5, and gives tensors or modules


class Constructed(nn.Module):
    """Takes steps one after another; each gets what an earlier one gave. All that they give is the model's."""

    def __init__(self, steps: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        pool = [torch.randn(6, 5)]
        for name, at in steps:
            given = STEPS[name](_matrix(pool[at % len(pool)]), self)
            for one in given if isinstance(given, tuple) else (given,):
                if isinstance(one, nn.Module):
                    self.add_module(f"{type(one).__name__}{len(self._modules)}", one)
                elif isinstance(one, torch.Tensor):
                    pool.append(one)
        for number, one in enumerate(pool):
            self.register_buffer(f"made{number}", one.detach().clone(), persistent=number % 2 == 0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(inputs)
        return outputs


def _matrix(x: torch.Tensor) -> torch.Tensor:
    if x.shape == (6, 5) and x.dtype == torch.float32:
        return x
    return F.pad((x.real if x.is_complex() else x).detach().flatten().float(), (0, 30))[:30].view(6, 5)


def _in(make: Callable[[torch.Tensor], Any], size: Sequence[int] = (5,)) -> Step:
    """A step that fills a new tensor: `make` gets it as `out`."""

    def step(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        out = torch.empty(*size)
        make(out)
        return out

    return step


def _then(change: Callable[[torch.Tensor], Any]) -> Step:
    """A step that changes what it got, and gives it on."""

    def step(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        change(x)
        return x

    return step


def _plain_then(change: Callable[[torch.Tensor], Any]) -> Step:
    """A step with a table of plain values, which change after an operation has read them."""

    def step(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        table = torch.arange(5.0)
        read = x * table
        change(table)
        return read + table

    return step


def _else(read: Callable[[torch.Tensor], Any]) -> Step:
    """A step that goes on another way if a number cannot be read."""

    def step(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        try:
            return x * float(read(x))
        except Exception:
            return x * 100

    return step


def _copied(x: torch.Tensor, model: nn.Module) -> tuple[Any, ...]:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    other = copy.deepcopy(block)
    other.get_buffer("1.running_mean").normal_()
    held = copy.deepcopy({"whole": (whole := x.clone()), "row": whole[1]})
    held["row"].mul_(5)
    return block, other, whole, held["whole"]


def _in_double(x: torch.Tensor, model: nn.Module) -> tuple[Any, ...]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return torch.randn(3), torch.ones(3, dtype=torch.int64) / 3, torch.full((2,), 0.1), nn.Linear(3, 2)
    finally:
        torch.set_default_dtype(before)


def _tied(x: torch.Tensor, model: nn.Module) -> tuple[nn.Module, ...]:
    words, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = words.weight
    nn.init.normal_(head.weight)
    return words, head


def _ran(x: torch.Tensor, model: nn.Module) -> tuple[Any, ...]:
    norm, unused, dropped = nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Dropout(0.5)
    unused(x)  # for its running statistics
    return norm(x), dropped(x), norm, unused


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def _symmetric(x: torch.Tensor, model: nn.Module) -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def _loaded(x: torch.Tensor, model: nn.Module) -> tuple[nn.Module, ...]:
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    one.load_state_dict(nn.Linear(3, 2).state_dict())
    two.load_state_dict(nn.Linear(3, 2).state_dict(), assign=True)
    return one, two


def _in_state(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.randn(3)
    return torch.randn(3)


def _seeded(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randn(3)


def _autocast(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.t()


def _pickled(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def _pruned(x: torch.Tensor, model: nn.Module) -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.random_unstructured(layer, "weight", 0.4)  # type: ignore[no-untyped-call]
    return layer


def _scripted(x: torch.Tensor, model: nn.Module) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.script(nn.Linear(2, 3))


def _kept(value: Callable[[torch.Tensor], Any]) -> Step:
    """A step that leaves something at the model."""

    def step(x: torch.Tensor, model: nn.Module) -> None:
        model.kept = value(x)

    return step


def _trained(x: torch.Tensor, model: nn.Module) -> nn.Module:
    layer = nn.Linear(5, 2)
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x.detach()).square().sum().backward()
        optimizer.step()
    return layer


WITHOUT_MEMORY: dict[str, Step] = {
    "pickled": _pickled,
    "one_hot": lambda x, m: F.one_hot(torch.randint(0, 5, (7,)), 5),
    "one_hot of an order": lambda x, m: F.one_hot(torch.randperm(6), 9) * torch.randn(6, 9),
    "weight_norm": lambda x, m: parametrizations.weight_norm(nn.Linear(5, 4)),
    "spectral_norm": lambda x, m: parametrizations.spectral_norm(nn.Linear(5, 4)),
    "parametrized": _symmetric,
    "arange out": _in(lambda out: torch.arange(5, out=out)),
    "linspace of tensors": lambda x, m: torch.linspace(torch.zeros(()), x[0, 0].detach(), 4),
    "randn out": _in(lambda out: torch.randn(6, out=out), (0,)),
    "randn out of a row": _in(lambda out: torch.randn(4, out=out.zero_()[1]), (3, 4)),
    "eye out": _in(lambda out: torch.eye(3, out=out), (3, 3)),
    "add out": _in(lambda out: torch.add(torch.randn(5), 1, out=out)),
    "a table that changes": _plain_then(lambda table: table.mul_(2)),
    "to the device": _then(lambda x: x.to(torch.empty(1).device).fill_(3.0)),
    "to another's device": _then(lambda x: x.to(torch.arange(2.0)).mul_(3)),
    "type_as": _then(lambda x: x.type_as(torch.arange(2.0)).mul_(3)),
    "as_tensor": _then(lambda x: torch.as_tensor(x, device="cpu").mul_(3)),
    "to_empty": lambda x, m: nn.init.normal_(nn.Linear(2, 2, device="meta").to_empty(device="cpu").weight),
    "new_tensor": lambda x, m: x.new_tensor([1.0, 2.0, 3.0]),
    "new ones": lambda x, m: x.new_ones(3) + x.new_full((3,), 4.0) + x.new_zeros(3),
    "is_cpu": lambda x, m: x * (2 if x.is_cpu and x.device.type == "cpu" and not x.is_meta else 3),
    "complex": lambda x, m: torch.complex(x, x) * 2,
    "another dtype": _in_double,
    "deepcopy": _copied,
    "overlapping": _then(lambda x: x.as_strided((2, 2), (1, 1)).fill_(3.0)),
    "tied": _tied,
    "run": _ran,
    "loaded": _loaded,
    "double layers": lambda x, m: (nn.LSTM(3, 2).double(), nn.Linear(2, 3).to(torch.bfloat16)),
    "layers": lambda x, m: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        nn.LSTM(3, 4, 2),
    ),
    "convolutions": lambda x, m: (nn.Conv2d(3, 4, 3), nn.ConvTranspose1d(2, 3, 2), nn.Bilinear(2, 3, 4)),
    "orthogonal_": lambda x, m: (nn.init.orthogonal_(x.clone()), nn.init.orthogonal_(torch.empty(3, 2, 3, 3))),
    "sparse_": lambda x, m: nn.init.sparse_(x.clone(), 0.3),
    "trunc_normal_": _then(lambda x: nn.init.trunc_normal_(x[1:3])),
    "dirac_": lambda x, m: nn.init.dirac_(torch.empty(3, 3, 5)),
    "eye_": lambda x, m: nn.init.eye_(torch.empty(3, 4)),
    "xavier_normal_": _then(nn.init.xavier_normal_),
    "bernoulli": lambda x, m: torch.bernoulli(x.detach().sigmoid()),
    "poisson": lambda x, m: torch.poisson(x.detach().abs()),
    "multinomial": lambda x, m: torch.multinomial(x.detach().exp(), 3),
    "normal": lambda x, m: torch.normal(x.detach(), 2.0),
    "gumbel": lambda x, m: F.gumbel_softmax(x),
    "rrelu": lambda x, m: F.rrelu(x, training=True),
    "draws in place": lambda x, m: (
        torch.empty(9).exponential_(),
        torch.empty(9).geometric_(0.3),
        torch.rand_like(x),
    ),
    "gamma": lambda x, m: torch._standard_gamma(x.detach().abs() + 0.1),
    "index": lambda x, m: x[torch.randperm(6)[:4]],
    "index_put": _then(lambda x: x.__setitem__(torch.randperm(6)[:2], 0)),
    "mask": _then(lambda x: x.__setitem__(x > 0, 5.0)),
    "masked_scatter_": _then(lambda x: x.masked_scatter_(torch.rand(6, 5) > 0.5, torch.randn(6, 5))),
    "scatter_": lambda x, m: x.clone().scatter_(1, torch.randint(0, 5, (6, 1)), 1.0),
    "index_add_": lambda x, m: torch.zeros(6).index_add_(0, torch.randint(0, 6, (9,)), torch.randn(9)),
    "where": lambda x, m: torch.where(x > 0, torch.randn(6, 5), torch.arange(5.0)),
    "triu": lambda x, m: x.triu() + torch.tril(torch.ones(6, 5)),
    "sort": lambda x, m: torch.sort(x.t(), 0)[0] + x.t().cumsum(0),
    "products": lambda x, m: (x.t() @ x, torch.einsum("ij,kj->ki", x, x), torch.kron(torch.eye(2), x[:2, :2])),
    "inverse": lambda x, m: torch.linalg.inv(x.t() @ x + torch.eye(5)),
    "strided": lambda x, m: (x.t().exp(), F.softmax(x.t(), 0), torch.randn_like(x.t()), x.t().clone(), x[:, ::2] * 1),
    "pieces": _then(lambda x: x.chunk(2)[1].mul_(2)),
    "loop": lambda x, m: torch.stack([row * number for number, row in enumerate(x)]),
    "foreach": lambda x, m: tuple(torch._foreach_add([x, x[0]], 1.0)),
    "resize_": lambda x, m: torch.empty(0).resize_(5).normal_(),
    "set_": _then(lambda x: torch.empty(0).set_(x.detach()).mul_(2)),  # type: ignore[call-overload]
    "set_data": lambda x, m: setattr(m.body[0].weight, "data", torch.randn(5, 6) * 2),
    "lerp_": _then(lambda x: x.lerp_(torch.randn(5), 0.3)),
    "a drawn scalar": lambda x, m: torch.ones(3) * x[0, 0] + torch.arange(3.0) ** x[1, 1].abs(),
    "fractional pooling": lambda x, m: F.fractional_max_pool2d(x[None, None], 2, output_size=2),
    "vmap": lambda x, m: torch.vmap(lambda row: row * 2)(x),
    "inference_mode": lambda x, m: torch.inference_mode()(lambda: torch.randn(3).mul_(2))().clone(),
    "quantile": lambda x, m: (x.detach().median(0)[0], F.normalize(x, dim=0), x.detach().renorm(2, 0, 1.0)),
    "a buffer that is a view": lambda x, m: m.register_buffer("view", torch.tril(torch.ones(4, 4)).view(1, 1, 4, 4)),
    "an expanded buffer": lambda x, m: m.register_buffer("wide", torch.rand(3).expand(2, 3)),
    "bfloat16": lambda x, m: x.bfloat16() + torch.arange(5, dtype=torch.int64),
    "meshes": lambda x, m: (torch.cartesian_prod(x[0], x[1]), torch.vander(x[0])),
    "an attribute of a parameter": lambda x, m: setattr(m.body[0].weight, "no_decay", True),
    "item, caught": _else(lambda x: x.sum().item()),
    "numpy, caught": _else(lambda x: x.detach().numpy().sum()),
    "tolist, caught": _else(lambda x: x.tolist()[0][0]),
    "nonzero, caught": _else(lambda x: len((x > 0).nonzero())),
    "a generator, caught": _else(lambda x: torch.randn(1, generator=torch.Generator().manual_seed(2))),
    "a real error, caught": _else(lambda x: x @ torch.randn(3)),
    "address": lambda x, m: x * (2 if x.data_ptr() == torch.randn(3).data_ptr() else 5),
    "storage": lambda x, m: x * (2 if x.untyped_storage().data_ptr() == 0 else 5),
    "text": lambda x, m: x * len(repr(x)),
    "format": lambda x, m: x * len(f"{x}"),
    "type": lambda x, m: x * len(x.type()),
    "new": lambda x, m: x.new([1.0, 2.0]),
    "apply_": _then(lambda x: x.detach().apply_(lambda number: number * 2)),
    "numbers into a table": _plain_then(lambda table: table.copy_(torch.randn(5))),
    "a number into a table": _plain_then(lambda table: table.__setitem__(1, torch.randn(()))),
    "out of a table": _plain_then(lambda table: torch.mul(torch.randn(5), 2, out=table)),
    "the memory of a table": _plain_then(
        lambda table: torch.empty(0).set_(table).mul_(2)  # type: ignore[call-overload]
    ),
    "a seed": _seeded,
    "a fork of the state": _in_state,
    "a generator": lambda x, m: torch.randn(3, generator=torch.Generator().manual_seed(2)),
    "conj": lambda x, m: torch.complex(x, x).conj() * 2,
    "a conjugate buffer": lambda x, m: m.register_buffer("conj", torch.randn(3, dtype=torch.cfloat).conj()),
}
WHOLE: dict[str, Step] = {
    "to cpu": _then(lambda x: x.to("cpu").fill_(3.0)),
    "to device and dtype": _then(lambda x: x.to("cpu", torch.float32).mul_(3)),
    "to cpu as a copy": _then(lambda x: x.to("cpu", copy=True).mul_(3)),
    "cpu": _then(lambda x: x.cpu().mul_(3)),
    "to double": lambda x, m: x.to("cpu", torch.float64),
    "one_hot of so many classes": lambda x, m: F.one_hot(torch.randint(0, 5, (7,))),
    "orthogonal": lambda x, m: parametrizations.orthogonal(nn.Linear(5, 4)),
    "orthogonal by cayley": lambda x, m: parametrizations.orthogonal(nn.Linear(5, 5), orthogonal_map="cayley"),
    "item": lambda x, m: x * x.sum().item(),
    "equal": lambda x, m: x * (2 if torch.equal(x, x) else 5),
    "type of a text": _then(lambda x: x.type("torch.FloatTensor").mul_(3)),
    "autocast": _autocast,
    "bool index": lambda x, m: x[x > 0],
    "masked_select": lambda x, m: x.masked_select(x > 0),
    "pruned": _pruned,
    "trained": _trained,
    "a list of tensors": _kept(lambda x: [torch.randn(3)]),
    "a function with a tensor": _kept(lambda x: lambda: x),
    "a tensor on the CPU by name": _kept(lambda x: torch.rand(4, device="cpu")),
    "a number drawn on the CPU by name": lambda x, m: x * float(torch.rand(1, device="cpu")),
    "linspace out": _in(lambda out: torch.linspace(0, 1, 5, out=out)),
    "a table that numpy changes": _plain_then(lambda table: table.numpy().fill(7)),
    "factors": lambda x, m: (*torch.linalg.qr(x), *torch.linalg.svd(x, full_matrices=False)),
    "other randomness": lambda x, m: x * random.random() + torch.from_numpy(np.random.rand(5)),
    "the state": lambda x, m: torch.get_rng_state()[:8],
}
# Each with the error that names it.
REFUSED: dict[str, tuple[Step, str]] = {
    "two in one memory": (
        lambda x, m: setattr(m.body[0], "bias", nn.Parameter(m.body[0].weight.data[:, 0])),
        r"body\.0\.weight and body\.0\.bias are two tensors in the same memory",
    ),
    "a buffer of a parameter": (
        lambda x, m: m.register_buffer("row", m.body[0].weight.data[0]),
        r"body\.0\.weight and row are two tensors in the same memory",
    ),
    "a hook": (
        lambda x, m: m.body[0].weight.register_hook(lambda gradient: gradient * 0) and None,
        r"the parameter body\.0\.weight has a hook",
    ),
    "TorchScript": (_scripted, r"cannot shard RecursiveScriptModule1, a TorchScript module"),
    "a list of parameters": (
        lambda x, m: setattr(m, "kept", list(m.body[1].parameters())),
        r"something else keeps these: body\.1\.weight, body\.1\.bias",
    ),
    "a function with a parameter": (
        lambda x, m: setattr(m, "kept", lambda weight=m.body[1].weight: weight.sum()),
        r"something else keeps these: body\.1\.weight",
    ),
    "no shape": (lambda x, m: nn.LazyLinear(3), r"LazyLinear1\.weight has no shape yet"),
}
STEPS: dict[str, Step] = {**WITHOUT_MEMORY, **WHOLE, **{name: step for name, (step, _) in REFUSED.items()}}
