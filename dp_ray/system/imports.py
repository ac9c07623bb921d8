"""How modules are imported: without the garbage collector, which finds nothing there, and from the current folder."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dp_ray.system.environment import set_environment


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within the block, nothing is collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def prepare_imports(variables: dict[str, str]) -> None:
    """Set environment variables in a process that is about to import torch, and collect nothing meanwhile."""
    set_environment(variables)
    gc.disable()


def end_imports() -> None:
    """Collect again; what was imported is not looked through any more."""
    gc.freeze()
    gc.enable()


@contextmanager
def importing_from_here() -> Iterator[None]:
    """Within the block, modules are found in the current folder too, also in an installed script or a worker."""
    here = os.getcwd()
    known = here in sys.path or "" in sys.path
    if not known:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if not known:
            sys.path.remove(here)
