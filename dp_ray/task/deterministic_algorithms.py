"""torch's deterministic algorithms, switched without importing torch's compiler: it takes 1.3 s of a core."""

import sys

import torch

COMPILER = "torch._inductor.config"
SWITCH = "TORCHINDUCTOR_DETERMINISTIC"  # the environment variable that the compiler reads when it is imported


def deterministic_algorithms() -> tuple[bool, bool]:
    """Whether torch uses deterministic algorithms only, and whether it but warns where there is none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def use_deterministic_algorithms(only: bool, warns: bool = False) -> None:
    """Do what torch's function of this name does. If the compiler is not there yet, SWITCH has to say it."""
    if COMPILER in sys.modules:
        torch.use_deterministic_algorithms(only, warn_only=warns)
    else:
        torch.set_deterministic_debug_mode(("warn" if warns else "error") if only else "default")
