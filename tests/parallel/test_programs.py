"""Drawn programs on parallel modules, against the bare module run shard by shard in this process.

`DP_RAY_PROGRAMS` is the number of programs, 25 by default; in some, workers are killed. `Plain` is the oracle: plain
torch, a copy of the module for each shard of each call. It knows of dp_ray only how a shard's seed is derived.
"""

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import dp_ray
from dp_ray.cluster.own import OF_PROCESS
from dp_ray.engine.random import seed_all
from dp_ray.parallel import module as parallel
from dp_ray.parallel.exchange import SharedWorkers
from dp_ray.plan.order import derive_seed
from tests.support import parallel_models as models
from tests.support.chance import examples
from tests.support.cluster import ROOT
from tests.support.served import Gloo

NUM_PROGRAMS = int(os.environ.get("DP_RAY_PROGRAMS", str(examples(25))))


@dataclass
class Served:
    """How modules are served: at most on so many workers."""

    workers: int
    orders: Path  # of which worker is to end itself, and when

    def wrapped(self, module: nn.Module, workers: int, **keys: Any) -> dp_ray.DataParallel:
        """Return the parallel module."""
        return dp_ray.DataParallel(module, min(workers, self.workers), quiet=True, **keys)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Workers that all programs share: this process, two processes of a gloo group, or two workers on Ray."""
    num = 0 if request.param == "here" else 2
    address = request.getfixturevalue("cluster").address if request.param == "ray" else None
    with contextlib.chdir(ROOT), pytest.MonkeyPatch.context() as patch:
        if request.param == "gloo":
            patch.setattr(parallel, "own_workers", lambda *_, **__: Gloo())
        with dp_ray.DataParallel(nn.Identity(), num, address=address, quiet=True):
            yield Served(num, tmp_path_factory.mktemp("orders") / "orders")
            for one in list(SharedWorkers.by_owner.values()):
                one.close()


ON_RAY = pytest.param("ray", marks=pytest.mark.ray)


class PlainCall:
    """A call of the bare module: a copy for each shard, all of the weights and buffers of now."""

    def __init__(self, module: nn.Module, inputs: torch.Tensor, shards: int, seeds: list[int]) -> None:
        self.inputs = inputs
        self.parameters = dict(module.named_parameters())
        pieces = inputs.chunk(shards)
        self.copies = [copy.deepcopy(module) for _ in pieces]
        outputs = []
        for one, piece, seed in zip(self.copies, pieces, seeds, strict=False):
            seed_all(seed, torch.device("cpu"))
            outputs.append(one(piece))
        self.outputs = {
            "rows": torch.cat([one["rows"] for one in outputs]),
            "sum": outputs[0]["sum"] if shards == 1 else torch.stack([one["sum"] for one in outputs]),
        }

    def backward(self, weights: dict[str, torch.Tensor], keep: bool) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the gradients of the inputs, and of the parameters by name: the sum over the shards."""
        named = [{n: p for n, p in one.named_parameters() if p.requires_grad} for one in self.copies]
        wanted = [p for one in named for p in one.values()]
        ends = [(self.outputs[key], weight) for key, weight in weights.items() if self.outputs[key].requires_grad]
        found = list(
            torch.autograd.grad(
                [end for end, _ in ends],
                [*([self.inputs] if self.inputs.requires_grad else []), *wanted],
                [weight for _, weight in ends],
                retain_graph=keep,
                allow_unused=True,
            )
        )
        of_inputs = found.pop(0) if self.inputs.requires_grad else None
        sums: dict[str, torch.Tensor] = {}
        for name in [name for one in named for name in one]:
            one = found.pop(0)
            if one is not None:
                sums[name] = sums[name] + one if name in sums else one
        return of_inputs, sums


class Plain:
    """A bare module, called as a parallel one."""

    def __init__(self, module: nn.Module, shards: int, seed: int, number: int) -> None:
        self.module = module
        self.shards = shards
        self.seed = seed
        self.number = (number,) if number > 1 else ()  # the first module of a process draws as it always did
        self.calls = 0

    def __call__(self, inputs: torch.Tensor) -> PlainCall:
        seeds = [derive_seed(self.seed, "parallel", self.calls, shard, *self.number) for shard in range(self.shards)]
        self.calls += 1
        call = PlainCall(self.module, inputs, self.shards, seeds)
        with torch.no_grad():
            for name, one in call.copies[0].named_buffers():
                self.module.get_buffer(name).copy_(one)
        return call


@dataclass
class Waiting:
    """A call that waits for its backward, as both have it."""

    inputs: torch.Tensor
    outputs: dict[str, torch.Tensor]
    call: PlainCall


OPTIMIZERS: list[Any] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
]


