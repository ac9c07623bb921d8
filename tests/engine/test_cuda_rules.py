"""What CUDA asks of the code, seen without a GPU: what a stand-in for torch.cuda is told, and in which order."""

import contextlib
import math
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine import host_copy, random
from dp_ray.engine.clock import DeviceClock
from dp_ray.engine.forward.model import build_model
from dp_ray.engine.host_copy import side_stream
from dp_ray.engine.loads import loading
from dp_ray.engine.loads.items import SampleReader
from dp_ray.engine.loads.loader import Collated, Samples, StepTimes, TimedLoader
from dp_ray.engine.loads.loading import LoadedShard
from dp_ray.engine.trainer import Update
from dp_ray.engine.user_code import free_memory, raise_as
from dp_ray.engine.world import World, text_of
from dp_ray.errors import DataError, ModelError
from dp_ray.job.samples import ReadRequest
from dp_ray.messages import StepControl
from dp_ray.plan.split import Shard, Split
from dp_ray.rundir import checkpoint
from dp_ray.rundir.checkpoint import CheckpointWriter
from dp_ray.rundir.history import FinishedStep, History
from dp_ray.storage import Storage
from dp_ray.system.threads import waits_for
from dp_ray.tasks import task
from dp_ray.tasks.train_state import TrainState
from dp_ray.tensors.pinned import PinnedMemory
from tests.support import training
from tests.support.builders import loader_of, optimizer_step_of
from tests.support.group import ProcessExit, run_group, weights_of
from tests.support.trainings import initial, job_of
from tests.support.within import within

GPU = torch.device("cuda", 0)
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Stream(contextlib.nullcontext[None]):
    """A stream that keeps how many copies each wait is for."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Any] = []
        self.waited: list[int] = []


class Event:
    """An event of a stream, which knows how many copies are before it."""

    def __init__(self, device: torch.device) -> None:
        self.copies = 0

    def record(self, stream: Stream) -> None:
        self.copies = len(stream.copies)

    def wait(self, stream: Stream) -> None:
        stream.waited.append(self.copies)


def test_a_batch_is_computed_without_waiting_for_the_next_ones_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(loading, "side_stream", lambda device, use: stream)
    monkeypatch.setattr(loading, "entered", lambda stream: stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)

    def move(batch: Any, device: torch.device) -> Any:
        stream.copies.append(batch)
        return batch

    monkeypatch.setattr(loading, "moved_batch", move)
    shards = (LoadedShard(Shard(0, 0, 0, 1), np.arange(1), np.arange(number)) for number in range(1, 5))
    given = [len(one.batch) for one in loading.on_device(shards, GPU)]
    assert given == [1, 2, 3, 4]
    assert len(stream.copies) == 4
    assert stream.waited == [1, 2, 3, 4], "the copy of the next batch is in the queue already"


def test_all_loaders_of_a_gpu_copy_in_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def make(device: torch.device) -> object:
        made.append(device)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", make)
    one, other = torch.device("cuda", 6), torch.device("cuda", 7)
    try:
        assert side_stream(one, "copies") is side_stream(torch.device("cuda", 6), "copies")
        assert side_stream(one, "copies") is not side_stream(one, "sums")
        assert side_stream(other, "copies") is not side_stream(one, "copies")
        assert made == [one, one, other]
    finally:
        side_stream.cache_clear()


class CountsExchanges(StepControl):
    """Ends the worker in the third step, with an error that tells how often the second one exchanged slices.

    In the first one DDP has one bucket for all.
    """

    def before(self, step: int) -> None:
        if step == 0:
            self.count = 0
            exchange = dist.all_to_all_single

            def counted(*args: Any, **keys: Any) -> Any:
                self.count += 1
                return exchange(*args, **keys)

            dist.all_to_all_single = counted
        if step == 1:
            self.count = 0
        if step == 2:
            raise ModelError(f"{self.count} exchanges")


@pytest.mark.parametrize(("model", "exchanges"), [("HalfMlp", "[1-9]"), ("mlp", "0")])
def test_two_workers_leave_sums_below_fp32_to_no_all_reduce(tmp_path: Path, model: str, exchanges: str) -> None:
    """NCCL's may round each sum on the way, as NVLink SHARP does."""
    job = job_of(model, loss="tests.support.training:heavy", bitwise=True, shards=4, workers=2)
    with pytest.raises(ProcessExit, match=f"ModelError: {exchanges} exchanges"):
        run_group(job, tmp_path, CountsExchanges())


