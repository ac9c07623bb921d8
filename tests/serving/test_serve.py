"""Parallel modules in this process (`workers: 0`) and on processes in a gloo group, against the bare module.

The oracle runs the bare module shard by shard in this process, each from the same state and from its own random
numbers, and adds the gradients by the tree. tests/parallel/test_data_parallel.py has the same on Ray.
"""

import contextlib
import copy
import gc
import io
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dp_ray.cluster.own import OF_PROCESS
from dp_ray.errors import ClusterError, JobError, ModelError, cause_of
from dp_ray.job.keys import WorkerKeys
from dp_ray.monitor.in_process import InProcess
from dp_ray.parallel import module as parallel
from dp_ray.parallel.exchange import SharedWorkers
from dp_ray.parallel.module import DataParallel
from dp_ray.plan.order import derive_seed
from dp_ray.serving.wire import Forward, HeldBytes
from tests.support import parallel_models as models
from tests.support.cluster import ROOT
from tests.support.served import Gloo, GlooServing

Loss = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers are processes of a gloo group; none is left after a test."""
    monkeypatch.setattr(parallel, "own_workers", lambda keys, *_, **__: (Gloo if keys.max_workers else InProcess)())
    yield
    gc.collect()
    for one in list(SharedWorkers.by_owner.values()):
        one.close()


def served() -> GlooServing:
    """The workers of this process that are processes."""
    found = SharedWorkers.by_owner[OF_PROCESS].serving
    assert isinstance(found, GlooServing)
    return found


class Run(NamedTuple):
    """A call as the oracle has run it: each shard's output, and the copy of the module that made it."""

    outputs: list[torch.Tensor]
    copies: list[nn.Module]

    @property
    def output(self) -> torch.Tensor:
        return torch.cat(self.outputs).detach()


