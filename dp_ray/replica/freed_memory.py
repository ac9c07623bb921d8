"""Frees a worker's memory of what is not used any more: a model, its gradients, its process group."""

import gc
from collections.abc import Iterable

import torch
from torch import nn

MOST = 5  # collections


def free_memory() -> None:
    """Free what only reference cycles hold, then the GPU memory that torch keeps for itself.

    It takes more than one collection: a cycle may hold objects of C++, and those the next cycle. The second one finds
    the model of a training with FSDP.
    """
    for _ in range(MOST):
        if not gc.collect():
            break
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def remove_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Take hooks off gradients: if one holds the model, as a method of it does, the model would never be freed.

    torch keeps these hooks where the garbage collector does not look.
    """
    for parameter in parameters:
        (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).clear()
