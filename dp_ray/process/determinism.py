"""The settings of a process for `bitwise`, in a job and in a parallel module.

torch's deterministic algorithms are switched without the import of torch's compiler, which takes 1.3 s of a core.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dp_ray.system.process import environment, patched

_COMPILER = "torch._inductor.config"
_SWITCH = "TORCHINDUCTOR_DETERMINISTIC"  # the environment variable that the compiler reads when it is imported
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS is deterministic only with this set


def of_cublas() -> dict[str, str]:
    """Return the environment that makes cuBLAS deterministic; the user's own value stays.

    It is set without `bitwise` too: torch reads it once, at a process's first matrix product, and a later job may be
    bitwise.
    """
    return {} if _WORKSPACE in os.environ else {_WORKSPACE: ":4096:8"}


@contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """Make torch deterministic while the block runs, with the same number of `threads` on every machine.

    Attention layers that evaluate take another path where modules have hooks, as sharded ones have: here none does.
    """
    before, algorithms = torch.get_num_threads(), deterministic_algorithms()
    torch.set_num_threads(threads)
    use_deterministic_algorithms(True)
    try:
        with (
            environment({_SWITCH: "1"}),
            # Filling memory only helps to find reads of memory that was never written; it costs a pass over each new
            # tensor.
            patched(torch.utils.deterministic, fill_uninitialized_memory=False),
            patched(torch.backends.cudnn, benchmark=False),
            patched(torch.backends.mha, _is_fastpath_enabled=False),
        ):
            yield
    finally:
        torch.set_num_threads(before)
        use_deterministic_algorithms(*algorithms)


def deterministic_algorithms() -> tuple[bool, bool]:
    """Return whether torch uses deterministic algorithms only, and whether it only warns if there is none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def use_deterministic_algorithms(only: bool, warns: bool = False) -> None:
    """Do what torch's function of this name does, before its compiler is imported too."""
    if _COMPILER in sys.modules:
        torch.use_deterministic_algorithms(only, warn_only=warns)
    else:
        torch.set_deterministic_debug_mode(("warn" if warns else "error") if only else "default")