@pytest.mark.full(but=["None-2"])
@pytest.mark.parametrize(("size", "exchanges"), [(None, 2), (0.5, 3)])
def test_the_size_of_a_bucket_is_a_key_and_changes_no_bit(tmp_path: Path, size: float | None, exchanges: int) -> None:
    model = {"target": "tests.sim.jobs:Wide"}  # 2.7 MB
    keys: dict[str, Any] = {"bitwise": True, "shards": 3, "max_steps": 3}
    with pytest.raises(ProcessExit, match=f"ModelError: {exchanges} exchanges"):
        run_group(job_of(model, **keys, workers=3, bucket_cap_mb=size), tmp_path / "counted", CountsExchanges())
    run_group(job_of(model, **keys, workers=3, bucket_cap_mb=size), tmp_path / "three")
    run_group(job_of(model, **keys, workers=1), tmp_path / "one")
    three, one = weights_of(tmp_path / "three"), weights_of(tmp_path / "one")
    assert all(torch.equal(three[name], one[name]) for name in one)


def test_half_precision_has_the_same_bits_on_one_two_and_three_workers(tmp_path: Path) -> None:
    for workers in (1, 2, 3):
        keys = {"loss": "tests.support.training:heavy", "bitwise": True, "shards": 4, "workers": workers}
        run_group(job_of("HalfMlp", **keys), tmp_path / str(workers))
    one, two, three = (weights_of(tmp_path / str(workers)) for workers in (1, 2, 3))
    assert all(torch.equal(one[name], two[name]) and torch.equal(one[name], three[name]) for name in one)


def test_memory_is_freed_after_an_assert_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", raises)
    free_memory()  # where an error is on its way, one more would hide it


