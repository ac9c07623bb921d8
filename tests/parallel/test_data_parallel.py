"""`dp_ray.DataParallel` on real workers, against the bare module in this process."""

import contextlib
import copy
import functools
import gc
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dp_ray
from dp_ray.cluster.own import OF_PROCESS
from dp_ray.errors import ClusterError, DataError, JobError, ModelError, cause_of
from dp_ray.parallel.exchange import SharedWorkers
from dp_ray.serving import wire
from dp_ray.serving.wire import Forward, HeldBytes
from tests.support import parallel_models as models
from tests.support.chance import examples
from tests.support.cluster import ROOT, Cluster

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def workers(cluster: Cluster) -> Iterator[SharedWorkers]:
    """Three workers, which all modules of these tests share."""
    with contextlib.chdir(ROOT):
        first = dp_ray.DataParallel(nn.Identity(), 3, address=cluster.address, quiet=True)
        yield SharedWorkers.by_owner[OF_PROCESS]
        first.close()
        for one in list(SharedWorkers.by_owner.values()):  # a test that has failed may hold a module
            one.close()


def parallel(module: nn.Module, workers: int = 3, **keys: Any) -> dp_ray.DataParallel:
    """The module on the workers; `close` is left to the garbage collector, as users do."""
    return dp_ray.DataParallel(module, workers, quiet=True, **keys)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: one.grad for name, one in module.named_parameters()}


def assert_close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


@settings(max_examples=examples(25))
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


def test_fewer_workers_are_honoured_and_a_closed_module_is_told() -> None:
    model = parallel(nn.Identity(), 2)
    assert len(model(torch.ones(6, 1))) == 6
    assert {one.rank for one in model.shapes} == {0, 1}
    closed = parallel(nn.Identity())
    closed.close()
    with pytest.raises(ClusterError, match="was closed"):
        closed(torch.ones(1))


def test_a_module_that_cannot_be_pickled_is_an_error_that_names_the_attribute() -> None:
    with pytest.raises(JobError, match=r"the module's attribute 0\.lock: cannot be pickled .* TypeError"):
        parallel(nn.Sequential(models.Locked()))


def sent(workers: SharedWorkers, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The numbers of the tensors that go to workers from now on, a tuple for each call; the list grows."""
    told: list[tuple[int, ...]] = []
    before = workers.serving.ask

    def ask(messages: Any) -> Any:
        asked = [message for message in messages.values() if isinstance(message, Forward)]
        if asked:
            told.append(asked[0].sync.changed)
            assert sum(message.sync.data is not None for message in asked) <= 1, "the others have it from the first"
        return before(messages)

    monkeypatch.setattr(workers.serving, "ask", ask)
    return told


def test_only_what_has_changed_is_sent(workers: SharedWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    model, inputs = parallel(module), torch.randn(6, 2)
    told = sent(workers, monkeypatch)

    def call(*changed: int) -> None:
        with torch.no_grad():
            assert_close(model(inputs), module(inputs))
        assert told.pop() == changed

    call(*range(9))
    call()  # once for inference
    first, weight = module[0], module[2].weight
    assert isinstance(first.weight, nn.Parameter) and isinstance(weight, nn.Parameter)
    first.weight.data.mul_(2)  # which moves no version
    call(0)
    weight.detach().numpy()[0, 1] = 7
    call(4)
    weight.data = torch.zeros(1, 3)
    call(4)
    weight.data = -torch.zeros(1, 3)  # equal, and other bits
    call(4)
    weight.data.fill_(torch.nan)
    call(4)
    call()
    weight.data.fill_(1.0)
    optimizer = torch.optim.Adam(module[2].parameters(), fused=True)
    model(inputs).sum().backward()
    assert told.pop() == (4,)
    optimizer.step()
    call(4, 5)
    model.train()
    model(inputs)
    assert told.pop() == ()
    model.eval()
    call(6, 7, 8)  # its buffers are shard 0's, for all
    module[2] = nn.Linear(3, 2)
    call(*range(9))
    assert told == []


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, functools.partial(torch.optim.Adam, fused=True)])
def test_fifty_steps_end_at_the_plain_loops_weights(optimizer: Any) -> None:
    def trained(wrapped: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        model, data = wrapped(bare), torch.Generator().manual_seed(1)
        steps = optimizer(model.parameters(), lr=0.05)
        for _ in range(50):
            inputs = torch.randn(10, 4, generator=data)
            loss = (model(inputs) - inputs[:, :2].sin()).square().mean()
            steps.zero_grad()
            loss.backward()
            steps.step()
        return bare

    got, wanted = trained(parallel), trained(lambda bare: bare)
    torch.testing.assert_close(got.state_dict(), wanted.state_dict(), rtol=1e-5, atol=1e-5)


def test_a_gan_trains_as_its_plain_loop() -> None:
    """Two modules on the same workers; D's two forwards wait for one backward, then G trains through D."""

    def trained(wrapped: Callable[[nn.Module], nn.Module]) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        nets = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        makes, judges = map(wrapped, nets)
        steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in nets]
        for _ in range(5):
            real, fake = torch.randn(6, 3), makes(torch.randn(6, 2))
            loss = judges(fake.detach()).sigmoid().mean() - judges(real).sigmoid().mean()
            steps[1].zero_grad()
            loss.backward()
            steps[1].step()
            steps[0].zero_grad()
            (-judges(fake).sigmoid().mean()).backward()
            steps[0].step()
        return [one.state_dict() for one in nets]

    torch.testing.assert_close(trained(parallel), trained(lambda one: one), rtol=1e-5, atol=1e-6)


