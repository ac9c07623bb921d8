"""The memory that a run will take on each device of a worker, for each number of workers."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dp_ray.plan.split import num_filled
from dp_ray.text import counted

GIB = 2**30
UNITS = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
USABLE = 0.9  # of a GPU: the rest is for CUDA's context, its libraries' workspaces, and gaps between tensors


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes on one device of a worker: each kind at its own most, and `total` at the peak of a step.

    `activations` holds all that comes and goes in a step, also the blocks that FSDP gathers.
    """

    device: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    total: int


@dataclass(frozen=True)
class WorkerMemory:
    """The memory of the worker that takes most, if a job runs by this strategy on this number of workers."""

    strategy: str
    workers: int
    shards: int  # of a batch, one after another
    devices: tuple[DeviceMemory, ...]

    @property
    def total(self) -> int:
        """The bytes of the fullest device."""
        return max(one.total for one in self.devices)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a job's workers; `rows` are those of its largest shard, `gpu_bytes` what a GPU has, if known."""

    rows: int
    workers: tuple[WorkerMemory, ...]
    gpu_bytes: int | None = None
    remarks: tuple[str, ...] = ()

    def fits(self, one: WorkerMemory) -> bool | None:
        """Whether a worker's devices hold it; None if their size is not known."""
        return None if self.gpu_bytes is None else one.total <= USABLE * self.gpu_bytes

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values, in bytes."""
        found: dict[str, Any] = {"rows": self.rows}
        if self.gpu_bytes is not None:
            found["gpu_bytes"] = self.gpu_bytes
        found["workers"] = [self._worker(one) for one in self.workers]
        return {**found, **({"remarks": list(self.remarks)} if self.remarks else {})}

    def _worker(self, one: WorkerMemory) -> dict[str, Any]:
        fits = self.fits(one)
        return {**asdict(one), "devices": [asdict(device) for device in one.devices], **_given("fits", fits)}

    def lines(self) -> Iterator[str]:
        """The plan as text: a line for each device of a worker, in a unit that shows the largest."""
        most = max((one.total for one in self.workers), default=0)
        unit = next((unit for unit, size in UNITS.items() if most >= size / 10), "KiB")
        yield f"memory of a worker in {unit}, with shards of {counted(self.rows, 'row')}:"
        names = ("parameters", "gradients", "optimizer", "buffers", "activations", "total")
        yield f"  {'':<30}{''.join(f'{name:>12}' for name in names)}"
        for one in self.workers:
            for device in one.devices:
                where = f", {device.device}" if len(one.devices) > 1 else ""
                who = f"{one.strategy} on {counted(one.workers, 'worker')}{where}"
                numbers = "".join(f"{getattr(device, name) / UNITS[unit]:>12.3f}" for name in names)
                yield f"  {who:<30}{numbers}{self._verdict(one)}"
        yield from self.remarks

    def _verdict(self, one: WorkerMemory) -> str:
        if self.gpu_bytes is None:
            return ""
        return f"  {'fits' if self.fits(one) else 'does not fit'} {self.gpu_bytes / GIB:g} GiB"


def _given(key: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {key: value}


def worker_counts(most: int) -> list[int]:
    """The numbers of workers to plan for: all up to 8, then the powers of two, and the most."""
    most = max(1, most)
    return sorted({*range(1, min(most, 8) + 1), *(2**power for power in range(3, most.bit_length())), most})


def shards_of_worker(rows: int, shards: int, workers: int) -> int:
    """How many shards with rows the worker that has most of them runs."""
    return max(1, min(num_filled(rows, shards), -(-shards // workers)))
