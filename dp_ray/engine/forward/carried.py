"""Find the attributes in which a model's forwards leave something for the next one: `Carried`.

Each shard starts from the same buffers. A plain attribute, as the hidden state of an LSTM or a counter, is each
worker's own: it depends on the shards that this worker has run before. Most attributes that a forward sets are read
by no later one (the last attention), or are set once (a mask). So a line names those alone that two forwards in
succession change, of which the second one reads the value that the first one has left. Nothing runs again for it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from dp_ray.engine.forward.buffers import Roots, joined, modules_of, shown
from dp_ray.text import listed

ITEMS, DEPTH = 100, 4  # of containers that are looked into
OF_MODULES = frozenset(vars(nn.Module()))

Place = tuple[nn.Module, str]  # a module, and the name of an attribute


class Carried:
    """Looks at two forwards, each in `looking`; `say` gets a line if the second goes on from what the first left."""

    def __init__(self, roots: Roots, say: Callable[[str], None]) -> None:
        self._roots, self._say = roots, say
        self._changed: set[Place] | None = None  # by the first forward
        self.is_open = True  # a forward is still to be looked at

    @contextmanager
    def looking(self, watched: AbstractContextManager[object]) -> Iterator[None]:
        """Look at the forward of the block, which runs within another context too."""
        before, read = self._values(), set[Place]()
        with ExitStack() as stack:
            for module, name in self._changed or ():
                stack.enter_context(noting_a_read(module, name, read))
            stack.enter_context(watched)
            yield
        now = self._values()
        changed = {place for place in {**before, **now} if before.get(place) != now.get(place)}
        if self._changed is None:
            self._changed, self.is_open = changed, bool(changed)
            return
        self.is_open = False
        if went_on := changed & read:
            names = {module: name for name, module in modules_of(self._roots)}
            found = sorted(shown(joined(names[module], name)) for module, name in went_on)
            self._say(
                f"model: a forward goes on from what the one before has left in {listed(found)}. That is each "
                "worker's own and in no checkpoint, so what is computed from it depends on shards and workers: set "
                "it anew in each forward, give it with the batch, or register it as a buffer: all shards of a step "
                "then begin with the same value, and the next step with what shard 0 has written"
            )

    def _values(self) -> dict[Place, Any]:
        """Return what tells whether an attribute has changed, of each plain one."""
        return {
            (module, name): _mark(value)
            for _, module in modules_of(self._roots)
            for name, value in list(vars(module).items())
            if name not in OF_MODULES
        }


@contextmanager
def noting_a_read(module: nn.Module, name: str, read: set[Place]) -> Iterator[None]:
    """Add to `read` an attribute that is read in the block, and was not set in it before."""
    kind, is_set = type(module), False

    def get(self: nn.Module, asked: str) -> Any:
        if asked == name and not is_set:
            read.add((self, name))
        return kind.__getattribute__(self, asked)

    def put(self: nn.Module, given: str, value: Any) -> None:
        nonlocal is_set
        is_set = is_set or given == name
        kind.__setattr__(self, given, value)

    own = {"__getattribute__": get, "__setattr__": put, "__module__": kind.__module__}
    with suppress(TypeError):  # of a class that TorchScript or C++ has made
        object.__setattr__(module, "__class__", type(kind.__name__, (kind,), own))
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", kind)


def _mark(value: Any, depth: int = DEPTH) -> Any:
    """Return what is another object if the value is set anew or written; it holds no tensor's memory."""
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return id(value), value.shape, hash(value[:ITEMS].tobytes())
    if isinstance(value, bool | int | float | complex | str | None):
        return repr(value)
    if isinstance(value, list | tuple | deque | dict) and depth:
        items = list(value.items() if isinstance(value, dict) else value)
        return len(items), [_mark(item, depth - 1) for item in items[-ITEMS:]]
    return id(value)