class Oracle:
    """The bare module, run shard by shard."""

    def __init__(self, bare: nn.Module, shards: int, seed: int) -> None:
        self.bare, self.shards, self.seed, self.calls = bare, shards, seed, 0

    def run(self, inputs: torch.Tensor) -> Run:
        """Run all shards from the same state; the state is then that of shard 0."""
        found = Run([], [])
        for shard, rows in enumerate(inputs.chunk(self.shards)):
            number = derive_seed(self.seed, "parallel", self.calls, shard)
            random.seed(number)
            np.random.seed(number % 2**32)
            torch.manual_seed(number)
            found.copies.append(copy.deepcopy(self.bare))
            found.outputs.append(found.copies[-1](rows))
        self.calls += 1
        for name, owner in found.copies[0].named_modules():
            for key, buffer in owner._buffers.items():
                self.bare.get_submodule(name).register_buffer(
                    key, copy.deepcopy(buffer), key not in owner._non_persistent_buffers_set
                )
        with torch.no_grad():
            for parameter, new in zip(self.bare.parameters(), found.copies[0].parameters(), strict=True):
                parameter.copy_(new)
        return found

    def gradients(self, run: Run, given: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The sums over the shards of the gradients of what was trained, by the tree."""
        of_shards = []
        pieces = torch.split(given, [len(output) for output in run.outputs])
        names = [name for name, parameter in run.copies[0].named_parameters() if parameter.requires_grad]
        for output, piece, one in zip(run.outputs, pieces, run.copies, strict=True):
            trained = [each for each in one.parameters() if each.requires_grad]
            of_shards.append(torch.autograd.grad(output, trained, piece, retain_graph=True, allow_unused=True))
        return {
            name: self._sum([shard[at] for shard in of_shards], (0, self.shards)) for at, name in enumerate(names)
        }

    def _sum(self, of_shards: list[torch.Tensor], node: tuple[int, int]) -> torch.Tensor | None:
        start, stop = node
        if stop - start == 1:
            one = of_shards[start] if start < len(of_shards) else None
            return None if one is None else one.coalesce() if one.is_sparse else one
        middle = (start + stop) // 2
        left, right = self._sum(of_shards, (start, middle)), self._sum(of_shards, (middle, stop))
        return right if left is None else left if right is None else left + right


@torch.no_grad()
def descend(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.sub_(0.1 * (parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad))


def assert_same_modules(got: nn.Module, wanted: nn.Module) -> None:
    """Parameters, their gradients, and buffers have the same bits."""
    assert_same(dict(got.named_parameters()), dict(wanted.named_parameters()))
    assert_same(dict(got.named_buffers()), dict(wanted.named_buffers()))
    for ours, theirs in zip(got.parameters(), wanted.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            assert_same(ours.grad.coalesce() if ours.grad.is_sparse else ours.grad, theirs.grad)


def assert_same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def distinct(values: torch.Tensor) -> list[list[float]]:
    found: list[list[float]] = values.unique(dim=0).tolist()  # type: ignore[no-untyped-call]
    return found


def rows(*size: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*size)


def words(*size: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, 9, size)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "norm and dropout": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)),
        rows(17, 4),
    ),
    "recurrent": (models.Recurrent, words(17, 3)),
    "sparse": (lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)), words(17, 2)),
    "doubles": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double(), lambda: torch.randn(17, 4).double()),
    "unused": (models.Elementwise, rows(17, 4)),
    "momentum": (models.Momentum, rows(17, 4)),
    "momentum by data": (lambda: models.Momentum("data"), rows(17, 4)),
    "max_norm": (models.MaxNorm, words(17, 3)),
    "fills buffers": (models.FillsBuffers, rows(17, 4)),
    "in a list": (models.InList, rows(17, 4)),
    "checkpoint": (models.Checkpointed, rows(17, 4)),
}


@pytest.mark.full(but=["fills buffers-3", "sparse-1", "norm and dropout-1", "recurrent-0", "unused-3"])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_bare_modules_shard_by_shard(name: str, workers: int) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    bare = make()
    oracle = Oracle(copy.deepcopy(bare), 7, seed=3)
    with DataParallel(bare, workers, shards=7, bitwise=True, seed=3, quiet=True) as model:
        for _ in range(4):
            batch = inputs()
            output, run = model(batch), oracle.run(batch)
            assert_same(output.detach(), run.output)
            model.zero_grad()
            output.square().sum().backward()
            sums = oracle.gradients(run, 2 * run.output)
            for key, parameter in oracle.bare.named_parameters():
                parameter.grad = sums.get(key)
            assert_same_modules(bare, oracle.bare)
            descend(bare)
            descend(oracle.bare)


class Everything(nn.Module):
    """Has all that a forward may write, and parts that may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.listed = models.InList()
        self.embedding = nn.Embedding(9, 4, max_norm=0.8)
        self.momentum = models.Momentum()
        self.last = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a function of everything."""
        found = self.listed(self.drop(self.norm(self.first(inputs))))
        found = found + self.embedding((inputs[:, 0].abs() * 3).long().clamp(max=8))
        last: torch.Tensor = self.last(self.momentum(found))
        return last


PARTS = ["first", "norm", "listed", "embedding", "last"]
ACTIONS = [*["call"] * 5, *["backward"] * 4, "no_grad", "descend", "freeze", "thaw", "eval", "train", "drop", "write"]


@pytest.mark.full(but=["2-True"])
@pytest.mark.parametrize(("workers", "kills"), [(0, False), (2, True)])
def test_drawn_programs_end_as_the_bare_modules(workers: int, kills: bool) -> None:
    for seed in range(2 if kills else 15):
        check_program(random.Random(seed), workers, [*ACTIONS, "kill"] if kills else ACTIONS)


def check_program(draw: random.Random, workers: int, actions: list[str]) -> None:
    """Draw what a caller may do, and do it with the parallel module and the oracle alike."""
    torch.manual_seed(draw.randrange(1000))
    bare, shards, waiting = Everything(), draw.randint(1, 5), list[tuple[torch.Tensor, Run]]()
    oracle = Oracle(copy.deepcopy(bare), shards, seed=3)
    data = torch.Generator().manual_seed(draw.randrange(1000))
    both: list[Any] = [bare, oracle.bare]
    with DataParallel(bare, workers, shards=shards, bitwise=True, seed=3, quiet=True) as model:
        for action in draw.choices(actions, k=20):
            match action:
                case "call" | "no_grad":
                    batch = torch.randn(draw.randint(2, 3) * shards, 4, generator=data)
                    with torch.set_grad_enabled(action == "call"):
                        output, run = model(batch), oracle.run(batch)
                    assert_same(output.detach(), run.output)
                    assert output.requires_grad == run.outputs[0].requires_grad
                    if output.requires_grad:
                        waiting.append((output, run))
                case "backward" if waiting:
                    keeps, at = draw.random() < 0.3, draw.randrange(len(waiting))
                    output, run = waiting[at] if keeps else waiting.pop(at)
                    given = torch.randn(output.shape, generator=data)
                    output.backward(given, retain_graph=keeps)  # type: ignore[no-untyped-call]
                    parameters = dict(oracle.bare.named_parameters())
                    for name, tensor in oracle.gradients(run, given).items():
                        own = parameters[name]
                        if tensor is not None and own.requires_grad:
                            own.grad = tensor if own.grad is None else own.grad + tensor
                case "drop" if waiting:
                    waiting.pop(draw.randrange(len(waiting)))
                case "descend":
                    for each in both:
                        descend(each)
                case "freeze" | "thaw":
                    part = draw.choice(PARTS)
                    for each in both:
                        getattr(each, part).requires_grad_(action == "thaw")
                case "eval" | "train":
                    for each in both:
                        each.train(action == "train")
                case "write":
                    for each in both:
                        each.norm.running_mean.fill_(0.25)
                        each.first.weight.data.mul_(1.01)
                case "kill":
                    draw.choice(served().ready()).kill()
            assert_same_modules(*both)


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_a_module_frozen_or_changed_while_its_graph_waits_gets_its_gradients(workers: int) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    plain, inputs = copy.deepcopy(bare), torch.randn(6, 4)
    plain(inputs).square().sum().backward()
    wanted = [parameter.grad for parameter in plain.parameters()]
    for change in ("frozen", "stepped", "replaced", "evaluated"):
        model = DataParallel(copy.deepcopy(bare), workers, shards=2, quiet=True)
        trained = list(model.parameters())
        output = model(inputs)
        if change == "frozen":
            model.module[2].requires_grad_(False)  # type: ignore[index]
        elif change == "stepped":
            with torch.no_grad():
                for one in trained:
                    one.add_(1)
        elif change == "replaced":
            model.module[2] = nn.Linear(3, 2)  # type: ignore[operator]
        else:
            model.eval()
        model(inputs)  # which brings the change to the workers
        output.square().sum().backward()
        found = [one.grad for one in trained]
        wanted_now = [*wanted[:2], None, None] if change == "frozen" else wanted  # autograd itself leaves them out
        torch.testing.assert_close(
            [one for one in found if one is not None], [one for one in wanted_now if one is not None]
        )


@pytest.mark.full
def test_a_generator_trains_through_a_frozen_judge() -> None:
    torch.manual_seed(0)
    nets = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = copy.deepcopy(nets)

    def trained(makes: Any, judges: Any) -> list[Any]:
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(3):
            fake = makes(torch.randn(6, 2, generator=generator))
            judged = judges(fake)
            for parameter in judges.parameters():
                parameter.requires_grad_(False)
            judges(torch.randn(6, 3, generator=generator))
            judged.mean().backward()
            losses += [judged.detach(), *(parameter.grad.clone() for parameter in makes.parameters())]
            for parameter in judges.parameters():
                parameter.requires_grad_(True)
        return losses

    torch.testing.assert_close(trained(*(DataParallel(net, 2, quiet=True) for net in nets)), trained(*plain))


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_an_output_outlives_its_module_and_not_its_close(workers: int) -> None:
    bare, inputs = nn.Linear(2, 2), torch.ones(4, 2)
    model = DataParallel(bare, workers, quiet=True)
    other = DataParallel(bare, workers, quiet=True)  # so that the workers stay
    output = model(inputs).sum()
    del model
    gc.collect()
    other(inputs)
    output.backward()
    assert bare.weight.grad is not None and bare.weight.grad.tolist() == [[4.0, 4.0]] * 2
    exchange = other._exchange
    assert exchange.workers.users == {exchange.module_number}
    late = other(inputs).sum()
    other.close()
    with pytest.raises(ClusterError, match="was closed"):
        late.backward()
    with pytest.raises(ClusterError, match="was closed"):
        other(inputs)


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_no_two_modules_draw_the_same_numbers(workers: int) -> None:
    ones = torch.ones(60)
    with DataParallel(nn.Dropout(0.5), workers, shards=2, seed=3, quiet=True) as first:
        torch.manual_seed(derive_seed(3, "parallel", 0, 0))
        start = nn.functional.dropout(ones[:30])
        drawn = [first(ones)]
        assert torch.equal(drawn[0][:30], start)
        second = DataParallel(nn.Dropout(0.5), workers, shards=2, seed=3, quiet=True)
        drawn += [second(ones), copy.deepcopy(second)(ones), copy.deepcopy(first)(ones)]
        for at, one in enumerate(drawn):
            assert not any(torch.equal(one, other) for other in drawn[:at])


@pytest.mark.full(but=["3"])
@pytest.mark.parametrize("workers", [0, 3])
def test_what_a_model_prints_comes_before_its_error_and_of_a_backward(workers: int) -> None:
    inputs = torch.arange(6.0).view(6, 1)

    def said(module: nn.Module) -> list[str]:
        text = io.StringIO()
        model = DataParallel(module, workers, shards=3, quiet=True)
        with contextlib.redirect_stdout(text), contextlib.suppress(ModelError):
            model(inputs).sum().backward()
        return text.getvalue().splitlines()

    forwards, backwards = ([f"{kind} of {number}" for number in (0, 2, 4)] for kind in ("forward", "backward"))
    assert said(models.Says()) == forwards + backwards
    assert said(models.Says(forward=4)) == forwards
    assert said(models.Says(backward=4)) == forwards + backwards


@pytest.mark.full
def test_a_backward_that_raises_leaves_the_group_and_names_the_shard() -> None:
    model = DataParallel(models.Says(backward=4), 3, quiet=True)
    with pytest.raises(
        ModelError, match=r"call 0, shard 2 of 3 \(rank 2 .* its backward raised LookupError"
    ) as found:
        model(torch.arange(6.0).view(6, 1)).sum().backward()
    assert isinstance(cause_of(found.value), LookupError)
    workers = served()
    members = list(workers.members)
    model(torch.zeros(6, 1)).sum().backward()
    assert workers.members == members and not workers._has_changed
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.full(but=["2"])
@pytest.mark.parametrize("workers", [0, 2])
def test_settings_of_precision_travel_and_are_put_back(workers: int) -> None:
    model, inputs = DataParallel(models.TellsPrecision(), workers, quiet=True), torch.ones(4, 4, requires_grad=True)
    before = models._precision()
    assert distinct(model(inputs)) == [before]
    backends: Any = torch.backends
    try:
        torch.set_float32_matmul_precision("high")
        backends.cudnn.allow_tf32 = False
        backends.cudnn.benchmark = True
        now = models._precision()
        assert now == [1.0, 1.0, 0.0, 1.0]
        output = model(inputs)
    finally:
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32, backends.cudnn.benchmark = True, False
    assert distinct(output) == [now]
    assert models._precision() == before
    output.sum().backward()
    assert inputs.grad is not None and distinct(inputs.grad) == [now], "a call's settings are the call's"
    assert distinct(model(inputs)) == [before]
    with torch.autocast("cpu", torch.bfloat16):
        assert DataParallel(nn.Linear(4, 2), workers, quiet=True)(inputs).dtype == torch.bfloat16


@pytest.mark.full
def test_fewer_workers_are_honoured_and_more_start_anew() -> None:
    inputs = torch.randn(6, 2)
    first = DataParallel(nn.Linear(2, 2), 2, shards=4, quiet=True)
    waits = first(inputs)
    few = DataParallel(first.module, 1, shards=4, quiet=True)
    output = few(inputs)
    assert {shape.rank for shape in few.shapes} == {0} and len(few.shapes) == 3
    output.sum().backward()
    assert {shape.rank for shape in first.shapes} == {0, 1}
    old = served()
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        more = DataParallel(nn.Identity(), 3)
    assert "3 workers start in place of 2" in text.getvalue()
    assert not old.members and len(served().ready()) == 3
    before = [copy.deepcopy(parameter.grad) for parameter in first.parameters()]
    waits.sum().backward()  # its shards run again
    for one, wanted in zip(first.parameters(), before, strict=True):
        assert wanted is not None and one.grad is not None
        torch.testing.assert_close(one.grad, 2 * wanted)
    more(inputs)
    assert {shape.rank for shape in more.shapes} == {0, 1, 2}


@pytest.mark.full(but=["backward", "forward"])
@pytest.mark.parametrize("when", ["before", "forward", "backward"])
def test_the_shards_of_a_lost_worker_are_run_again(tmp_path: Path, when: str) -> None:
    inputs = torch.randn(9, 2, requires_grad=True)

    def run(kills: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(2, 4), nn.Dropout(0.5), models.Kills(kills, tmp_path / kills), nn.BatchNorm1d(4)
        )
        with DataParallel(module, 3, shards=3, bitwise=True, seed=5, quiet=True) as model:
            first = model(inputs)
            if kills == "before":
                served().members[1].kill()
            found = [first.detach(), *torch.autograd.grad(first.square().sum(), [inputs, *model.parameters()])]
            second = model(inputs)
            return [*found, second.detach(), *module.buffers()]

    for got, wanted in zip(run(when), run("never"), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.full
def test_a_worker_may_be_lost_once_it_has_run_its_shard_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is lost in the same call, which so goes on without either."""
    module, inputs = nn.Linear(2, 2), torch.ones(4, 2)
    with DataParallel(module, 2, quiet=True) as model:
        model(inputs)
        first, second = served().ready()
        usual, to_lose = served().ask, [second, first]

        def ask(messages: Any) -> Any:
            if to_lose:
                to_lose.pop(0).kill()
            return usual(messages)

        monkeypatch.setattr(served(), "ask", ask)
        output = model(inputs)
        assert [shape.rank for shape in model.shapes] == [0, 1]
        assert second not in served().members, "the first one has nothing to do again"
        output.sum().backward()
        assert not {first, second} & set(served().ready())
        torch.testing.assert_close(output, module(inputs))
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[4.0, 4.0]] * 2