def test_an_error_of_cuda_tells_how_to_find_its_kernel() -> None:
    late = RuntimeError("CUDA error: device-side assert triggered\nFor debugging ...\n")
    with pytest.raises(ModelError, match=r"model raised RuntimeError: (?s:.*)env: {CUDA_LAUNCH_BLOCKING: '1'}"):
        raise_as(late, "model")
    for at_once in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm(...)`",
    ):
        assert text_of(RuntimeError(at_once)) == at_once


def unpools(inputs: torch.Tensor) -> torch.Tensor:
    """Compute what has no deterministic kernel, on the CPU either."""
    pooled, where = nn.functional.max_pool1d(inputs[None], 2, return_indices=True)
    return nn.functional.max_unpool1d(pooled, where, [2])[0]


class Unpools(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(unpools(inputs))


def test_an_operation_that_bitwise_cannot_have_names_the_key(tmp_path: Path) -> None:
    model = {"target": "tests.engine.test_cuda_rules:Unpools", "args": {"in_features": 6, "out_features": 3}}
    says = r"ModelError: step 0, shard 0: model raised RuntimeError: (?s:.*)bitwise: true.*set bitwise: false"
    with pytest.raises(ProcessExit, match=says):
        run_group(job_of(model, bitwise=True, shards=2, workers=1), tmp_path)


def test_what_a_loaders_process_gets_holds_no_events_of_the_gpu() -> None:
    clock = DeviceClock(lambda: SimpleNamespace(record=id), object)  # such as on a GPU: it cannot be pickled
    samples = Samples(SampleReader(training.Pairs()), 0, times=StepTimes(clock))
    there = pickle.loads(pickle.dumps(samples))
    assert len(there.__getitems__(ReadRequest(0, 0, 0, [3, 4]))[1]) == 2


class Boxed(NamedTuple):
    rows: torch.Tensor
    names: list[str]


def test_pinned_batches_keep_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step gets what it gets on a CPU: torch's loader by itself would make a list of a tuple."""
    pinned = list[int]()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for batch in (
        (torch.ones(2), torch.ones(3)),
        {"a": (torch.ones(2), [torch.ones(3)])},
        Boxed(torch.ones(2), ["x"]),
    ):
        pinned.clear()
        found = Collated(0.0, (np.arange(2), batch)).pin_memory().read[1]
        assert type(found) is type(batch) and repr(found) == repr(batch)
        assert pinned == [2, 3][: 1 if isinstance(batch, Boxed) else 2]


@pytest.mark.parametrize("begins", ["", "Caught RuntimeError in pin memory thread for device 0.\n"])
def test_samples_that_are_on_a_gpu_already_are_told_what_to_set(monkeypatch: pytest.MonkeyPatch, begins: str) -> None:
    class OnGpu:
        num_workers = 0

        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError(f"{begins}cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
            yield

    def loaded(*_: Any) -> TimedLoader:
        return TimedLoader(OnGpu(), StepTimes())  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "make_loader", loaded)
    job = job_of("mlp")
    with pytest.raises(DataError, match=r"on a GPU already.*set loader\.pin_memory: false"):
        next(loader_of(job, training.Pairs()))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """A process in which CUDA is not started, and the generator of the GPU that torch lists once it is."""
    generator = torch.Generator()

    def init() -> None:
        monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return generator


class DrawsOnTheGpu(torch.nn.Linear):
    """A model whose weights are drawn on a GPU."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.register_buffer("drawn", torch.rand(2, generator=torch.cuda.default_generators[0]))


@pytest.mark.parametrize("devices", [[GPU], [torch.device("cpu"), GPU]])
def test_a_models_first_draw_on_a_gpu_is_the_seeds(
    on_a_gpu: torch.Generator, devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of({"target": "tests.engine.test_cuda_rules:DrawsOnTheGpu"}, seed=5)
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: model)
    model: Any = build_model(job, devices)
    assert model.drawn.equal(torch.rand(2, generator=torch.Generator().manual_seed(5)))


def test_the_generators_of_all_gpus_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[list[torch.device]] = []

    @contextlib.contextmanager
    def fork(devices: list[torch.device]) -> Iterator[None]:
        forked.append(devices)
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    others = [torch.device("cpu"), torch.device("cuda", 1), GPU]
    with random.preserved(GPU, *others):
        pass
    assert forked == [[GPU, torch.device("cuda", 1)]]


@pytest.mark.parametrize("bitwise", [False, True])
def test_every_job_on_a_gpu_sets_its_device_and_cublas_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bitwise: bool
) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    seen: list[Any] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        seen.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(task, "train", lambda *_: seen.append(os.environ.get(WORKSPACE)))
    monkeypatch.setattr(task, "preserved", lambda *_: contextlib.nullcontext())
    card = SimpleNamespace(name="card", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for devices in ((torch.device("cuda", 1), GPU), (torch.device("cpu"), GPU), (torch.device("cpu"),)):
        world = World(device=devices[0], all_devices=devices)
        task.run_task(job_of("mlp", bitwise=bitwise), world, Storage(str(tmp_path)), print)
    # torch looks once, at a process's first product: a bitwise job may follow another one in the same process.
    assert seen == [torch.device("cuda", 1), ":4096:8", GPU, ":4096:8", None]
    assert WORKSPACE not in os.environ


class Slow(torch.Tensor):
    """A number on a GPU, whose reading waits for the other workers: it keeps what the task says that it waits for."""

    told: ClassVar[list[str]] = []

    def tolist(self) -> Any:
        self.told.append(waits_for())
        return super().tolist()


def test_a_read_that_waits_for_the_gpu_is_no_hang_of_this_worker() -> None:
    Slow.told.clear()
    state = TrainState()
    sums = torch.ones(4).as_subclass(Slow)
    state.count(Update(sums, 0.1, torch.tensor(1.0), False))
    assert state.end_epoch() == 1.0
    assert Slow.told == ["the GPU, which may be in a collective"]


def test_a_scaler_that_waits_for_the_gpu_is_no_hang_of_this_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = training.mlp(), set()
    step = optimizer_step_of(job_of("mlp", precision="fp16"), model)
    scaler = step.scaler
    assert scaler is not None

    def read(scaler: Any, optimizer: Any) -> None:
        told.add(waits_for())

    monkeypatch.setattr(type(scaler), "step", read)
    (loss := model(torch.ones(1, 6)).sum()).backward(step.gradients.of_loss(loss, 1))
    step.apply(torch.tensor(1.0), 1, 0)
    assert told == {"the GPU, which may be in a collective"}


@pytest.mark.parametrize("clip", [None, 0.01, 100.0])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("weight", [7.0, 5.0, 0.0])
def test_the_gradient_is_weighed_and_clipped_as_the_mean_loss_of_plain_torch(
    weight: float, on_gpu: bool, clip: float | None
) -> None:
    """On a GPU the weight is a tensor, which no step reads."""
    model, plain = (initial(training.mlp) for _ in range(2))
    inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    total = plain(inputs).square().sum()
    (total / weight if weight else total * 0.0).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), math.inf if clip is None else clip)
    torch.optim.SGD(plain.parameters(), 0.1).step()
    sgd = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
    step = optimizer_step_of(job_of("mlp", grad_clip=clip, optimizer=sgd), model)
    loss = model(inputs).square().sum()
    loss.backward(step.gradients.of_loss(loss, 7))
    norm = step.apply(torch.tensor(weight, dtype=torch.float64) if on_gpu else weight, 7, 0)
    torch.testing.assert_close(norm, expected)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)


def test_the_history_is_read_from_the_device_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow.told.clear()
    sent: list[Any] = []
    history = History(Storage(str(tmp_path)), Split(20, 4, 1), ["loss"], [], 0, sent.append)
    sums = [torch.tensor([number, 4.0, 0.0, 0.0], dtype=torch.float64).as_subclass(Slow) for number in range(3)]
    for step, one in enumerate(sums):
        update = Update(one, 0.1, torch.tensor(0.1 + step).as_subclass(Slow), False)
        history.add(FinishedStep(step, update, {}, 0.0, 0.0))
    history.flush()
    (logged,) = sent
    assert [row["loss"] for row in logged] == [0.0, 0.25, 0.5]
    assert [row["gradient_norm"] for row in logged] == [float(torch.tensor(0.1 + step)) for step in range(3)]
    assert len(Slow.told) == 1, "each read waits for the GPU"


class OnTheGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
    device = GPU


def test_the_history_of_a_gpu_comes_while_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: list[bool] = []

    class Coming:
        def __init__(self, numbers: torch.Tensor) -> None:
            self.numbers = numbers

        def is_here(self) -> bool:
            return bool(ready)

        def wait(self) -> torch.Tensor:
            return self.numbers.as_subclass(torch.Tensor)

    monkeypatch.setattr(host_copy, "HostCopy", Coming)
    monkeypatch.setattr("dp_ray.rundir.history.SEND_SECONDS", -1.0)  # each step asks for what has come
    sent: list[Any] = []
    history = History(Storage(str(tmp_path)), Split(20, 4, 1), ["loss"], [], 0, sent.append)

    def add(step: int) -> None:
        sums = torch.tensor([step, 4.0, 0.0, 0.0], dtype=torch.float64).as_subclass(OnTheGpu)
        update = Update(sums, 0.1, torch.tensor(1.0).as_subclass(OnTheGpu), False)
        history.add(FinishedStep(step, update, {}, time.perf_counter(), 0.0))

    add(0)
    add(1)
    assert not sent, "no step waits"
    ready.append(True)
    add(2)
    assert [row["step"] for logged in sent for row in logged] == [0, 1, 2]
    ready.clear()
    add(3)
    assert history.take().column("loss").to_pylist() == [0.0, 0.25, 0.5, 0.75]
    assert [row["step"] for logged in sent for row in logged] == [0, 1, 2, 3]


def test_a_checkpoint_waits_once_for_all_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    copy = torch.Tensor.copy_

    def spied(into: torch.Tensor, tensor: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        log.append(f"copy {non_blocking}")
        return copy(into, tensor.as_subclass(torch.Tensor))

    class Current:
        def synchronize(self) -> None:
            log.append("wait")

    class Runtime:
        """CUDA's runtime, which knows what memory is pinned."""

        pinned: ClassVar[dict[int, int]] = {}

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            self.pinned[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            return 0 if self.pinned.pop(address) else 1

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.Tensor, "copy_", spied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current())
    writer = CheckpointWriter(Storage(str(tmp_path)), 1)
    tensors: dict[str, Any] = {name: torch.ones(3).as_subclass(OnTheGpu) for name in "abc"}
    writer._stage(tensors)
    assert log == ["copy True"] * 3 + ["wait"]
    assert {name: value.tolist() for name, value in writer._staged.items()} == dict.fromkeys("abc", [1.0] * 3)
    (pinned,) = Runtime.pinned.items()
    assert pinned[1] == 3 * 64, "12 bytes each, at multiples of 64; torch's own would take 256 for the whole"
    writer._stage(tensors)
    assert list(Runtime.pinned.items()) == [pinned], "the same memory again"
    other: Any = torch.ones(100).as_subclass(OnTheGpu)
    writer._stage({"a": other})
    assert list(Runtime.pinned.values()) == [448], "a state of another size gives back what it had"
    writer.close()
    assert not Runtime.pinned


def test_a_checkpoints_memory_is_pinned_in_pieces_by_the_writers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: dict[int, tuple[int, str]] = {}

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            pinned[address] = size, threading.current_thread().name
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            return 0 if pinned.pop(address) else 1

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr("dp_ray.tensors.pinned.PIECE", 1024)
    writer = CheckpointWriter(Storage(str(tmp_path)), 1)
    sizes = {"a": 100, "b": 150, "large": 1000, "c": 10, "d": 20}
    tensors: dict[str, Any] = {
        name: torch.full((size,), float(size)).as_subclass(OnTheGpu) for name, size in sizes.items()
    }
    writer.prepare(tensors)
    writer.wait()
    before = dict(pinned)
    assert list(before.values()) == [(size, "checkpoint_0") for size in (448 + 640, 4032, 64 + 128)], (
        "a piece has 1024 bytes, or a single tensor"
    )
    writer._stage(tensors)
    assert pinned == before, "the loop pins nothing"
    assert {name: value.tolist() for name, value in writer._staged.items()} == {
        name: [float(size)] * size for name, size in sizes.items()
    }
    writer.close()
    assert not pinned


class SlowRuntime:
    """CUDA's runtime, in which to pin memory takes an hour for each byte; and the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pinned: list[int] = []

    def monotonic(self) -> float:
        return self.now

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.now += 3600 * size
        self.pinned.append(size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowRuntime:
    runtime = SlowRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(checkpoint, "time", runtime)
    monkeypatch.setattr("dp_ray.tensors.pinned.PIECE", 1000)
    return runtime


PIECES: Any = {name: torch.ones(size).as_subclass(OnTheGpu) for name, size in {"a": 250, "b": 500, "c": 750}.items()}


def test_after_each_piece_of_memory_the_loop_has_as_long_for_its_kernels(tmp_path: Path, slow: SlowRuntime) -> None:
    pauses: list[float] = []
    writer = CheckpointWriter(Storage(str(tmp_path)), 1)
    writer._without_pauses = SimpleNamespace(wait=pauses.append, set=lambda: None)  # type: ignore[assignment]
    writer.prepare(PIECES)
    writer.wait()
    assert pauses == [3600 * size for size in slow.pinned]
    assert len(pauses) == 3
    writer.close()


def test_a_checkpoint_that_is_due_has_its_memory_pinned_without_pauses(tmp_path: Path, slow: SlowRuntime) -> None:
    writer = CheckpointWriter(Storage(str(tmp_path)), 1)
    writer.prepare(PIECES)
    writer.wait()
    assert len(slow.pinned) == 3
    writer.close()


def test_a_writer_that_is_closed_pins_no_more(tmp_path: Path, slow: SlowRuntime) -> None:
    writer = CheckpointWriter(Storage(str(tmp_path)), 1)
    writer.prepare(PIECES)
    assert within(60, lambda: bool(slow.pinned))
    writer.close()
    assert len(slow.pinned) == 1


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a container may lock no memory. CUDA keeps the error, and torch would raise it at the next kernel."""
    kept: list[str] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            kept.append("CUDA error: out of memory")
            return 2

        def cudaHostUnregister(self, address: int) -> int:
            raise AssertionError("what is not pinned is given back")

    def kernel(*_: Any, device: torch.device) -> torch.Tensor:
        assert device == GPU
        if kept:
            raise RuntimeError(kept.pop())
        return torch.zeros(1)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "ones", kernel)
    memory = PinnedMemory()
    tensors: dict[str, Any] = {
        "a": torch.arange(3.0).as_subclass(OnTheGpu),
        "b": torch.arange(2).as_subclass(OnTheGpu),
    }
    places = memory.places(tensors)
    assert not kept, "the error is taken away"
    for key, tensor in tensors.items():
        places[key].copy_(tensor, non_blocking=True)
    assert {key: place.tolist() for key, place in places.items()} == {"a": [0.0, 1.0, 2.0], "b": [0, 1]}
    assert memory.places(tensors) is places, "the same memory again"
    memory.free()