def test_bitwise_is_the_same_bits_on_any_number_of_workers() -> None:
    def trained(workers: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        model = parallel(bare, workers, shards=7, bitwise=True, seed=3)
        steps = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(26, 4)).square().sum().backward()
            steps.step()
            steps.zero_grad()
        return bare.state_dict()

    first, *others = [trained(workers) for workers in (1, 2, 3)]
    for one in others:
        assert all(torch.equal(one[name], first[name]) for name in first)


def test_bitwise_sets_in_a_worker_what_it_sets_for_a_job() -> None:
    parallel(models.SetsSettings())(torch.ones(3))
    model, rows = parallel(models.TellsSettings(), shards=3, bitwise=True), torch.ones(3, 5, requires_grad=True)
    output = model(rows)
    output.sum().backward()
    expected = torch.tensor([models.BITWISE] * 3)
    assert torch.equal(output, expected)
    assert rows.grad is not None and torch.equal(rows.grad, expected)


def test_buffers_are_those_of_shard_0_and_draws_are_by_seed() -> None:
    norm = nn.BatchNorm1d(2)
    model, inputs = parallel(copy.deepcopy(norm)), torch.randn(8, 2)
    model(inputs)
    norm(inputs[:3])
    assert_close(model.state_dict(), norm.state_dict())
    drops = [parallel(nn.Dropout(0.5), shards=3, seed=1) for _ in range(2)]
    ones = torch.ones(300)
    (first, second), (other, _) = [[model(ones), model(ones)] for model in drops]
    assert not torch.equal(first, second) and not torch.equal(first, other)
    assert not torch.equal(first[:100], first[100:200])


@pytest.mark.parametrize("anew", ["", "one", "two", "one two"])
def test_buffers_that_begin_as_one_tensor_are_those_of_shard_0(anew: str) -> None:
    module, plain = models.SharesBuffers(anew), models.SharesBuffers(anew)
    model = parallel(module)
    for inputs in torch.randn(3, 9, 2):
        states = [copy.deepcopy(plain) for _ in range(3)]
        assert_close(model(inputs), torch.cat([one(rows) for one, rows in zip(states, inputs.chunk(3), strict=True)]))
        plain = states[0]
        assert_close(module.state_dict(), plain.state_dict())


