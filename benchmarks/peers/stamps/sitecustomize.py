"""What Python imports at its start, of a folder in PYTHONPATH: keeps the time of each step of an optimizer.

Each process that makes a step of `torch.optim` adds its time, and a checksum of the weights after each BITS steps, to
the file of its pid in the folder STAMPS: at once, so that what a killed process did is there. A batch of 16 images or
more that a torchvision ResNet has seen counts as a step too. (Of fewer dp_ray asks at first which outputs have rows.)
"""

import os
import struct
import sys
import time
from importlib import util
from typing import Any

FORMAT, SIZE = "dI", 12
FILES: dict[int, int] = {}
OPERATORS: list[Any] = []  # they are gone with their library


def bits(optimizer: Any) -> int:
    """A checksum of the parameters."""
    from zlib import crc32

    found = 0
    for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
        found = crc32(parameter.detach().contiguous().reshape(-1).numpy(), found)
    return found


def keep(optimizer: Any = None, *_: object) -> None:
    """Add the time of a step; called after each."""
    now, pid, every = time.time(), os.getpid(), int(os.environ.get("BITS", 0))
    if pid not in FILES:
        FILES[pid] = os.open(os.path.join(os.environ["STAMPS"], str(pid)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = os.fstat(FILES[pid]).st_size // SIZE + 1
    os.write(FILES[pid], struct.pack(FORMAT, now, bits(optimizer) if every and number % every == 0 else 0))


def watch(optimizer: Any) -> None:
    """Keep the time of all steps from now on."""
    optimizer.register_optimizer_step_post_hook(keep)


def watch_resnet(models: Any) -> None:
    """Keep the time of each batch that a ResNet has seen."""
    forward = models.ResNet.forward

    def kept(self: Any, images: Any) -> Any:
        outputs = forward(self, images)
        if len(images) >= 16:
            keep()
        return outputs

    models.ResNet.forward = kept


def name_operators() -> None:
    """Let a torchvision that was built for CUDA be imported beside a torch without it: its images need no kernel."""
    import torch

    if torch.version.cuda is None:
        library: Any = torch.library
        OPERATORS.append(library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            OPERATORS[0].define(f"{name}(Tensor boxes) -> Tensor")


WATCHED: dict[str, Any] = {"torch.optim.optimizer": watch, "torchvision.models.resnet": watch_resnet}


class AtImport:
    """Acts when a process imports one of a few modules; most never do."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "torchvision" and not OPERATORS:  # some ask again and again if it is there
            name_operators()
        if name not in WATCHED:
            return None
        sys.meta_path.remove(self)
        spec: Any = util.find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            WATCHED[name](module)

        spec.loader.exec_module = executed
        return spec


if "STAMPS" in os.environ:
    sys.meta_path.insert(0, AtImport())