class Noted(nn.Linear):
    """Notes the process of each of its forwards."""

    def __init__(self, notes: Path) -> None:
        super().__init__(2, 3)
        self.notes = notes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with self.notes.open("a") as notes:
            notes.write(f"{os.getpid()} ")
        return super().forward(inputs)


def test_only_the_shards_whose_graphs_are_lost_run_again(tmp_path: Path) -> None:
    notes, inputs = tmp_path / "notes", torch.randn(9, 2)
    module, bare = Noted(notes), nn.Linear(2, 3)
    bare.load_state_dict(module.state_dict())
    with DataParallel(module, 3, quiet=True) as model:
        outputs = model(inputs)
        lost = served().members[1]
        lost.kill()
        with torch.no_grad():  # it finds the worker gone
            torch.testing.assert_close(model(inputs), bare(inputs))
        before = len(notes.read_text().split())
        outputs.square().sum().backward()
        ran = notes.read_text().split()[before:]
        assert len(ran) == 1 and ran != [str(lost.place.pid)]
    bare(inputs).square().sum().backward()
    for name, parameter in bare.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)


@pytest.mark.full
@pytest.mark.parametrize("killed", [(1,), (0, 2), (0, 1, 2)])
def test_newcomers_alone_are_sent_the_module(killed: tuple[int, ...]) -> None:
    module, inputs = nn.Linear(2, 3), torch.randn(9, 2)
    with DataParallel(module, 3, quiet=True) as model:

        def call() -> tuple[set[int], set[tuple[int, ...]]]:
            """Who got the module whole, and which of its tensors came to all."""
            del served().told[:]
            with torch.no_grad():
                torch.testing.assert_close(model(inputs), module(inputs))
            given = [pair for told in served().told for pair in told.items() if isinstance(pair[1], Forward)]
            whole = {member.place.pid for member, message in given if message.sync.whole is not None}
            return whole, {message.sync.changed for _, message in given}

        def there() -> set[int]:
            return {member.place.pid for member in served().members}

        assert call() == (there(), {(0, 1)})
        before, members = there(), list(served().members)
        for rank in killed:
            members[rank].kill()
        whole, changed = call()
        assert whole == there() - before and len(whole) == len(killed)
        assert changed == {()} if len(killed) < 3 else {(), (0, 1)}
        module.weight.data.add_(1.0)
        assert call() == (set(), {(0,)})
        before, members = there(), list(served().members)
        for rank in killed:
            members[rank].kill()
        module.bias.data.add_(1.0)
        whole, changed = call()
        assert whole == there() - before and len(whole) == len(killed)
        assert changed == ({(1,)} if len(killed) < 3 else {(1,), (0, 1)})