def test_hooks_of_the_bare_module_run_on_the_workers() -> None:
    module = nn.Linear(2, 2)
    model = parallel(module)
    before = model(torch.ones(4, 2))
    handle = module.register_forward_hook(models.doubled)
    assert torch.equal(model(torch.ones(4, 2)), 2 * before)
    handle.remove()
    assert torch.equal(model(torch.ones(4, 2)), before)


def test_hooks_on_gradients_run_once_at_the_caller_on_the_whole_gradient() -> None:
    module, calls = nn.Linear(2, 2), list[torch.Tensor]()
    bare = copy.deepcopy(module)
    for one in (module, bare):
        one.weight.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))  # type: ignore[no-untyped-call]
        one.weight.register_post_accumulate_grad_hook(lambda one: calls.append(one.grad))  # type: ignore[no-untyped-call]
        model = parallel(one, shards=3) if one is module else one
        model(torch.ones(7, 2)).sum().backward()
    ours, theirs = calls
    assert_close(ours, theirs)
    assert ours.abs().max() == 0.5


@pytest.mark.parametrize("when", ["before", "forward", "backward"])
def test_the_shards_of_a_lost_worker_are_run_again(workers: SharedWorkers, tmp_path: Path, when: str) -> None:
    inputs = torch.randn(9, 2, requires_grad=True)

    def run(kills: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 4), models.Kills(kills, tmp_path / kills), nn.BatchNorm1d(4))
        model = parallel(module, shards=3, bitwise=True, seed=5)
        first = model(inputs)
        if kills == "before":
            os.kill(workers.serving.ready()[1].place.pid, signal.SIGKILL)
        found = [first.detach(), *torch.autograd.grad(first.square().sum(), [inputs, *model.parameters()])]
        second = model(inputs)
        return [*found, second.detach(), *module.buffers()]

    for got, wanted in zip(run(when), run("never"), strict=True):
        assert torch.equal(got, wanted)
    wait_until(lambda: len(workers.serving.ready()) == 3)


