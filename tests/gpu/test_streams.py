"""The streams of the loader and of the reducer, under load: the numbers of one stream."""

import gc
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.engine.clock import DevicePlace, Part, StepClock, TimedStep, clock_on
from dp_ray.engine.forward.state import EARLY
from dp_ray.engine.loads import loading
from dp_ray.engine.loads.loading import LoadedShard, on_device
from dp_ray.engine.placement import Placement
from dp_ray.engine.sums.votes import LAG, Lagged, LossWatch, NotFinite
from dp_ray.engine.trainer import Trainer
from dp_ray.engine.user_code import free_memory
from dp_ray.engine.world import (
    TIMEOUT,
    World,
    everyone,
    form_group,
    leave_group,
    new_group,
)
from dp_ray.job.plan import split_of
from dp_ray.messages import Collective, Measured
from dp_ray.plan.split import Shard, Split, Work
from dp_ray.telemetry.flight_recorder import recorded_collectives
from tests.gpu.conftest import ON
from tests.gpu.support import GPT, MLP, RESNET, bits, job_on, run_here
from tests.support.builders import ddp_reduction_of, step_of, steps_of, trainer_of
from tests.support.cluster import ROOT
from tests.support.group import history_of
from tests.support.training import Pairs

IMAGES = {"target": "tests.support.training:Images"}
STEPS = 1000 if ON.startswith("cuda") else 100  # a CPU has no streams
ROWS, WIDTH = 64, 1024


def batches(pinned: bool) -> Generator[LoadedShard, None, None]:
    """Batches whose numbers are those of their step, each in memory of its own."""
    for step in range(STEPS):
        batch = torch.arange(step, step + ROWS * WIDTH, dtype=torch.int32).reshape(ROWS, WIDTH)
        yield LoadedShard(Shard(step, 0, 0, ROWS), np.arange(ROWS), batch.pin_memory() if pinned else batch)


