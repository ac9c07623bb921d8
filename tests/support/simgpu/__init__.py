"""A simulated GPU: torch's `cuda` on a machine without one, with a detector of races between streams.

`build` compiles the library for the torch of this environment. `begin`, called before anything imports torch, loads
it and gives `torch.cuda` the calls that a build for CUDA has; torch's own Python does the rest. A process cannot go
back, so tests run theirs apart.

It shows what depends on the rules of a GPU: which stream runs what, and which work waits for which. It shows which
calls make the host wait, or open a context on another GPU. A GPU's random numbers have generators of their own, and
the bits of a reduction depend on where its input begins. Else its numbers are the CPU's. It cannot show what depends
on time (lag, queues), memory limits, or NCCL's and CUDA's own bits. Of hangs it shows those that a test makes: `hang`
and `lose_peers`.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

HERE = Path(__file__).parent
SOURCES = "clocks", "device", "nccl"
TORCH = "2.13.0"  # whose internals the library is written against
LIBRARY = "libsimgpu.so"
COMPILER = "g++"
GPUS = 8
CUDA = 1  # the number of this device type


def why_not() -> str | None:
    """Why the library cannot be built here; None if it can."""
    version = importlib.metadata.version("torch").partition("+")[0]
    if version != TORCH:
        return f"the simulated GPU is written for torch {TORCH}, this is {version}"
    return None if shutil.which(COMPILER) else f"the simulated GPU is built with {COMPILER}, which is not installed"


def build(folder: Path) -> Path:
    """Compile the library into a folder; its path."""
    torch = _torch_folder()
    flags = "-O1", "-fPIC", "-std=c++20", "-w", "-D_GLIBCXX_USE_CXX11_ABI=1"
    includes = f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"
    objects = [folder / f"{name}.o" for name in SOURCES]
    commands = [
        [COMPILER, *flags, *includes, "-c", str(HERE / f"{name}.cpp"), "-o", str(made)]
        for name, made in zip(SOURCES, objects, strict=True)
    ]
    for process in [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    library = folder / LIBRARY
    link = [COMPILER, "-shared", *map(str, objects), f"-L{torch}/lib", "-lc10", "-ltorch_cpu", "-o", str(library)]
    subprocess.run(link, check=True)
    return library


def begin(library: Path) -> None:
    """Simulate GPUs in this process, which has not imported torch yet."""
    for path in (_torch_folder() / "lib/libc10.so", _torch_folder() / "lib/libtorch_cpu.so", library):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch

    _give_calls(torch)
    _give_nccl(torch)


class Counts(NamedTuple):
    """What this process has done on its GPUs so far; views and allocations are no kernels."""

    kernels: int
    copies: int  # between a GPU and the host, or two GPUs
    host_waits: int


def counts() -> Counts:
    """What this process has done on its GPUs so far."""
    import torch

    return Counts(*torch.ops.simgpu.counts())


def watch(on: bool) -> None:
    """Begin, or end, to look for races."""
    import torch

    torch.ops.simgpu.watch(on)


def races() -> list[str]:
    """The races since `watch`, or since the last call."""
    import torch

    return list(torch.ops.simgpu.races())


def contexts() -> dict[int, str]:
    """The GPUs on which this process has a context, and what made it."""
    import torch

    pairs = (text.split(" by ", 1) for text in torch.ops.simgpu.contexts())
    return {int(device): by for device, by in pairs}


def forget_contexts() -> None:
    """Have `contexts` tell only of what is made from now on."""
    import torch

    torch.ops.simgpu.forget_contexts()


def hang(device: int) -> None:
    """Give the current stream of a GPU a kernel that never ends."""
    import torch

    torch.ops.simgpu.hang(device)


def lose_peers() -> None:
    """Have each collective of this process hang from now on, as if its peers did not come."""
    import torch

    torch.ops.simgpu.lose_peers()


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _give_calls(torch: Any) -> None:
    """Give torch what a build for CUDA has: functions of torch._C, classes of streams and events, generators."""
    sim, cuda = torch.ops.simgpu, torch.cuda
    for name, call in _calls(sim).items():
        setattr(torch._C, f"_cuda_{name}", call)
    cuda._exchange_device, cuda._maybe_exchange_device = (
        torch._C._cuda_exchangeDevice,
        torch._C._cuda_maybeExchangeDevice,
    )
    torch.Event, cuda.Stream, cuda.Event = _classes(torch)
    cuda._initialized = True
    cuda.default_generators = tuple(sim.generator(number) for number in range(GPUS))
    cuda.device_count = lambda: GPUS
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, _: int(sim.host_register(address, size)),
        cudaHostUnregister=lambda address: int(sim.host_unregister(address)),
    )
    cuda.cudart = lambda: cudart
    torch._C._show_config = lambda: "simulated"  # torch's own looks for the library of CUDA
    cuda.is_current_stream_capturing = cuda._is_in_bad_fork = lambda: False
    _give_memory(torch)


def _calls(sim: Any) -> dict[str, Callable[..., Any]]:
    """The functions of torch._C that torch.cuda calls, without the `_cuda_` that their names begin with."""

    def index(device: int | None) -> int:
        return int(sim.device()) if device is None or device < 0 else device

    def set_device(device: int) -> None:
        if device >= 0:
            sim.set_device(device, f"set_device in thread {threading.current_thread().name}")

    def exchange_device(device: int) -> int:
        before = int(sim.device())
        set_device(device)
        return before

    def maybe_exchange_device(device: int) -> int:
        before = int(sim.device())
        if device >= 0:
            sim.note_device(device)
        return before

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        if sim.device() != device_index:
            set_device(device_index)
        sim.set_stream(device_index, stream_id)

    return {
        "init": lambda: None,
        "getDeviceCount": lambda: GPUS,
        "isInBadFork": lambda: False,
        "getDevice": lambda: int(sim.device()),
        "setDevice": set_device,
        "exchangeDevice": exchange_device,
        "maybeExchangeDevice": maybe_exchange_device,
        "getCurrentStream": lambda device: (int(sim.stream(index(device))), index(device), CUDA),
        "getCurrentRawStream": lambda device: int(sim.stream(index(device))),
        "getDefaultStream": lambda device: (0, index(device), CUDA),
        "setStream": set_stream,
        "synchronize": lambda: sim.synchronize(sim.device()),
        "emptyCache": lambda: None,
        "set_sync_debug_mode": lambda mode: sim.raise_at_waits(mode == 2),
        "sleep": lambda cycles: None,
        "isCurrentStreamCapturing": lambda: False,
    }


def _classes(torch: Any) -> tuple[Any, Any, Any]:
    """torch.Event, of which a test can replace a method, and torch.cuda's Stream and Event."""
    index = torch.cuda._utils._get_device_index

    class Stream(torch.Stream):  # type: ignore[misc]  # Any
        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            if given:
                return super().__new__(cls, **given)
            return super().__new__(cls, torch.device("cuda", index(device, optional=True)), priority=priority)

    class AnyEvent(torch.Event):  # type: ignore[misc]  # Any
        def elapsed_time(self, end: Any) -> float:
            return 0.01  # milliseconds

    class Event(AnyEvent):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
            return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing)

    return AnyEvent, Stream, Event