class Program:
    """Two parallel modules and their oracles; each method does the same to both, and compares."""

    def __init__(self, served: Served, shards: list[int], workers: list[int], shares: bool, optimizer: int) -> None:
        self.served, orders = served, str(served.orders)
        self.served.orders.unlink(missing_ok=True)
        one = models.Drawn(1, None, orders)
        bare = [one, models.Drawn(2, one.body if shares else None, orders)]
        self.real = [
            served.wrapped(each, of_workers, shards=of_shards, seed=7)
            for each, of_shards, of_workers in zip(copy.deepcopy(bare), shards, workers, strict=True)
        ]
        if shares:
            self.real[1].module.body = self.real[0].module.body
        self.plain = [
            Plain(each, of_shards, 7, real._exchange.module_number)
            for each, of_shards, real in zip(bare, shards, self.real, strict=True)
        ]
        self.makes = OPTIMIZERS[optimizer]
        self.waiting: list[Waiting] = []
        self.drawn = torch.Generator().manual_seed(0)
        self.states = [[copy.deepcopy(each.module.state_dict())] * 2 for each in self.plain]
        self.steps = [self._optimizers(at) for at in range(2)]

    def _optimizers(self, at: int) -> list[Any]:
        return [self.makes(list(one.module.parameters())) for one in (self.real[at], self.plain[at])]

    def both(self, at: int) -> list[Any]:
        """The bare module of each."""
        return [self.real[at].module, self.plain[at].module]

    def _randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.drawn, dtype=torch.float64)

    def forward(self, at: int, rows: int, wants: int) -> None:
        """A call that may wait for its backward."""
        inputs = self._randn(rows, 3).requires_grad_(bool(wants % 2))
        own = inputs.detach().clone().requires_grad_(inputs.requires_grad)
        outputs, call = self.real[at](own), self.plain[at](inputs)
        assert_close(outputs, call.outputs)
        for key, one in call.outputs.items():
            assert outputs[key].requires_grad == one.requires_grad
        if call.outputs["rows"].requires_grad:
            self.waiting.append(Waiting(own, outputs, call))

    def infer(self, at: int, rows: int, _: int) -> None:
        """A call under no_grad, or inference_mode."""
        inputs = self._randn(rows, 3)
        with torch.no_grad():
            wanted = self.plain[at](inputs).outputs
        with torch.inference_mode() if rows % 2 else torch.no_grad():
            assert_close(self.real[at](inputs), wanted)

    def backward(self, number: int, keep: int, _: int) -> None:
        """The backward of a call that waits."""
        if not self.waiting:
            return
        at = number % len(self.waiting)
        one = self.waiting[at] if keep == 8 else self.waiting.pop(at)
        weights = {
            key: torch.randn(end.shape, generator=self.drawn, dtype=end.dtype) for key, end in one.outputs.items()
        }
        before = None if one.inputs.grad is None else one.inputs.grad.clone()
        torch.autograd.backward(list(one.outputs.values()), list(weights.values()), retain_graph=keep == 8)
        of_inputs, found = one.call.backward(weights, keep == 8)
        if of_inputs is not None and before is not None:
            of_inputs = of_inputs + before
        assert_close(one.inputs.grad, of_inputs)
        for name, parameter in one.call.parameters.items():
            if name in found and parameter.requires_grad:
                parameter.grad = found[name] if parameter.grad is None else parameter.grad + found[name]

    def drop(self, number: int, *_: int) -> None:
        """Nobody holds a call's output any more."""
        if self.waiting:
            self.waiting.pop(number % len(self.waiting))

    def step(self, at: int, *_: int) -> None:
        """An optimizer's step."""
        for one in self.steps[at]:
            one.step()

    def zero(self, at: int, *_: int) -> None:
        """No gradients."""
        for one in self.both(at):
            one.zero_grad()

    def freeze(self, at: int, number: int, _: int) -> None:
        """Have a parameter require a gradient, or none."""
        for one in self.both(at):
            parameter = list(one.parameters())[number % len(list(one.parameters()))]
            parameter.requires_grad_(not parameter.requires_grad)

    def mode(self, at: int, *_: int) -> None:
        """Train, or eval."""
        for one in self.both(at):
            one.train(not one.training)

    def save(self, at: int, *_: int) -> None:
        """A state, from the parallel module."""
        self.states[at] = [copy.deepcopy(one.state_dict()) for one in (self.real[at], self.plain[at].module)]

    def load(self, at: int, *_: int) -> None:
        """That state."""
        for one, state in zip((self.real[at], self.plain[at].module), self.states[at], strict=True):
            one.load_state_dict(state)

    def write(self, at: int, number: int, _: int) -> None:
        """Through `.data`, of a parameter or buffer."""
        for one in self.both(at):
            tensors = [one for one in [*one.parameters(), *one.buffers()] if one.is_floating_point()]
            tensors[number % len(tensors)].data.mul_(0.75)

    def configure(self, at: int, number: int, _: int) -> None:
        """Change an object that the module refers to."""
        for one in self.both(at):
            one.config.scale = number / 4

    def train(self, at: int, rows: int, wants: int) -> None:
        """A step of a training."""
        self.forward(at, rows, wants)
        self.backward(-1, 0, 0)
        self.step(at)

    def replace(self, at: int, number: int, _: int) -> None:
        """Another parameter, another layer, or another module altogether."""
        for one in (self.real[at], self.plain[at]):
            head: Any = one.module.head
            if number % 3 == 0:
                head[2].weight = nn.Parameter(head[2].weight.detach() * 0.5)
            elif number % 3 == 1:
                head[0] = nn.Sigmoid()
            else:
                one.module = models.Drawn(number, None, str(self.served.orders))
        self.steps[at] = self._optimizers(at)

    def hook(self, at: int, number: int, _: int) -> None:
        """A hook on a layer comes, or all of them go."""
        for one in self.both(at):
            if one.body._forward_hooks:
                one.body._forward_hooks.clear()
            else:
                one.body.register_forward_hook(models.doubled)

    def deepcopy(self, at: int, *_: int) -> None:
        """A copy takes the place of a module; calls of the module may wait."""
        self.real[at] = copy.deepcopy(self.real[at])
        former = self.plain[at]
        number = self.real[at]._exchange.module_number
        self.plain[at] = Plain(copy.deepcopy(former.module), former.shards, former.seed, number)
        self.plain[at].calls = former.calls
        self.steps[at] = self._optimizers(at)

    def kill(self, when: int, which: int, _: int) -> None:
        """End a worker at once, or in its next forward or backward."""
        members: Any = SharedWorkers.by_owner[OF_PROCESS].serving.ready()
        pid: int = members[which % len(members)].place.pid
        if when == 0:
            with contextlib.suppress(ProcessLookupError):  # where it was the last one that was killed
                os.kill(pid, signal.SIGKILL)
        else:
            self.served.orders.write_text(f"{pid} {('forward', 'backward')[when - 1]}")

    def check(self) -> None:
        """States and gradients are the same."""
        for at in range(2):
            real, plain = self.both(at)
            assert_close(real.state_dict(), plain.state_dict())
            assert_close(*({name: one.grad for name, one in each.named_parameters()} for each in (real, plain)))


