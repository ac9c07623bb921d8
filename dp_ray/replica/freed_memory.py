"""Frees a worker's memory of what is not used any more: a model, its gradients, its process group."""

import gc

import torch

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
