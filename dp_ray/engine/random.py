"""Seed random numbers by their use: a sample's augmentations, a shard's dropout.

This covers the global generators of Python, numpy and torch, and those that a dataset or a model holds, however deep:
in its transforms, in what it wraps, in lists, functions and classes. A generator kept anywhere else is not found and
not seeded. `own_generators` finds them by `inside`, which walks what an object holds and calls no code of the user's.
`SampleSeeds` seeds those alone that samples draw from.
"""

import enum
import functools
import itertools
import logging
import pickle
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from dp_ray.engine.world import is_gpu
from dp_ray.errors import is_users
from dp_ray.job.keys import WorkerKeys
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard

Seed: TypeAlias = Callable[[int], object]
Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

NUMPY = 1  # its place in GLOBAL
LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, np.ndarray))
CONTAINERS = (dict, list, tuple, set, frozenset, deque, OrderedDict)
NOT_ENTERED = (types.ModuleType, logging.Logger, enum.Enum, torch.Tensor, np.ndarray, np.generic, WorkerKeys)
SHORT, LONG, MOST_VALUES = 100, 1_000, 100_000  # numbers of values that are looked at

Part: TypeAlias = tuple[str, Any, Any]  # the form of how to come to a value, its key for that, and the value

MOST = 64  # generators that a dataset or model may hold: each takes microseconds of every sample that draws from it
with torch.inference_mode(False):
    _cell = torch.empty((), dtype=torch.float32, device="cpu")  # made once: a new tensor takes longer than the draw
# Of each global generator on the CPU: how to seed it, numpy's with 32 bits, and how to draw a number from it.
GLOBAL: tuple[tuple[Seed, Callable[[], Any]], ...] = (
    (random.seed, random.random),
    (np.random.seed, np.random.random_sample),
    (torch.default_generator.manual_seed, _cell.uniform_),
)


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


class OwnGenerator(NamedTuple):
    """A generator that a dataset or a model holds.

    `place` is its number among those in attributes of the dataset itself, of datasets that it wraps, or of a model's
    modules: runs go on with what they draw. All others have a `key` of their path; to seed one takes less time.
    """

    rng: Generator
    place: int | None
    key: int

    def seed(self, number: int) -> None:
        """Seed it with a number of its own, derived from `number`, so that no two draw the same numbers."""
        rng, place = self.rng, self.place
        seed = number ^ self.key if place is None else derive_seed(number, "generator", place)
        if isinstance(rng, torch.Generator):
            rng.manual_seed(seed)
        elif not isinstance(rng, np.random.Generator):
            rng.seed(seed % 2**32)
        elif place is None and type(rng.bit_generator) is np.random.PCG64:
            state: Any = {"state": seed << 64 | self.key, "inc": number << 1 | 1}
            rng.bit_generator.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
        else:
            kind: Any = type(rng.bit_generator)  # it has no seed(): a new one has the state that it would set
            rng.bit_generator.state = kind(seed).state


def own_generators(*owners: Any, with_globals: bool = False) -> tuple[list[OwnGenerator], list[str]]:
    """Return the generators that datasets and models hold, and the paths of those that cannot be seeded.

    These are the system's generators, and all but the first MOST. `with_globals` also returns those of classes and
    modules of the user's.
    """
    own: list[OwnGenerator] = []
    not_seeded, num_attributes = [], 0
    for number, owner in enumerate(owners):
        roots = _roots(owner)
        attributes = {id(value) for root in roots.values() for value in getattr(root, "__dict__", {}).values()}
        for path, rng in inside(roots, with_globals):
            if not issubclass(type(rng), Generator) or any(rng is known.rng for known in own):
                continue
            if issubclass(type(rng), random.SystemRandom) or len(own) == MOST:
                not_seeded.append(path)
                continue
            key = int.from_bytes(blake2b(f"{number} {path}".encode(), digest_size=8).digest()) >> 1
            own.append(OwnGenerator(rng, num_attributes if id(rng) in attributes else None, key))
            num_attributes += id(rng) in attributes
    return own, not_seeded