@pytest.mark.parametrize("pinned", [True, False])
def test_the_loaders_copies_are_whole_and_stay_until_they_are_computed(device: torch.device, pinned: bool) -> None:
    """The load makes the computing stream lag behind, so that copies and freed memory run ahead of it."""
    load = torch.ones(1024, 1024, device=device) if device.type == "cuda" else torch.ones(8, 8)
    sums = []
    for _, _, batch in on_device(batches(pinned and device.type == "cuda"), device):
        load = (load @ load).clamp(max=1.0)
        sums.append(batch.sum(dtype=torch.int64))
        del batch  # its memory is free for the next copy, if nobody holds it for the computing stream
    size = ROWS * WIDTH
    assert torch.stack(sums).tolist() == [size * (size - 1) // 2 + size * step for step in range(STEPS)]


def on_one_stream(
    loaded: Iterator[LoadedShard], device: torch.device, _: StepClock | None = None
) -> Generator[LoadedShard, None, None]:
    """What `on_device` is to be equal to: each copy in the computing stream, and waited for."""
    for one in loaded:
        moved = [leaf.to(device) for leaf in one.batch]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield one._replace(batch=moved)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_training_of_a_thousand_steps_is_that_of_one_stream(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    pairs = {"target": "tests.support.training:Started", "args": {"loader_context": "forkserver"}}
    keys = {
        **MLP,
        "dataset": pairs,
        "shards": 2,
        "bitwise": True,
        "max_steps": STEPS,
        "epochs": STEPS,
        "batch_size": 20,
    }
    run_here(job_on(device, **keys, loader={"processes": processes}), tmp_path / "streams")
    monkeypatch.setattr(loading, "on_device", on_one_stream)
    run_here(job_on(device, **keys), tmp_path / "one stream")
    assert bits(tmp_path / "streams") == bits(tmp_path / "one stream")


@pytest.mark.parametrize("bitwise", [True, False])
@pytest.mark.parametrize("kind", ["MLP", "GPT", "RESNET"])
def test_a_thousand_steps_through_the_reducers_stream_are_those_without_it(
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    group_of_one: None,
    kind: str,
    bitwise: bool,
) -> None:
    steps = STEPS if kind == "MLP" else 50
    keys = {**{"MLP": MLP, "GPT": GPT, "RESNET": RESNET}[kind], "bitwise": bitwise, "shards": 3}
    keys = {**keys, "max_steps": steps, "epochs": steps, "batch_size": 12}
    run_here(job_on(device, **keys), tmp_path / "plain")
    monkeypatch.setattr(Placement, "reduction", ddp_reduction_of)
    run_here(job_on(device, **keys), tmp_path / "reduced")
    if bitwise:
        assert bits(tmp_path / "reduced") == bits(tmp_path / "plain")
    ours, theirs = (history_of(tmp_path / name)[10]["loss"] for name in ("reduced", "plain"))
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("bitwise", [True, False])
def test_ddp_says_nothing_of_strides_that_reach_no_element(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, group_of_one: None, bitwise: bool
) -> None:
    """The model makes DDP's warning an error."""
    job = job_on(
        device,
        {"target": "tests.engine.sums.test_gradient_strides:Depthwise"},
        dataset=IMAGES,
        bitwise=bitwise,
        shards=3,
    )
    run_here(job, tmp_path / "plain")
    monkeypatch.setattr(Placement, "reduction", ddp_reduction_of)
    run_here(job, tmp_path / "reduced")
    ours, theirs = (history_of(tmp_path / name)[10]["loss"] for name in ("reduced", "plain"))
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("bitwise", [True, False])
def test_a_training_through_the_reducer_gives_back_what_it_took(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, group_of_one: None, bitwise: bool
) -> None:
    """DDP's hook is held where the garbage collector does not look."""

    def taken() -> tuple[int, int]:
        free_memory()
        models = sum(issubclass(type(one), torch.nn.Module) for one in gc.get_objects())
        return models, torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    monkeypatch.setattr(Placement, "reduction", ddp_reduction_of)
    found = []
    for number in range(3):
        run_here(job_on(device, **MLP, bitwise=bitwise, shards=3), tmp_path / str(number))
        found.append(taken())
    assert found[1] == found[2]


@pytest.mark.parametrize("task", ["train", "evaluate", "predict"])
def test_a_group_of_one_gives_what_no_group_gives(
    tmp_path: Path, device: torch.device, group_of_one: None, task: str
) -> None:
    optimizer = {} if task == "train" else {"optimizer": None}
    job = job_on(device, **RESNET | optimizer, task=task, batch_size=12, shards=2, bitwise=True)
    found = [of_run(run_here(job, tmp_path / "group"), tmp_path / "group")]
    leave_group()
    found.append(of_run(run_here(job, tmp_path / "none"), tmp_path / "none"))
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_connects_to_its_gpu_when_it_is_formed(device: torch.device, backend: str) -> None:
    """A second group, and one of the CPUs, can be made of a group that is bound to its GPU."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    is_gpu = device.type == "cuda"
    form_group(backend if is_gpu else "gloo", store, World(device=device, all_devices=(device,)))
    try:
        formed = everyone()
        assert formed is not None
        assert formed.bound_device_id == (device if is_gpu else None)
        assert store.timeout == TIMEOUT
        for group, at in ((formed, device), (new_group(), device), (new_group("gloo"), torch.device("cpu"))):
            ones = torch.ones(3, device=at)
            dist.all_reduce(ones, group=group)
            assert ones.tolist() == [1.0] * 3
    finally:
        leave_group()


def of_run(sent: list[Any], folder: Path) -> Any:
    """What a run of any task gave: weights and history, metrics, or the bytes of its parts' tensors."""
    if (folder / "weights.safetensors").exists():
        return bits(folder)
    parts = [pq.read_table(part).to_pydict() for part in sorted((folder / "parts").glob("*.parquet"))]
    return parts or [one for one in sent if isinstance(one, Measured)]


def small_trainer(device: torch.device, **keys: Any) -> tuple[Trainer, Any, Split]:
    """A trainer on the device, its batches and its split."""
    job = job_on(device, **{**MLP, "shards": 2, "batch_size": 20, "epochs": 40, **keys})
    dataset = Pairs()
    split = split_of(job, len(dataset))
    return trainer_of(job, World(device=device), split), steps_of(job, dataset, device=device), split


@contextmanager
def no_waits() -> Iterator[None]:
    """While the block runs, whatever waits for the GPU raises a RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


UNWAITED = 16


@pytest.mark.parametrize("keys", [{}, {"bitwise": True}, {"grad_clip": 1.0}, {"precision": "bf16"}])
def test_no_step_waits_for_the_gpu(cuda: torch.device, keys: dict[str, Any]) -> None:
    made, loaded, split = small_trainer(cuda, **keys)
    work = itertools.islice(Work(split, 1, 0), UNWAITED)
    early, others = itertools.islice(work, EARLY), work  # in early steps it reads the parameters' digests
    for _ in early:
        step_of(made, loaded)
    with no_waits():
        num_steps = EARLY + len([step_of(made, loaded) for _ in others])
        with pytest.raises(RuntimeError, match="synchron"):
            torch.ones((), device=cuda).item()
    assert num_steps == UNWAITED


def test_the_watch_over_losses_lags_on_a_gpu_and_names_the_step(cuda: torch.device) -> None:
    watch, numbers = LossWatch("run"), torch.tensor([1.0, float("nan")], device=cuda)
    with no_waits():
        for step in range(3, 3 + LAG):
            watch.take(step, numbers[int(step >= 4)])
            watch.check()
    assert not watch.is_finite(), "where a checkpoint is due, it waits for the GPU and knows"
    for step in range(3 + LAG, 4 + LAG):
        watch.check()
        watch.take(step, numbers[0])
    watch.take(4 + LAG, numbers[0])
    with pytest.raises(NotFinite, match="step 4: the loss is nan"):
        watch.check()
    late = LossWatch("run")
    late.take(0, numbers[1])
    late.check()
    with pytest.raises(NotFinite, match="step 0: the loss is nan"):
        late.check_all()


def test_the_stop_vote_lags_on_a_gpu_and_waits_for_no_later_step(cuda: torch.device) -> None:
    votes = Lagged()
    for step in range(40):
        asked = step >= 20
        assert bool(votes.take(torch.full((), float(asked), device=cuda))) == (step - LAG >= 20)
    ahead: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]  # half a second of the GPU, behind which this step stands
    ahead.record()
    votes.take(torch.ones((), device=cuda))
    assert not ahead.query(), "the vote of this step was waited for"


class Long(nn.Module):
    """A model of many small kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(50))
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.relu(layer(inputs))
        outputs: torch.Tensor = self.last(inputs)
        return outputs


def test_memory_is_flat_over_a_thousand_steps(cuda: torch.device) -> None:
    made, loaded, _ = small_trainer(cuda, model={"target": "tests.gpu.test_streams:Long"}, epochs=STEPS)
    held = []
    for step in range(STEPS + 1):
        step_of(made, loaded)
        if step in (100, STEPS):
            torch.cuda.synchronize(cuda)
            held.append(torch.cuda.memory_allocated(cuda))
    assert held[1] <= held[0] + 2**20


def test_the_parts_of_steps_are_read_without_waiting_for_the_device(device: torch.device) -> None:
    """They add up to the time of the loop; nothing in it synchronises."""
    clock, load = clock_on(device), torch.ones(512, 512, device=device)
    timed: list[TimedStep] = []
    with unsynchronised(device):
        began = time.perf_counter()
        clock.restart()
        for step in range(50):
            for part in (Part.FORWARD, Part.BACKWARD):
                clock.enter(part)
                for _ in range(2 + 2 * (part is Part.BACKWARD)):
                    load = (load @ load).clamp(max=1.0)
            timed += clock.end_step(step, 4)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    timed += clock.rest()
    assert [one.step for one in timed] == list(range(50))
    assert 0.3 * seconds < sum(sum(one.seconds) for one in timed) <= 1.05 * seconds
    assert all(one.seconds[Part.FORWARD] > 0 and one.seconds[Part.BACKWARD] > 0 for one in timed)


def test_a_hung_kernel_is_seen_from_another_thread_and_waited_for_by_nobody(cuda: torch.device) -> None:
    clock, found = clock_on(cuda), list[Any]()
    clock.end_step(0, 4)
    torch.cuda.synchronize(cuda)
    assert clock.place() == DevicePlace(0, Part.OTHER)
    clock.enter(Part.FORWARD)
    torch.cuda._sleep(4 * 10**9)  # type: ignore[no-untyped-call]  # some two seconds
    clock.enter(Part.EXCHANGE)
    clock.end_step(1, 4)
    with no_waits():
        asking, began = threading.Thread(target=lambda: found.append(clock.place())), time.perf_counter()
        asking.start()
        asking.join()
    assert time.perf_counter() - began < 0.5
    assert found == [DevicePlace(0, Part.FORWARD)]
    torch.cuda.synchronize(cuda)
    assert clock.place() == DevicePlace(1, Part.OTHER)


ASSERTS = """
import torch
from dp_ray.engine.clock import Part, clock_on
clock = clock_on(torch.device("cuda:0"))
clock.end_step(0, 4)
torch.cuda.synchronize()
clock.enter(Part.FORWARD)
torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
try:
    torch.cuda.synchronize()
except RuntimeError:
    print(clock.place())
"""


def test_a_gpu_that_has_failed_says_what_it_raises(cuda: torch.device) -> None:
    """In a process of its own: it runs nothing any more."""
    done = subprocess.run([sys.executable, "-c", ASSERTS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert re.match(r"raises CUDA error: device-side assert", done.stdout), done.stderr[-3000:]


def test_the_flight_recorder_has_a_groups_last_collective(device: torch.device, group_of_one: None) -> None:
    dist.all_reduce(torch.ones(3, 2, device=device), group=everyone())
    group = f"{'nccl' if device.type == 'cuda' else 'gloo'} dp_ray-1 all"
    end = time.monotonic() + 30
    while time.monotonic() < end:  # NCCL's own thread looks now and then at what is over
        found = next(collective for collective in recorded_collectives()[1] if collective.group == group)
        if found.state == "over":
            break
        time.sleep(0.1)
    assert found == Collective(group, found.number, "all_reduce", "[3, 2]", "over")


@contextmanager
def unsynchronised(device: torch.device) -> Iterator[None]:
    """Within the block, waiting for a GPU is an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
