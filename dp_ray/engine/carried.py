"""Which attributes of a model carry a state from one forward to the next, so that results depend on it.

Each shard starts from the same buffers. A plain attribute, as the hidden state of an LSTM or a counter, is each
worker's own: it depends on the shards that this worker has run before. But most attributes that forwards write matter
to nobody, as the last attention, or a mask that is made once. So `Carried` notes what the first forward writes. Only
if that is something, the next shard runs beside, with the values of now and with those of before: begin at `carried`.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dp_ray.engine.buffers import Roots, joined, modules_of, shown
from dp_ray.engine.rows import RowTrial, is_same_constant, is_same_leaf
from dp_ray.engine.world import passes
from dp_ray.system.process import patched
from dp_ray.tensors.tree import flatten, why_no_rows
from dp_ray.text import listed

BYTES = 1 << 26  # of tensors in attributes that are copied; of others a write in place is not seen
ITEMS, DEPTH = 1_000, 8  # of containers that are looked into
MISSING = object()  # the value of an attribute that is not there
FAILED = object()  # the outputs of a run that raises
OF_MODULES = frozenset(vars(nn.Module()))
MAPPINGS, SEQUENCES = (dict, OrderedDict), (list, tuple, deque)


class Attribute(NamedTuple):
    """An attribute of a module before a forward: a copy of its value, by the path to tell."""

    path: str
    module: nn.Module
    key: str
    before: Any = MISSING

    @property
    def now(self) -> Any:
        """The value of now."""
        return vars(self.module).get(self.key, MISSING)

    def put(self, value: Any) -> None:
        """Set the attribute, past what the module's class may do when one is set."""
        if value is MISSING:
            vars(self.module).pop(self.key, None)
        else:
            vars(self.module)[self.key] = value


class Carried:
    """Asks once, before the second step or call, what the first forward has left for it; `say` gets a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._begun: dict[tuple[int, str], Attribute] | None = None
        self._changed: Sequence[Attribute] | None = None  # by the first forward
        self.is_open = True

    def before(self, roots: Roots, run: Callable[[], Any]) -> None:
        """Begin a step's first forward; `run` runs it beside, from the same state, with the same random numbers."""
        if self._changed is None:
            self._begun = attributes_of(roots)
            return
        changed, self._changed, self.is_open = self._changed, None, False
        if found := carried(changed, run):
            self._say(
                f"model: a forward reads what an earlier one has left in {listed(found)}. That is each worker's own "
                "and in no checkpoint, so results depend on shards and workers: set it anew in each forward, give it "
                "with the batch, or register it as a buffer: all shards of a step then begin with the same value, "
                "and the next step with what shard 0 has written"
            )

    def after(self, roots: Roots) -> None:
        """End a forward. What changes between two of them, as by a loop, is not the forward's."""
        if self._begun is not None:
            self._changed, self._begun = changed_since(self._begun, roots), None
            self.is_open = bool(self._changed)


def carried(changed: Sequence[Attribute], run: Callable[[], Any]) -> list[str]:
    """Return which of the attributes count: with their values of now, the outputs of `run` are others than before.

    `run` leaves no other change. Attributes of one name, in modules of one class, are told as one.
    """
    now = [attribute.now for attribute in changed]

    def outputs(earlier: Collection[int]) -> Any:
        """Run with the `earlier` attributes as before, the others as now: in copies, which the forward may write."""
        copied = Copier(())
        try:
            for number, (attribute, value) in enumerate(zip(changed, now, strict=True)):
                attribute.put(copied(attribute.before if number in earlier else value))
            with patched(RowTrial, running=True):
                leaves = flatten(run())[0]
            return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf.copy() for leaf in leaves]
        except (Exception, SystemExit) as error:
            if passes(error):
                raise
            return FAILED
        finally:
            for attribute, value in zip(changed, now, strict=True):
                attribute.put(value)

    everything = range(len(changed))
    before, after = outputs(everything), outputs(())
    # Outputs that differ by themselves, as by a GPU's atomic additions or a state elsewhere, show nothing.
    if before is FAILED or is_same(before, after) or not is_same(before, outputs(everything)):
        return []
    kinds: dict[tuple[type, str], list[int]] = {}
    for number, attribute in enumerate(changed):
        kinds.setdefault((type(attribute.module), attribute.key), []).append(number)
    found = [numbers for numbers in kinds.values() if not is_same(after, outputs(numbers))]
    return [
        changed[first].path + (f" (and {len(others)} more)" if others else "")
        for first, *others in found or kinds.values()
    ]


def attributes_of(roots: Roots) -> dict[tuple[int, str], Attribute]:
    """Return the plain attributes of all modules, by module and key."""
    modules = [module for _, module in modules_of(roots)]
    copied = Copier(tensor for module in modules for tensor in module.buffers(recurse=False))
    return {
        (id(module), key): Attribute(path, module, key, copied(value))
        for path, module, key, value in _attributes(roots)
    }


def changed_since(begun: dict[tuple[int, str], Attribute], roots: Roots) -> list[Attribute]:
    """Return, as they were before, the attributes that have another value now, are new or are gone."""
    now = {(id(module), key): Attribute(path, module, key) for path, module, key, _ in _attributes(roots)}
    return [attribute for attribute in {**now, **begun}.values() if not is_same(attribute.before, attribute.now)]


def _attributes(roots: Roots) -> Iterator[tuple[str, nn.Module, str, Any]]:
    for name, module in modules_of(roots):
        for key, value in list(vars(module).items()):
            if key not in OF_MODULES:
                yield shown(joined(name, key)), module, key, value


class Copier:
    """Copies what attributes hold: tensors, arrays and containers of these. An object, and a parameter, stays itself.

    So do the tensors `kept`. What stands twice is copied once.
    """

    def __init__(self, kept: Iterable[torch.Tensor]) -> None:
        self._made: dict[int, Any] = {id(tensor): tensor for tensor in kept}
        self._room = BYTES

    def __call__(self, value: Any, depth: int = DEPTH) -> Any:
        """Return a copy of a value."""
        if id(value) not in self._made:
            made = self._copy(value, depth)
            if made is value:
                return value
            self._made[id(value)] = made
        return self._made[id(value)]

    def _copy(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor | np.ndarray) and not isinstance(value, nn.Parameter):
            if why_no_rows(value) is not None or value.dtype == object:  # no plain numbers
                return value
            self._room -= value.nbytes
            if self._room < 0:
                return value
            return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()
        is_named = issubclass(kind, tuple) and hasattr(kind, "_make")
        if not (kind in SEQUENCES or kind in MAPPINGS or is_named) or len(value) > ITEMS or not depth:
            return value
        if kind in MAPPINGS:
            return kind((key, self(item, depth - 1)) for key, item in value.items())
        items = [self(item, depth - 1) for item in value]
        if kind is deque:
            return deque(items, value.maxlen)
        return kind._make(items) if is_named else kind(items)


def is_same(here: Any, there: Any) -> bool:
    """Return whether two values are the same to the bit; objects, if they are equal."""
    if here is there:
        return True
    if type(here) is not type(there):
        return False
    if isinstance(here, torch.Tensor | np.ndarray):
        return here.device == there.device and is_same_leaf(here, there)
    if isinstance(here, dict):
        return here.keys() == there.keys() and all(is_same(here[key], there[key]) for key in here)
    if isinstance(here, list | tuple | deque):
        return len(here) == len(there) and all(map(is_same, here, there))
    return is_same_constant(here, there)