def _roots(owner: Any) -> dict[str, Any]:
    """Return an object, the datasets that it wraps, one another, and a Mix several; and a model's modules."""
    if isinstance(owner, nn.Module):
        return dict(owner.named_modules())
    roots, datasets = dict[str, Any](), [("", owner)]
    while datasets:
        path, dataset = datasets.pop()
        if dataset is not None and all(dataset is not root for root in roots.values()):
            roots[path] = dataset
            held = getattr(dataset, "__dict__", {})
            sources = held["sources"] if "mixture" in held and isinstance(held.get("sources"), dict) else {}
            path += "." if path else ""
            datasets += [(f"{path}sources[{name!r}]", sources[name]) for name in reversed(sources)]
            datasets.append((f"{path}dataset", held.get("dataset")))
    return roots


def seed_own(generators: Sequence[OwnGenerator], number: int) -> None:
    """Seed each generator with a number of its own, derived from `number`."""
    for own in generators:
        own.seed(number)


class ForwardSeeds:
    """Seeds all generators that a shard's forward, and `after` it, may use, from (seed, epoch, step, shard)."""

    def __init__(self, seed: int, model: nn.Module, device: torch.device, after: Any = None) -> None:
        self._seed = seed
        self._device = device
        self._own, _ = own_generators(model, after)

    def begin(self, shard: Shard, of_pass: int = 0, seed: int | None = None) -> None:
        """Seed the generators for the forward of `shard`, in the step's first pass or another one; or from `seed`."""
        more = (of_pass,) if of_pass else ()
        number = (
            derive_seed(self._seed, "forward", shard.epoch, shard.step, shard.shard, *more) if seed is None else seed
        )
        seed_all(number, self._device)
        if self._own:
            seed_own(self._own, number)


class SampleSeeds:
    """Seeds the generators that samples draw from: the global ones, and the dataset's `own`.

    At first none is known to be drawn from. `begin` and `learn` stand around the reading of some samples: they find
    out which are, at less cost than seeding all for each sample. An own one that no sample draws from stays as it is.
    """

    _undrawn: tuple[float, ...] = ()  # the first numbers of the global ones after seed 0

    def __init__(self, own: Sequence[OwnGenerator]) -> None:
        self.own = own
        self._quiet = list(range(len(GLOBAL) + len(own)))  # not known to be drawn from
        self.drawn: list[int] = []  # if there are some, each sample is to be read by itself, after `seed`
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """Watch the generators that are not known to be drawn from."""
        if not self._undrawn:
            seed_all(0)
            self._undrawn = tuple(float(draw()) for _, draw in GLOBAL)
        for at in self._quiet:
            if at < len(GLOBAL):
                GLOBAL[at][0](0)
            else:
                self._before[at] = state_of(self.own[at - len(GLOBAL)].rng)

    def learn(self) -> bool:
        """Return whether one of these was drawn from since `begin`."""
        drawn = []
        for at in self._quiet:
            if at < len(GLOBAL):
                is_changed = float(GLOBAL[at][1]()) != self._undrawn[at]
            else:
                is_changed = self._before[at] != state_of(self.own[at - len(GLOBAL)].rng)
            if is_changed:
                drawn.append(at)
        if drawn:
            self._quiet = [at for at in self._quiet if at not in drawn]
            self.drawn += drawn
        return bool(drawn)

    def seed(self, number: int) -> None:
        """Seed those that samples draw from."""
        for at in self.drawn:
            if at < len(GLOBAL):
                GLOBAL[at][0](number if at != NUMPY else number % 2**32)
            else:
                self.own[at - len(GLOBAL)].seed(number)