def assert_close(got: Any, wanted: Any) -> None:
    if got is None or wanted is None:
        assert got is wanted
    elif isinstance(got, dict):
        assert got.keys() == wanted.keys()
        for key, one in got.items():
            assert_close(one, wanted[key])
    else:
        torch.testing.assert_close(
            got, wanted, rtol=1e-6, atol=1e-7
        )  # Adam makes much of rounding where a gradient is nearly 0


OPERATIONS = ["forward", "backward", "step", "infer", "drop", "zero", "freeze", "mode", "save", "load", "write"]
OPERATIONS += ["replace", "hook", "deepcopy", "configure", *["forward", "backward", "train"] * 3]
CALLS = {"forward", "infer", "train"}
# Half of these are followed by a call.
CHANGES = {"step", "load", "write", "configure", "replace", "hook", "mode"}
Operation = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1), st.sampled_from([6, 8, 9]), st.integers(0, 9))
Test = TypeVar("Test")
Kill = st.tuples(st.just("kill"), st.integers(0, 2), st.just(0), st.integers(0, 1))


def programs(operation: Any, num: int) -> Callable[[Test], Test]:
    """Draw so many programs, each with the shards and workers of its two modules."""
    of_modules = [st.lists(st.integers(1, most), min_size=2, max_size=2) for most in (3, 2)]
    drawn: Any = given(st.lists(operation, min_size=10, max_size=30), *of_modules, st.booleans(), st.integers(0, 1))
    fixtures = [HealthCheck.function_scoped_fixture]
    limits = settings(max_examples=max(1, num), deadline=None, suppress_health_check=fixtures)

    def decorated(test: Test) -> Test:
        found: Test = limits(drawn(test))
        return found

    return decorated


@pytest.mark.parametrize("served", ["here", ON_RAY], indirect=True)
@programs(Operation, NUM_PROGRAMS)
def test_a_program_gives_what_the_bare_module_gives_shard_by_shard(
    served: Served, program: list[Any], shards: list[int], workers: list[int], shares: bool, optimizer: int
) -> None:
    run(program, Program(served, shards, workers, shares, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("served", ["gloo"], indirect=True)
@programs(st.one_of(*[Operation] * 4, Kill), NUM_PROGRAMS // 2)
def test_a_program_whose_workers_are_killed_gives_the_same(
    served: Served, program: list[Any], shards: list[int], workers: list[int], shares: bool, optimizer: int
) -> None:
    run(program, Program(served, shards, workers, shares, optimizer))


@pytest.mark.full
@pytest.mark.parametrize("served", [ON_RAY], indirect=True)
@programs(st.one_of(*[Operation] * 7, Kill), NUM_PROGRAMS // 8)
def test_a_program_whose_workers_on_ray_are_killed_gives_the_same(
    served: Served, program: list[Any], shards: list[int], workers: list[int], shares: bool, optimizer: int
) -> None:
    run(program, Program(served, shards, workers, shares, optimizer))


def run(program: list[Any], both: Program) -> None:
    """Do what is drawn, and compare after each operation."""
    for name, at, rows, other in program:
        given = (other, rows) if name in ("backward", "drop") else (at, rows if name in CALLS else other)
        getattr(both, name)(*given, other)
        if name in CHANGES and other % 2:
            both.infer(at, rows, other)
        both.check()
