"""Random numbers keyed by what they are drawn for: a sample's augmentations, a shard's dropout.

All three global generators count: Python's, numpy's and torch's. A generator that a user makes and never seeds
cannot be known here.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

Draws = tuple[float, float, float]


def seed_all(number: int, device: torch.device | None = None) -> None:
    """Seed the global generators; with a `device` to compute on also those of this process's GPUs."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    if device is not None and (device.type == "cuda" or torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(number)


class Quiet:
    """Tells whether anything was drawn since the generators were seeded, for less than it costs to seed them."""

    def __init__(self) -> None:
        self._undrawn: Draws | None = None

    def begin(self) -> None:
        if self._undrawn is None:  # not sooner: the default dtype may change
            seed_all(0)
            self._undrawn = _draw()
        seed_all(0)

    def is_broken(self) -> bool:
        """Whether a generator is further than `begin` left it: then its next number is another one."""
        return _draw() != self._undrawn


def _draw() -> Draws:
    return random.random(), float(np.random.random_sample()), float(torch.rand(()))


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Give the process its generators back as they were: it may be a user's own."""
    before = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
