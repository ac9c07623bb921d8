"""Models that look at torch's settings while a bitwise job runs, and models that tell what their compiler does."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dp_ray.engine.sums import reduce
from dp_ray.engine.world import begin_sum, own_rank

COMPILER = "torch._inductor.config"
_files: list[Path] = []  # the file that tells of this process


class Deterministic(nn.Module):
    """Needs deterministic algorithms, and torch's compiler not imported; with `imports` it imports it and looks."""

    def __init__(self, imports: bool = False) -> None:
        super().__init__()
        self.imports = imports

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert torch.are_deterministic_algorithms_enabled()
        if self.imports:
            from torch._inductor import config

            assert config.deterministic
        else:
            assert COMPILER not in sys.modules
        return rows


def in_two_buckets(folder: str) -> nn.Module:
    """A model whose gradients fill two buckets of DDP, of which the first one is full at 1 MiB."""
    _tell_all(folder)
    layers = nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3)
    return nn.Sequential(*layers)


class Numbered(nn.Module):
    """A block that computes something else for each number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.name = str(number)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = rows + self.linear(rows) * (0.1 if self.name == "3" else 0.2)
        return outputs


def numbered_blocks(folder: str) -> nn.Module:
    """Ten blocks of one class and a last layer; torch compiles at most 8 graphs for the forward of a class."""
    _tell_all(folder)
    return nn.Sequential(nn.Sequential(*map(Numbered, range(10))), nn.Linear(6, 3))


def tell_step(_: object) -> None:
    """A hook: tells that a step has ended, and how many DDPs there are."""
    tell(f"step, {sum(type(one) is DistributedDataParallel for one in gc.get_objects())} DDP")


def tell(line: str) -> None:
    """Write a line about this process."""
    with _files[-1].open("a") as file:
        file.write(line + "\n")


def told(folder: Path, rank: int = 0) -> list[str]:
    """What a rank told."""
    return (folder / f"rank-{rank}.txt").read_text().splitlines()


def _tell_all(folder: str) -> None:
    """Tell from now on of each graph that is compiled, each that runs, and each bucket that begins to be summed."""
    from torch._dynamo.backends.common import aot_autograd  # it imports torch's compiler

    gc.disable()  # what a test finds freed is not freed by chance
    torch._dynamo.config.run_gc_after_compile = False
    _files.append(Path(folder) / f"rank-{own_rank()}.txt")
    vars(reduce)["begin_sum"] = _told_sum
    torch.compiler.set_default_backend(
        aot_autograd(fw_compiler=_Compiler("forward"), bw_compiler=_Compiler("backward"))
    )


def _told_sum(bucket: torch.Tensor) -> dist.Work:
    tell("sum")
    return begin_sum(bucket)


class _Compiler:
    """Compiles graphs that compute in float64 and round what they give, so that other cuts give other bits."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, graph: Callable[..., Any], inputs: object) -> Callable[[list[Any]], list[Any]]:
        tell(f"{self._kind} graph")

        def run(given: list[Any]) -> list[Any]:
            tell(self._kind)
            wide = [one.double() if _is_float(one) else one for one in given]
            return [one.float() if _is_float(one) else one for one in graph(*wide)]

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd calls it with a list
        return run


def _is_float(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.is_floating_point()