def _give_memory(torch: Any) -> None:
    """Have torch.cuda tell of the GPUs' memory, and storages be resized, as FSDP does with what it gathers."""
    sim, cuda = torch.ops.simgpu, torch.cuda
    card = SimpleNamespace(name="simulated GPU", total_memory=sim.memory(), major=9, minor=0, multi_processor_count=1)

    def allocated(device: Any = None) -> int:
        return int(sim.allocated(cuda._utils._get_device_index(device, optional=True)))

    def free_and_total(device: Any = None) -> tuple[int, int]:
        sim.on_context(cuda._utils._get_device_index(device, optional=True), "mem_get_info")
        return card.total_memory - allocated(device), card.total_memory

    cuda.get_device_properties = lambda device=None: card
    cuda.get_device_name = lambda device=None: card.name
    cuda.mem_get_info = free_and_total
    cuda.memory_allocated = allocated
    cuda.memory_stats = lambda device: {"num_alloc_retries": int(sim.retried(device.index))}
    cuda.memory_reserved = lambda device=None: 0
    cuda.empty_cache = lambda: None
    torch.__config__.show = lambda: "simulated GPUs have no library that could be asked"
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        sim.resize_storage(storage, size)
        return storage

    torch.UntypedStorage.resize_ = resize_storage


def _give_nccl(torch: Any) -> None:
    """Let a process group of the backend nccl be gloo's under NCCL's rules."""
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

    class ProcessGroupNCCL(c10d.ProcessGroupGloo):  # type: ignore[misc]  # Any
        """What torch takes for NCCL."""

        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(store, rank, size, timeout=options._timeout)

    make_group = c10d._new_process_group_helper

    def made_group(*args: Any, **keys: Any) -> Any:
        group, *rest = make_group(*args, **keys)
        if isinstance(group, c10d.ProcessGroup) and torch.device("cuda") in group._device_types:
            torch.ops.simgpu.follow_nccl(group.boxed())
        return group, *rest

    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d.is_nccl_available = torch.distributed.is_nccl_available = lambda: True
    c10d._new_process_group_helper = made_group
    torch.cuda.nccl.version = lambda: (2, 0, 0)