@pytest.mark.full(but=["False"])
@pytest.mark.parametrize("has_run", [False, True])
def test_a_backward_that_ctrl_c_cut_short_can_be_run_again(has_run: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = nn.Linear(2, 2), torch.ones(4, 2)
    with DataParallel(module, 2, quiet=True) as model:
        output = model(inputs).sum()
        usual = served().ask

        def interrupted(messages: Any) -> Any:
            if has_run:
                usual(messages)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(served(), "ask", interrupted)
            with pytest.raises(KeyboardInterrupt):
                output.backward()
        output.backward()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[4.0, 4.0]] * 2


class OfSession(Gloo):
    """Stands for the worker of a session."""

    most = 1

    def __init__(self) -> None:
        self.owners = (self, OF_PROCESS)

    def serve(self, keys: WorkerKeys) -> GlooServing:
        return super().serve(WorkerKeys(workers=1))


@pytest.mark.full
def test_modules_of_two_sessions_run_on_the_workers_of_their_own() -> None:
    kinds = [OfSession(), OfSession()]
    first, second = [DataParallel(nn.Linear(2, 2), 1, quiet=True, _kind=one) for one in kinds]
    bare = DataParallel(nn.Linear(2, 2), 1, quiet=True)  # names no session, and shares what serves already
    of_first, of_second, of_bare = (one._exchange.workers.serving for one in (first, second, bare))
    assert of_bare is of_first is not of_second
    with pytest.raises(JobError, match=r"asks for 2, and the session whose workers serve .* has 1"):
        DataParallel(nn.Identity(), 2, quiet=True)
    with pytest.raises(JobError, match=r"cpus_per_worker: this module asks for 7\.0, not"):
        DataParallel(nn.Identity(), 1, quiet=True, cpus_per_worker=7.0, _kind=kinds[1])
    first.close()
    bare.close()
    assert second(torch.ones(4, 2)).shape == (4, 2)
    with pytest.raises(JobError, match=r"cpus_per_worker: this module asks for 7\.0, not"):
        DataParallel(nn.Identity(), 1, quiet=True, cpus_per_worker=7.0, _kind=kinds[0])
    assert set(SharedWorkers.by_owner) == {kinds[1]}, "a session whose workers are others serves nobody"


