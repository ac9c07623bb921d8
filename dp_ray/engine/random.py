"""Seed random numbers by their use: a sample's augmentations, a shard's dropout.

This covers the global generators of Python, numpy and torch, and generators that are attributes of the dataset or
of a module of the model. A generator kept anywhere else is not found and not seeded.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from dp_ray.engine.world import is_gpu
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard

Draws = tuple[float, float, float]
Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def seed_all(number: int, device: torch.device | None = None) -> None:
    """Seed the global generators; given a `device` to compute on, also those of this process's GPUs."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    if device is None or not (is_gpu(device) or torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return
    if not torch.cuda.default_generators:
        torch.cuda.init()  # before it, torch lists no generator of a GPU
    for generator in torch.cuda.default_generators:
        generator.manual_seed(number)


def has_drawn(number: int) -> bool:
    """Return whether torch's generator has been drawn from since `seed_all(number)`."""
    return not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(number).get_state())


def own_generators(owner: Any) -> list[Generator]:
    """Return the generators that are attributes of a dataset, of datasets that it wraps, or of a model's modules."""
    owners: list[Any] = list(owner.modules()) if isinstance(owner, nn.Module) else []
    datasets = [] if owners else [owner]
    while datasets:  # datasets may wrap one another, and a Mix several
        dataset = datasets.pop()
        if dataset is not None and all(dataset is not owner for owner in owners):
            owners.append(dataset)
            held = getattr(dataset, "__dict__", {})
            sources = held["sources"] if "mixture" in held and isinstance(held.get("sources"), dict) else {}
            datasets += [*reversed(sources.values()), held.get("dataset")]
    values = (value for owner in owners for value in getattr(owner, "__dict__", {}).values())
    return list({id(value): value for value in values if isinstance(value, Generator)}.values())


def seed_own(generators: list[Generator], number: int) -> None:
    """Seed each generator with a number of its own, derived from `number`, so that no two draw the same numbers."""
    for position, rng in enumerate(generators):
        seed = derive_seed(number, "generator", position)
        if isinstance(rng, torch.Generator):
            rng.manual_seed(seed)
        elif isinstance(rng, np.random.Generator):
            kind: Any = type(rng.bit_generator)  # it has no seed(): a new one has the state that it would set
            rng.bit_generator.state = kind(seed).state
        else:
            rng.seed(seed % 2**32)


class ForwardSeeds:
    """Seeds all generators that a shard's forward, and `after` it, may use, from (seed, epoch, step, shard)."""

    def __init__(self, seed: int, model: nn.Module, device: torch.device, after: Any = None) -> None:
        self._seed = seed
        self._device = device
        self._own = own_generators(model) + own_generators(after)

    def begin(self, shard: Shard, of_pass: int = 0, seed: int | None = None) -> None:
        """Seed the generators for the forward of `shard`, in the step's first pass or another one; or from `seed`."""
        more = (of_pass,) if of_pass else ()
        number = (
            derive_seed(self._seed, "forward", shard.epoch, shard.step, shard.shard, *more) if seed is None else seed
        )
        seed_all(number, self._device)
        if self._own:
            seed_own(self._own, number)


with torch.inference_mode(False):
    _cell = torch.empty((), dtype=torch.float32, device="cpu")  # made once: a new tensor takes longer than the draw


class RngProbe:
    """Detects whether a random number was drawn from the global generators, at less cost than seeding them."""

    _undrawn: Draws | None = None

    def begin(self) -> None:
        """Seed the global generators and start to watch them."""
        if self._undrawn is None:
            seed_all(0)
            self._undrawn = (random.random(), np.random.random_sample(), _cell.uniform_().item())
        seed_all(0)

    def is_broken(self) -> bool:
        """Return whether a number was drawn since `begin`: then a generator's next number differs."""
        return (random.random(), np.random.random_sample(), _cell.uniform_().item()) != self._undrawn


@contextmanager
def preserved(*devices: torch.device) -> Iterator[None]:
    """Restore the global generators and those of the devices after the block: the process may be the user's own."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=list(dict.fromkeys(device for device in devices if device.type == "cuda"))):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def random_state(devices: Sequence[torch.device], own: Sequence[Generator]) -> Callable[[], None]:
    """Return a function that restores the present state of the global generators, the devices' and `own`."""
    gpus = [torch.cuda.default_generators[gpu.index or 0] for gpu in dict.fromkeys(devices) if gpu.type == "cuda"]
    setters: list[Callable[[], object]] = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),
    ]
    for rng in [torch.default_generator, *gpus, *own]:
        if isinstance(rng, torch.Generator):
            setters.append(functools.partial(rng.set_state, rng.get_state()))
        elif isinstance(rng, np.random.Generator):
            setters.append(functools.partial(setattr, rng.bit_generator, "state", rng.bit_generator.state))
        elif isinstance(rng, np.random.RandomState):
            setters.append(functools.partial(rng.set_state, rng.get_state()))
        else:
            setters.append(functools.partial(rng.setstate, rng.getstate()))

    def restore() -> None:
        for setter in setters:
            setter()

    return restore