def state_of(rng: Generator) -> Any:
    """Return the state of a generator, to be compared with that of another time."""
    if isinstance(rng, torch.Generator):
        return rng.get_state().numpy().tobytes()
    if isinstance(rng, random.Random):
        return rng.getstate()
    state = rng.bit_generator.state if isinstance(rng, np.random.Generator) else rng.get_state(legacy=False)
    return pickle.dumps(state, 5)  # it may hold arrays


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


def inside(roots: Mapping[str, Any], with_globals: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what the objects `roots` hold, by their paths: each value once, the nearest first.

    It looks into containers and attributes, and at the variables around functions; `with_globals` also at what the
    user's classes have, and at the globals that the user's functions name. Of a value, it looks at LONG parts at
    most, and at MOST_VALUES in all; what has more than SHORT comes last.
    """
    near, far, seen, looked = deque(roots.items()), deque[tuple[str, Any]](), set(map(id, roots.values())), 0
    while (near or far) and looked < MOST_VALUES:
        path, value = (near or far).popleft()
        for form, key, part in itertools.islice(_parts(value, with_globals), LONG):
            looked += 1
            kind = type(part)
            if kind in LEAVES or id(part) in seen:
                continue
            size = len(part) if kind in CONTAINERS else 1
            if size:
                seen.add(id(part))
                at = path + form.format(key)
                yield at.removeprefix("."), part
                (far if size > SHORT else near).append((at, part))


def _parts(value: Any, with_globals: bool) -> Iterator[Part]:
    """Yield the parts of a value."""
    kind = type(value)
    if issubclass(kind, NOT_ENTERED):
        return
    if issubclass(kind, CONTAINERS):
        yield from _items(value)
    elif issubclass(kind, types.FunctionType):
        yield from _referred(value, with_globals)
    elif issubclass(kind, types.MethodType | functools.partial | staticmethod | classmethod | property):
        names = ("__self__", "__func__", "func", "args", "keywords", "fget")
        yield from ((".{}", name, getattr(value, name, None)) for name in names)
    elif issubclass(kind, type) and not with_globals:
        return
    elif issubclass(kind, type):
        bases = (base for base in value.__mro__ if _is_users_class(base.__module__))
        yield from ((".{}", name, part) for base in bases for name, part in list(vars(base).items()))
        return
    with suppress(AttributeError):
        yield from ((".{}", name, part) for name, part in list(object.__getattribute__(value, "__dict__").items()))
    for base in kind.__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if type(member) is types.MemberDescriptorType:
                with suppress(AttributeError):  # it is not set
                    yield ".{}", name, member.__get__(value)
    if with_globals and _is_users_class(kind.__module__):
        yield "", "", kind


def _items(value: Any) -> Iterator[Part]:
    """Yield the items of a container, whatever iteration its class may have; keys of a dict are told if plain."""
    base = next(base for base in CONTAINERS if isinstance(value, base))
    with suppress(RuntimeError):  # it changes meanwhile
        items = dict.items(value) if base is dict else enumerate(base.__iter__(value))
        for number, (key, part) in enumerate(list(itertools.islice(items, LONG))):
            yield "[{!r}]", key if type(key) in LEAVES else number, part


def _referred(function: types.FunctionType, with_globals: bool) -> Iterator[Part]:
    """Yield the variables around a function; if it is the user's, maybe also the globals that it names."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            yield ", {}", name, cell.cell_contents
    if with_globals and is_users_file(code.co_filename):
        known = function.__globals__
        yield from ((", {}", name, known[name]) for name in sorted(_names(code)) if name in known)
    yield from ((".{}", name, getattr(function, name)) for name in ("__defaults__", "__kwdefaults__"))


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a code uses, with those of functions and comprehensions within it."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return {*code.co_names, *(name for part in inner for name in _names(part))}


is_users_file = functools.cache(is_users)


@functools.cache
def _is_users_class(module: str) -> bool:
    """Return whether a class of this module is the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and is_users_file(file))