@pytest.mark.full
def test_graphs_are_dropped_with_their_outputs_and_with_their_backward() -> None:
    model = DataParallel(nn.Sequential(nn.Linear(2, 100), nn.Tanh()), 2, quiet=True)

    def held() -> int:
        with torch.no_grad():
            model(torch.ones(3, 2))  # which brings what was dropped
        serving = served()
        return sum(serving.ask(dict.fromkeys(serving.ready(), HeldBytes(model._exchange.module_number))).values())

    assert held() == 0
    output = model(torch.ones(3, 2))
    assert held() > 1000
    del output
    assert held() == 0
    output = model(torch.ones(3, 2)).sum()
    output.backward(retain_graph=True)
    assert held() > 1000
    output.backward()
    assert held() == 0


class MakesOwn(nn.Module):
    """Its graph leads to nothing of the caller's."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs * torch.ones(1, requires_grad=True))


def test_no_graph_stays_to_which_no_backward_comes() -> None:
    with DataParallel(MakesOwn(), 0, quiet=True) as model:
        for _ in range(3):
            assert not model(torch.ones(4, 2)).requires_grad
        serving = SharedWorkers.by_owner["here"].serving
        held = serving.ask(dict.fromkeys(serving.ready(), HeldBytes(model._exchange.module_number)))
        assert list(held.values()) == [0]


def test_here_nothing_of_the_process_changes() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    inputs = torch.ones(4, 3)
    model = DataParallel(nn.Sequential(nn.Dropout(0.5), nn.ReLU(inplace=True)), 0, bitwise=True, quiet=True)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state()), torch.get_num_threads()
    with torch.no_grad():
        model(inputs)
    with torch.inference_mode():
        model(-inputs)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state()), torch.get_num_threads()) == states[1:]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(inputs, torch.ones(4, 3)), "a model writes its own copy"


def test_here_hooks_on_what_graphs_save_are_the_callers_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    inputs = torch.randn(6, 4)
    found = []
    arounds: list[Any] = [checkpoint, lambda model, inputs, **_: model(inputs)]
    for around in arounds:
        module.zero_grad()
        with DataParallel(module, 0, shards=2, seed=1, quiet=True) as model:
            output = around(model, inputs, use_reentrant=False)
            output.square().sum().backward()
        found.append([output, *(parameter.grad for parameter in module.parameters())])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    seen: list[torch.Tensor] = []
    with DataParallel(module, 0, quiet=True) as model, saved_tensors_hooks(seen.append, lambda _: seen[-1]):
        output = model(inputs)
        assert not seen
        output.square()
    assert len(seen) == 1, "they are set again after the call"


LOCAL = """
import sys, torch, dp_ray
from torch import nn

class Own(nn.Linear):
    def forward(self, inputs):
        return {"sum": super().forward(inputs)}

net = Own(2, 1)
net.act = lambda value: value  # no pickle but one of this process takes it
model = dp_ray.DataParallel(net, 0, shards=2)
model(torch.ones(4, 2))["sum"].sum().backward()
assert net.weight.grad.tolist() == [[4.0, 4.0]]
assert "ray" not in sys.modules
"""


@pytest.mark.full
def test_here_takes_local_code_and_imports_no_ray() -> None:
    subprocess.run([sys.executable, "-c", LOCAL], cwd=ROOT, check=True)


@pytest.mark.full
def test_a_write_whose_earlier_value_is_lost_is_told_and_the_module_sent_anew() -> None:
    model = DataParallel(models.WritesLate(), 1, shards=2, quiet=True)
    plain, inputs = copy.deepcopy(model.module), torch.ones(4, 2)
    for _ in range(4):
        model(inputs)
    with pytest.raises(ModelError, match=r"wrote large, and not in the first 3 calls of the module, .* is not known"):
        model(torch.full((4, 2), 5.0))
    assert torch.equal(model(inputs), plain(inputs))