@pytest.mark.full(but=["killed1"])
@pytest.mark.parametrize("killed", [(1,), (0, 2), (1, 2), (0, 1, 2)])
def test_survivors_stay_and_others_come_in_the_place_of_the_lost(
    workers: SharedWorkers, killed: tuple[int, ...]
) -> None:
    module, inputs = nn.Linear(2, 3), torch.randn(9, 2)
    model = parallel(module, shards=3)
    assert_close(model(inputs), module(inputs))
    before = [one.place.pid for one in workers.serving.ready()]
    for rank in killed:
        os.kill(before[rank], signal.SIGKILL)
    stay = [pid for rank, pid in enumerate(before) if rank not in killed]
    assert_close(model(inputs), module(inputs))
    there = [one.place.pid for one in workers.serving.members]  # type: ignore[attr-defined]
    assert there == stay if stay else there, "the survivors do not wait for others"
    wait_until(lambda: len(workers.serving.ready()) == 3)
    after = [one.place.pid for one in workers.serving.ready()]
    assert after[: len(stay)] == stay and not {*after[len(stay) :]} & {*before}
    assert_close(model(inputs), module(inputs))
    assert sorted({one.rank for one in model.shapes}) == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_ctrl_c_between_two_sends_leaves_nobody_waiting(
    workers: SharedWorkers, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """Of the backward, whose sums all workers exchange: those with a message wait for those without."""
    module, inputs = nn.Linear(2, 3), torch.ones(9, 2)
    output, framed, sends = parallel(module)(inputs).sum(), wire.framed, iter(range(1, 4))

    def interrupted(message: Any) -> Any:
        if message[1] is not None and next(sends) == cut:  # None: to leave the view
            raise KeyboardInterrupt
        return framed(message)

    with monkeypatch.context() as patch:
        patch.setattr("dp_ray.cluster.serving.framed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            output.backward()
    assert next(sends, None) == (None if cut == 3 else cut + 1)
    assert module.weight.grad is None
    output.backward()
    assert_close(module.weight.grad, torch.full((3, 2), 9.0))
    wait_until(lambda: len(workers.serving.ready()) == 3)
    assert_close(parallel(module)(inputs), module(inputs))


@pytest.mark.parametrize("wait", [1, 2])
def test_ctrl_c_between_two_views_is_followed_by_a_call(
    workers: SharedWorkers, monkeypatch: pytest.MonkeyPatch, wait: int
) -> None:
    """Where workers have left theirs, as after a loss: the driver waits for the members of the next one."""
    module, inputs = nn.Linear(2, 3), torch.ones(9, 2)
    model, serving, waits = parallel(module), cast(Any, workers.serving), iter(range(1, 100))
    checks = serving._check_wait
    model(inputs)

    def interrupted(began: float) -> None:
        if next(waits) == wait:
            raise KeyboardInterrupt
        checks(began)

    with monkeypatch.context() as patch:
        patch.setattr(serving, "_has_changed", True)
        patch.setattr(serving, "_check_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(inputs)
    serving._has_changed = True  # as it was left: the patch has undone it
    assert_close(model(inputs), module(inputs))
    assert {one.rank for one in model.shapes} == {0, 1, 2}


def test_graphs_are_dropped_with_their_outputs_and_with_their_backward(workers: SharedWorkers) -> None:
    model = parallel(nn.Sequential(nn.Linear(2, 100), nn.Tanh()))

    def held() -> int:
        with torch.no_grad():
            model(torch.ones(3, 2))  # which brings what was dropped
        answers = workers.serving.ask(
            dict.fromkeys(workers.serving.ready(), HeldBytes(model._exchange.module_number))
        )
        return sum(answers.values())

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


CALLER = """
import os, signal, sys, torch, dp_ray
from typing import NamedTuple

class Out(NamedTuple):
    y: torch.Tensor

class Own(torch.nn.Linear):
    def forward(self, x):
        return Out(super().forward(x))

model = dp_ray.DataParallel(Own(2, 2), 2, address=sys.argv[1], quiet=True)
assert type(model(torch.ones(4, 2))) is Out
print(*[one.place.pid for one in model._exchange.workers.serving.ready()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_classes_of_main_go_by_value_and_a_dead_caller_leaves_no_process(cluster: Cluster) -> None:
    command = [sys.executable, "-c", CALLER, cluster.address]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    pids = [int(one) for one in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL
    assert len(pids) == 2
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.full
@pytest.mark.slow
def test_a_thousand_calls_leave_memory_files_and_objects_as_they_were(workers: SharedWorkers) -> None:
    model = parallel(nn.Linear(300, 100))  # its gradients come by way of Ray's store
    inputs = torch.randn(60, 300)
    processes = [psutil.Process(), *(psutil.Process(one.place.pid) for one in workers.serving.ready())]

    def run(calls: int) -> tuple[list[int], list[int], float]:
        for _ in range(calls):
            model(inputs).sum().backward()
        gc.collect()
        used = ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]
        return [one.num_fds() for one in processes], [one.memory_info().rss for one in processes], used

    files, memory, objects = run(100)
    files_after, memory_after, objects_after = run(900)
    assert max(after - before for before, after in zip(files, files_after, strict=True)) <= 8
    assert max(after - before for before, after in zip(memory, memory_after, strict=True)) < 30e6
    assert objects_after <= objects + 2e6


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"workers": -1}, "workers: must be a number of 0 or more, got -1"),
        ({"workers": "2"}, "workers: must be a number of 0 or more, got '2'"),
        ({"workers": [0, 1]}, r"workers: must be a number of 0 or more, got \[0, 1\]"),
        ({"device_ids": [0, 1]}, "device_ids: is nn.DataParallel's; here Ray gives each worker its device"),
    ],
)
def test_what_nn_data_parallel_takes_is_told(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        dp_ray.DataParallel(nn.Identity(), **keys)
