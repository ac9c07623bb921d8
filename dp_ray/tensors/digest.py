"""A hash of a model's outputs, as a metric: it shows whether two runs gave the same outputs."""

import hashlib
from typing import Any

import torch

from dp_ray.tensors.nested import flatten
from dp_ray.tensors.raw import as_bytes


def outputs_digest(outputs: Any, target: Any) -> tuple[torch.Tensor, int]:
    """40 bits of a hash of the outputs' bytes, as (sum, weight): the sum over thousands of shards is exact."""
    digest = hashlib.blake2b(digest_size=5)
    for leaf in flatten(outputs)[0]:
        raw = as_bytes(torch.as_tensor(leaf).cpu())
        digest.update(raw.numpy().data)
    return torch.tensor(int.from_bytes(digest.digest())), 1
