"""What is done again where a worker that serves a module is lost: on processes in a gloo group, without Ray."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.cluster.own import OF_PROCESS
from dp_ray.parallel import module as parallel
from dp_ray.parallel.exchange import SharedWorkers
from dp_ray.tasks.wire import Forward
from tests.support.served import Gloo, GlooServing


class Noted(nn.Linear):
    """Notes the process of each of its forwards."""

    def __init__(self, notes: str) -> None:
        super().__init__(2, 3)
        self.notes = notes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with open(self.notes, "a") as notes:
            notes.write(f"{os.getpid()}\n")
        return super().forward(inputs)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dp_ray.DataParallel]:
    monkeypatch.setattr(parallel, "own_workers", lambda *_, **__: Gloo())
    with dp_ray.DataParallel(Noted(str(tmp_path / "notes")), 3, quiet=True) as made:
        yield made


def serving() -> GlooServing:
    found: Any = SharedWorkers.by_owner[OF_PROCESS].serving
    return found


def noted(model: dp_ray.DataParallel) -> list[int]:
    return [int(line) for line in Path(model.module.notes).read_text().split()]


def kill(rank: int) -> int:
    pid: int = serving().ready()[rank].place.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_only_the_shards_whose_graphs_are_lost_run_again(model: dp_ray.DataParallel) -> None:
    inputs = torch.randn(9, 2)
    outputs = model(inputs)
    lost = kill(1)
    with torch.no_grad():  # it finds the worker gone, and its own shard runs elsewhere
        torch.testing.assert_close(model(inputs), outputs.detach())
    before = len(noted(model))
    outputs.square().sum().backward()
    ran = noted(model)[before:]
    assert len(ran) == 1 and lost not in ran
    module = nn.Linear(2, 3)
    module.load_state_dict(model.state_dict())
    module(inputs).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(model.module.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("killed", [(1,), (0, 2), (0, 1, 2)])
def test_newcomers_alone_are_sent_the_module(model: dp_ray.DataParallel, killed: tuple[int, ...]) -> None:
    inputs = torch.randn(9, 2)
    bare = nn.Linear(2, 3)

    def call() -> tuple[set[int], set[tuple[int, ...]]]:
        """Who got the module whole, and which of its tensors all have got."""
        del serving().told[:]
        bare.load_state_dict(model.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(model(inputs), bare(inputs))
        sent = [
            (member.place.pid, message.sync)
            for told in serving().told
            for member, message in told.items()
            if isinstance(message, Forward)
        ]
        return {pid for pid, sync in sent if sync.whole is not None}, {sync.changed for _, sync in sent}

    assert call() == ({member.place.pid for member in serving().ready()}, {(0, 1)})
    before = {member.place.pid for member in serving().ready()}
    lost = {kill(rank) for rank in killed}
    whole, changed = call()
    newcomers = {member.place.pid for member in serving().ready()} - before
    assert whole == newcomers and len(newcomers) == len(lost)
    assert changed == ({()} if len(lost) < 3 else {(), (0, 1)})
    model.module.weight.data.add_(1.0)
    assert call() == (set(), {(0,)})
    lost = {kill(rank) for rank in killed}
    model.module.bias.data.add_(1.0)
    whole, changed = call()
    assert whole.isdisjoint(before | newcomers) and len(whole) == len(lost)
    if len(lost) < 3:
        assert changed == {(1,)}
