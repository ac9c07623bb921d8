"""The state of a model that a forward writes: buffers (BatchNorm's statistics), parameters (a momentum encoder's).

The modules `beside` the model have such a state too: a loss's (the centre of its targets), a step's, a metric's.

Every shard of a step starts from the same values; after the step every worker has those of shard 0, as with
nn.DataParallel (`ForwardState`). An evaluation or a prediction leaves no change (`EvalState`). Three means, by cost:

- Copies, in each step: of buffers, of frozen parameters that are SMALL together, and of each parameter that a forward
  was seen to write. They are put back, however a forward has written.
- Stamps, after each forward: versions and addresses of all other parameters. They show a write when it is too late
  for a copy, so it is an error, unless nobody needs the earlier value.
- Digests of the content of those parameters, in the EARLY steps of an attempt, so that a write through `.data` shows
  too. The value of before is there if `.data` was replaced, and of the parameters of which early steps have a copy.
  Then the parameter is copied from now on; else the write is an error. Later, a write that no stamp shows is found at
  checkpoints, where digests of frozen parameters are compared.
"""

import functools
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from dp_ray.engine.alignment import aligned, is_aligned
from dp_ray.engine.world import everyone, gathered, has_peers, is_rank_0
from dp_ray.errors import ModelError
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import Stored, is_sharded, local, overlaps
from dp_ray.tensors.flat import Form, as_bytes, room, views
from dp_ray.text import listed

# Of these dtypes, one kernel on a GPU copies many tensors.
TOGETHER = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}
EARLY = 3  # steps: a momentum encoder that is a copy of another begins to change in the second one
EARLY_COPIES = 1 << 24  # bytes of the smallest parameters, of which early steps have a copy
LARGEST_COPY = 1 << 31  # bytes of the modules beside a model of which a copy is made
SMALL = 1 << 18  # bytes: to copy and to send them takes about as long as the smallest collective

# `map` calls these for all tensors of a model in C.
VERSION = operator.attrgetter("_version")
LOOK = operator.attrgetter("shape", "dtype", "requires_grad")
ADDRESS = torch.Tensor.data_ptr

PIECE = 1 << 24  # bytes of a tensor whose digest is computed at once
PIECE_ON_CPU = 1 << 18  # there they stay in a core's cache, and torch asks no other thread
ODD = -0x61C8864680B583EB  # 2 ** 64 divided by the golden ratio: its bits look random

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

Roots = Mapping[str, nn.Module]  # modules by the beginning of their tensors' names; the model's is empty
OUTSIDE = "."  # the first letter of a name beside the model: none in a model begins with it
Values = dict[str, torch.Tensor | None]
Place = tuple[Any, str]  # a module's buffers, and a key of them
Shared = tuple[str, bool]  # the first buffer in the same memory, and whether both are one tensor
Blocks = Iterable[tuple[nn.Module, list[Any]]]
Groups = list[tuple[list[torch.Tensor], list[torch.Tensor]]]  # tensors, and those that are copied into them
NONE: Roots = {}
USUAL: AbstractContextManager[None] = nullcontext()
ADVICE = "write it in one of these too, or make it a buffer (register_buffer)"
LOST = (
    "in place, so that its value of before is lost, from which each shard must start: give it new data "
    "(parameter.data = value), or make it a buffer (register_buffer)"
)


class _Stamps:
    """Versions and addresses of tensors: a write changes a version, and new data in `.data` an address.

    A write to what `.data` gives changes neither. Inference tensors have no version, fake ones no address.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        versioned = {name: one for name, one in tensors.items() if not one.is_inference()}
        placed = {name: one for name, one in tensors.items() if _has_address(one)}
        self._names = [*versioned, *placed]
        self._versioned, self._placed = list(versioned.values()), list(placed.values())
        self.note()

    def note(self) -> None:
        """Look from here on."""
        self._noted = [*map(VERSION, self._versioned), *map(ADDRESS, self._placed)]

    def written(self) -> list[str]:
        """Return the names of the tensors that were written since the last look."""
        before = self._noted
        self.note()
        if self._noted == before:
            return []
        pairs = zip(self._names, self._noted, before, strict=True)
        return list(dict.fromkeys(name for name, one, earlier in pairs if one != earlier))


class _Copies:
    """Values of a state's tensors, and the tensors that held them: these tell which of them share memory.

    While it `fits`, `take` copies the tensors to the values, and `put` the values to the tensors: all but those
    `apart` at once, and Python looks at no single tensor.
    """

    def __init__(self, of: "Writable", tensors: Values, values: Values, apart: Collection[str] = ()) -> None:
        self.tensors, self.values, self.apart = tensors, values, apart
        self._places, self._followed, self._aligns = of._places, of._followed, of._aligns
        self._spots, self._standing = list(of._places.values()), [tensors.get(name) for name in of._places]
        self._live = list(_present(tensors).values())
        self._looks = self._look()
        self._can_fit = (
            tensors.keys() >= of._places.keys() | of._followed.keys()
            and _layouts(tensors) == _layouts(values)
            and not any(one.is_inference() or (self._aligns and not is_aligned(one)) for one in self._live)
        )
        pairs = [
            (one, value)
            for name, one in _present(tensors).items()
            if (value := values.get(name)) is not None and name not in apart
        ]
        groups = _grouped(pairs)
        copy = torch.no_grad()(_copy) if any(one.requires_grad for one in self._live) else _copy
        self.put = functools.partial(copy, groups)
        self.take = functools.partial(copy, [(into, live) for live, into in groups])

    def _look(self) -> list[Any]:
        return [*map(LOOK, self._live), *(map(ADDRESS, self._live) if self._aligns else ())]

    def fits(self, of: "Writable") -> bool:
        """Return whether these very tensors are the state's now, in the same form as the values."""
        if not self._can_fit or of._places is not self._places or of._followed is not self._followed:
            return False
        try:
            standing = [held[key] for held, key in self._spots]
        except KeyError:  # a forward has removed it
            return False
        return all(map(operator.is_, standing, self._standing)) and self._look() == self._looks

    @functools.cached_property
    def stamps(self) -> _Stamps:
        """The stamps of the tensors."""
        return _Stamps(_present(self.tensors))

    def differs(self) -> bool:
        """Return whether the content of a tensor is not its value."""
        return digests(_present(self.tensors)) != digests(_present(self.values))


class Before:
    """What parameters hold before the forwards of an early step: digests of all, copies of some, by name."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], copied: Iterable[str]) -> None:
        # A forward that replaces a parameter's data leaves these tensors, and so the value of before, as they are.
        self._tensors = {name: one.detach() for name, one in parameters.items()}
        self._digests = digests(self._tensors)
        self._copies = {name: self._tensors[name].clone() for name in copied}

    def written(self, parameters: Mapping[str, nn.Parameter], looks_at_all: bool = True) -> list[str]:
        """Return the names of those whose content, size or dtype has changed; else only of those with a copy."""
        now = {name: parameters[name].detach() for name in (self._tensors if looks_at_all else self._copies)}
        found = digests(now)
        return [
            name
            for name, one in now.items()
            if found[name] != self._digests[name] or layout_of(one) != layout_of(self._tensors[name])
        ]

    def value(self, name: str) -> torch.Tensor | None:
        """Return the value of before; None if it is lost."""
        if name in self._copies:
            return self._copies[name]
        one = self._tensors[name]
        return one.clone() if digests({name: one})[name] == self._digests[name] else None


class _SeesReplaced(TorchFunctionMode):
    """Raises ModelError if a forward replaces the data of a sharded parameter, which nothing else shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and is_sharded(args[0]):
            raise ModelError(_of_sharded([f"the data of a parameter of size {list(args[0].shape)}"]))
        return func(*args, **(kwargs or {}))


class Writable:
    """The buffers of a model and of modules beside it, and the parameters that their calls write, by their names.

    With `aligns`, a buffer begins at a multiple of 16 bytes, also where a forward has set a view in its place.
    """

    def __init__(self, model: nn.Module, beside: Roots, aligns: bool = False) -> None:
        self._aligns = aligns
        self._model = model
        self.beside = beside
        self._roots = {"": model, **beside}
        self._parameters = dict(_named_parameters(self._roots))
        self._known = {id(one) for one in self._parameters.values()}
        self._sharded = {name: one for name, one in self._parameters.items() if is_sharded(one)}
        self._plain = {name: one for name, one in self._parameters.items() if _is_plain(one)}
        self._places = places_of(self._roots)
        self._static = frozenset(self._always_followed())
        self._followed: dict[str, nn.Parameter] = {}  # they are copied
        self._follow(self._static)

    def _always_followed(self) -> Iterator[str]:
        """Yield the parameters that are always copied: of an embedding with `max_norm`, and small frozen ones."""
        for name, module in modules_of(self._roots):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                weight = _joined(name, "weight")
                if weight in self._plain:
                    yield weight
        outside = {name: one for name, one in self._plain.items() if name.startswith(OUTSIDE)}
        # Of a sharded model, each worker holds few parameters whole.
        frozen = {
            name: one
            for name, one in self._plain.items()
            if name not in outside and (self._sharded or not one.requires_grad)
        }
        for few in (frozen, outside):
            if sum(one.nbytes for one in few.values()) <= SMALL:
                yield from few

    def _now(self) -> Values:
        buffers = {name: held[key] for name, (held, key) in self._places.items() if key in held}
        return {**buffers, **self._followed}

    def _take(self, last: _Copies) -> _Copies:
        """Copy all values as they are now, into the memory of the last ones if these fit."""
        if not last.fits(self):
            now = self._now()
            last = _Copies(
                self, now, {name: None if one is None else torch.empty_like(one) for name, one in now.items()}
            )
        last.take()
        return last

    def _put(self, copies: _Copies, written: Collection[str] = ()) -> None:
        """Set all to the values of copies; of those apart, only the ones that are written."""
        if not written and copies.fits(self):
            copies.put()
        else:
            self._put_anew(copies, written)

    def _put_anew(self, copies: _Copies, written: Collection[str]) -> None:
        """Do so where a forward may have set a tensor anew, or has given it another form.

        What it has set anew gets its tensor of before, with which others may share memory; without one, that of now.
        A buffer of another size is made anew.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        made: dict[int, torch.Tensor] = {}
        for name, (held, key) in self._places.items():
            now, value = tensor_at(held, key), copies.values.get(name)
            into = copies.tensors.get(name, now)
            if value is None:
                if name in copies.values:
                    held[key] = None
                elif key in held:
                    del held[key]
                continue
            if (
                into is not None
                and layout_of(into) == layout_of(value)
                and not (self._aligns and not is_aligned(into))
            ):
                if name not in copies.apart or name in written:
                    pairs.append((into, value))
            else:
                into = made.setdefault(id(value if into is None else into), value.clone())
            if into is not now:
                held[key] = into
        for name, parameter in self._followed.items():
            value = copies.values.get(name)
            if value is not None:
                if layout_of(value) != layout_of(parameter):
                    raise ModelError(f"the forward gave the parameter {name} another size or dtype")
                pairs.append((parameter, value))
        copy_all([into for into, _ in pairs], [value for _, value in pairs])

    def _follow(self, names: Iterable[str]) -> None:
        """Copy these parameters from now on, and watch the others."""
        self._followed = {**self._followed, **{name: self._plain[name] for name in names}}
        self._watched = _Stamps({name: one for name, one in self._plain.items() if name not in self._followed})

    def _check_parameters(self) -> None:
        """Raise ModelError if there is a parameter that was not there before."""
        for name, one in _named_parameters(self._roots):
            if name not in self._parameters or (not self._sharded and id(one) not in self._known):
                raise ModelError(
                    f"the forward made the parameter {shown(name)}, which no optimizer trains and each worker draws "
                    "by itself: make it in the constructor, or run a batch through the model where it is made"
                )

    def _smallest(self) -> list[str]:
        """Return the names of the smallest parameters that are not followed, of EARLY_COPIES bytes together."""
        names, left = [], EARLY_COPIES
        for name, one in sorted(self._watched.tensors.items(), key=lambda pair: pair[1].nbytes):
            left -= one.nbytes
            if left < 0:
                break
            names.append(name)
        return names

    def _twins(self) -> list[str]:
        """Return the names of the frozen parameters that may be a momentum encoder's: each is as one that is trained.

        So their copies are no larger than the gradients.
        """
        is_trained = {name: one.requires_grad and not name.startswith(OUTSIDE) for name, one in self._plain.items()}
        trained = Counter(layout_of(one) for name, one in self._plain.items() if is_trained[name])
        names = []
        for name, one in self._watched.tensors.items():
            if not is_trained[name] and trained[layout_of(one)]:
                trained[layout_of(one)] -= 1
                names.append(name)
        return names


class ForwardState(Writable):
    """The state that the forwards of a training write, during a step.

    A step calls `begin`; runs each shard's forward in `forward`, with `restore` before it but for the first one, and
    `keep` after shard 0's; then `share` and `finish`. `blocks` are those of a sharded model, with torch's records of
    their parameters, which no forward may write. Modules `beside` the model are called within its forwards, or by
    `running` on all workers alike.
    """

    def __init__(
        self,
        model: nn.Module,
        is_compiled: bool = False,
        blocks: Blocks = (),
        beside: Roots = NONE,
        aligns: bool = False,
    ) -> None:
        super().__init__(model, beside, aligns)
        self._is_compiled = is_compiled
        self._has_peers, self._is_first = has_peers(), is_rank_0()
        for held, key in self._places.values() if aligns else ():
            if (one := tensor_at(held, key)) is not None:
                held[key] = aligned(one)  # alone in its memory then, as all are that are moved to a GPU
        self._built = frozenset(self._places)
        self._blocks = [(block, list(units)) for block, units in blocks]
        self._versions: list[int] = []  # of sharded parameters
        self._digests: dict[str, int] | None = None  # of the last `state`; the first one is called before any step
        self._changed: set[str] = set()  # non-persistent buffers
        self._shared = self._built_shared = _shared(self._buffers_of(self._now()))
        self._num_tensors = 0  # of rank 0's buffers, each once, when the workers last agreed
        self._start, self._last, self._nothing = (_Copies(self, {}, {}) for _ in range(3))
        self._kept: _Copies | None = None  # the values of shard 0, once it has run
        self._last_for: _Copies | None = None  # whose tensors get what is received; its values are in `_last`
        self._writes_late = False  # whether anything is written after the forwards
        self._before: Before | None = None  # in early steps
        self._num_steps = 0
        self._num_left = 0  # shards of the step whose forwards have not run
        self._is_early = True  # whether what forwards write is looked for
        self._is_alone = self._was_alone = True
        self._layouts: dict[str, Form | None] = {}
        self._flat = torch.empty(0)  # what is sent, in one piece
        self._views: Values = {}  # the values in it, by their names
        self._work: Any = None

    def begin(self, num_shards: int) -> None:
        """Begin a step in which this worker runs `num_shards` shards."""
        self._kept = None
        self._num_left = num_shards
        self._is_alone = num_shards <= 1 and not self._has_peers
        self._was_alone = self._was_alone and self._is_alone
        if num_shards > 1 or self._is_early:
            self._start = self._take(self._start)
        else:
            self._start = _Copies(self, self._now(), {}) if self._shared else self._nothing
        self._watched.note()
        if self._is_early and self._before is None:
            self._before = Before(self._watched.tensors, {*self._smallest(), *self._twins()})
        if self._sharded:
            self._versions = self._versions_of_sharded()

    def _versions_of_sharded(self) -> list[int]:
        whole = [getattr(unit, "_unsharded_param", None) for _, units in self._blocks for unit in units]
        return [*map(VERSION, self._sharded.values()), *(0 if one is None else one._version for one in whole)]

    def forward(self) -> AbstractContextManager[object]:
        """Return the context of a shard's forward, which looks at what it has written.

        At its end it raises ModelError for a parameter that the forward has made, or whose value of before it needs
        and does not know.
        """
        return self._looking() if self._is_early else self

    def __enter__(self) -> None:
        """Begin a forward that is not early."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End it."""
        written = self._watched.written()
        if kind is None and (written or self._sharded):
            self._check(written)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        # What has no copy cannot be restored for the next shard, so the step's last forward looks at it for all.
        with self._comparing():
            yield
        self._num_left -= 1
        assert self._before is not None
        found = self._before.written(self._plain, looks_at_all=self._num_left == 0)
        self._check([*found, *self._watched.written()])
        self._check_parameters()
        self._places = places_of(self._roots)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run in the block what all workers call alike, and what it writes stays."""
        if not self.beside:
            yield
            return
        if not self._is_early:
            self._watched.note()
        with self.forward():
            yield

    def _check(self, written: Iterable[str]) -> None:
        """Follow the parameters that a forward has written; raises ModelError if no value of before is known."""
        found: dict[str, torch.Tensor | None] = {}
        for name in written:
            if name in self._followed:
                continue
            found[name] = None if self._before is None else self._before.value(name)
            if found[name] is None and not self._is_alone:
                text = f"the forward wrote the parameter {shown(name)}"
                if self._is_early:
                    raise ModelError(f"{text} {LOST}")
                raise ModelError(
                    f"{text}, and not in the first {EARLY} steps since the workers started, so its value of before "
                    f"is not known, from which each shard must start; {ADVICE}"
                )
        if found:
            self._follow(found)
            for copies in (self._start, self._kept):
                if copies is not None:
                    copies.values.update(_present(found))
        if self._sharded and (now := self._versions_of_sharded()) != self._versions:
            names = [*self._sharded, *(self._name_of(unit) for _, units in self._blocks for unit in units)]
            pairs = zip(names, now, self._versions, strict=True)
            raise ModelError(_of_sharded([name for name, one, other in pairs if one != other]))

    def _name_of(self, unit: Any) -> str:
        return next((name for name, one in self._parameters.items() if one is unit.sharded_param), "of a block")

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        """Raise ModelError in the forward of a block that has changed the parameters gathered for it, in any way."""
        before: dict[int, dict[str, int]] = {}

        def digests_of(units: list[Any]) -> dict[str, int]:
            whole = {self._name_of(unit): getattr(unit, "_unsharded_param", None) for unit in units}
            return digests({name: one.detach() for name, one in whole.items() if one is not None})

        def begin(units: list[Any], block: nn.Module, *_: Any) -> None:
            before[id(block)] = digests_of(units)

        def end(units: list[Any], block: nn.Module, *_: Any) -> None:
            earlier, now = before.pop(id(block)), digests_of(units)
            written = [name for name, one in now.items() if earlier.get(name) != one]
            if written:
                raise ModelError(_of_sharded(written))

        hooks = []
        for block, units in self._blocks:  # after torch's own hook that gathers, and before the one that frees
            hooks.append(block.register_forward_pre_hook(functools.partial(begin, units)))
            hooks.append(block.register_forward_hook(functools.partial(end, units), prepend=True))
        try:
            with _SeesReplaced() if self._blocks and not self._is_compiled else nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def keep(self) -> None:
        """Keep the current values, those of shard 0, as the values after the step."""
        if self._places or self._followed:
            self._kept = self._last = self._take(self._last)
            if self._is_alone:
                self._kept.stamps.note()

    def restore(self) -> None:
        """Set all to the values before the step, for the next shard."""
        self._put(self._start)

    def share(self) -> None:
        """Start the broadcast of rank 0's values; every rank calls this once a step."""
        if not self._has_peers:
            return
        if self._is_early:
            self._agree()
        if not any(self._layouts.values()):
            return
        if self._is_first and (self._kept is None or self._kept.values is not self._views):
            self._fill()
        self._work = dist.broadcast(self._flat, src=0, group=everyone(), async_op=True)

    def _fill(self) -> None:
        """Copy rank 0's values to what is sent; raises ModelError if the workers know of others."""
        kept = self._kept
        values = self._now() if kept is None else {**self._now(), **kept.values}
        now = _layouts(values)
        self._check_shared(values if kept is None else kept.tensors)
        if now != self._layouts:
            names = [name for name in {**now, **self._layouts} if now.get(name) != self._layouts.get(name)]
            raise ModelError(
                f"the forward changed the size or dtype of {listed(names)} after the first {EARLY} steps since "
                "the workers started: make such a buffer in the constructor, as large as it will be"
            )
        given = _present(values)
        copy_all([view for name in given if (view := self._views[name]) is not None], list(given.values()))

    def _check_shared(self, tensors: Values) -> None:
        """Raise ModelError on rank 0 if other buffers are one tensor than those of which the workers know."""
        if len({id(tensors[name]) for name in self._places if name in tensors}) != self._num_tensors:
            now = _shared(self._buffers_of(tensors))
            names = [name for name in {**now, **self._shared} if now.get(name) != self._shared.get(name)]
            raise ModelError(
                f"the forward has {listed(names)} share memory with other buffers, or no longer, and not so in the "
                f"first {EARLY} steps since the workers started: give each a tensor of its own in the constructor"
            )

    def _buffers_of(self, tensors: Values) -> Values:
        return {name: tensors[name] for name in self._places if name in tensors}

    def _agree(self) -> None:
        """Follow each parameter that any worker's forward wrote, and have the buffers that rank 0 has."""
        values = self._buffers_of(self._now() if self._kept is None else self._kept.tensors)
        mine = list(self._followed), _layouts(values), sorted(non_persistent(self._roots)), _shared(values)
        everybodys = gathered(mine)
        self._num_tensors = len(set(map(id, values.values())))
        self._follow(name for names, *_ in everybodys for name in names)
        _, of_buffers, lasting, self._shared = everybodys[0]
        self._start.tensors.update(_sharing(self._buffers_of(self._start.tensors), self._shared))
        for name in of_buffers.keys() - self._places.keys():
            _register(self._roots, name, name not in lasting)
        self._places = places_of(self._roots)
        layouts = {
            **of_buffers,
            **_layouts({name: one for name, one in self._plain.items() if name in self._followed}),
        }
        if layouts != self._layouts:
            self._layouts = layouts
            present = {name: one for name, one in layouts.items() if one is not None}
            device = next(iter(self._parameters.values())).device
            self._flat = torch.empty(sum(map(room, present.values())), dtype=torch.uint8, device=device)
            # They are copied to the tensors, so that no forward reads them.
            places = views(self._flat, present.values())
            self._views = {**dict.fromkeys(layouts), **dict(zip(present, places, strict=True))}

    def finish(self, ends_step: bool = True) -> bool:
        """End a pass of the step: wait for the broadcast and set all to shard 0's values.

        Only one that `ends_step` counts as a step. Returns whether it was one of the early steps, whose forwards may
        make modules and set hooks.
        """
        kept, was_early = self._kept, self._is_early
        if self._work is not None:
            with waiting("rank 0's buffers"):
                self._work.wait()
            self._work = None
            self._put(self._received(kept or self._start))
        elif kept is not None and self._may_have_moved(kept):
            self._put(kept)
        if was_early:
            self._check_untrained()
        self._num_steps += ends_step
        self._is_early = self._num_steps < EARLY
        self._before = self._kept = None
        return was_early

    def _received(self, of: _Copies) -> _Copies:
        """Return what rank 0 has sent, as values of the tensors of these copies; without one, of those of now.

        On rank 0, `keep` copies into it in the next step.
        """
        if self._last.values is not self._views or (of is not self._last and of is not self._last_for):
            self._last, self._last_for = _Copies(self, of.tensors or self._now(), self._views), of
        return self._last

    def _may_have_moved(self, kept: _Copies) -> bool:
        """Return whether anything may have been written since `keep`, as by a backward that runs forwards again.

        Stamps tell it if no other shard has run. They do not show all writes, as to the mean of `batch_norm`: so
        early steps compare contents, and only if these never differ the stamps are trusted.
        """
        has_moved = not self._is_alone or not kept.fits(self) or bool(kept.stamps.written())
        if self._is_early and (has_moved or kept.differs()):
            self._writes_late = True
        return has_moved or self._writes_late

    def _check_untrained(self) -> None:
        """Raise ModelError if a parameter beside the model got a gradient, which no optimizer takes."""
        for name, one in self._parameters.items():
            if name.startswith(OUTSIDE) and one.requires_grad and one.grad is not None:
                raise ModelError(
                    f"{shown(name)} got a gradient, and no optimizer trains it: make it a part of the model, or "
                    "freeze it (requires_grad_(False))"
                )

    def state(self) -> dict[str, Any]:
        """Return what a state_dict of the model lacks; empty if a forward writes nothing but persistent buffers.

        `parameters` names those that forwards write. `buffers` are the non-persistent ones that have changed, and all
        that has changed beside the model. `made`
        names the buffers that forwards made, and whether they are persistent. `shared` has those that share memory
        with others, or not, unlike in the model that was built. Raises ModelError if frozen parameters have changed
        in a way that nothing else shows, so that the workers' may differ.
        """
        self._check_parameters()
        lasting = non_persistent(self._roots)
        now = {
            name: one.detach()
            for name, one in self._now().items()
            if one is not None and (name in lasting or name.startswith(OUTSIDE))
        }
        found = digests({**now, **{name: local(one.detach()) for name, one in self._unseen().items()}})
        before = found if self._digests is None else self._digests
        written = [name for name in self._unseen() if before.get(name, found[name]) != found[name]]
        if written and not self._was_alone:
            raise ModelError(
                f"the forward wrote {listed(map(shown, written))} through .data, or numpy, and not in the first "
                f"{EARLY} steps since the workers started; {ADVICE}"
            )
        self._changed |= {name for name in now if before.get(name) != found[name]}
        self._digests = found
        shared, built = _shared(self._buffers_of(self._now())), self._built_shared
        state = {
            "parameters": sorted(self._followed.keys() - self._static),
            "made": [[name, name not in lasting] for name in self._places if name not in self._built],
            "buffers": {name: one for name, one in now.items() if name in self._changed},
            "shared": [
                [name, *shared.get(name, (name, True))]
                for name in self._places
                if shared.get(name) != built.get(name)
            ],
        }
        return {key: value for key, value in state.items() if value}

    def _unseen(self) -> dict[str, nn.Parameter]:
        """Return the frozen parameters that no forward was seen to write, by name; all of those beside the model."""
        return {
            name: one
            for name, one in self._parameters.items()
            if (not one.requires_grad or name.startswith(OUTSIDE))
            and name not in self._followed
            and one.layout is torch.strided
            and not one.is_quantized
        }

    def make(self, state: Mapping[str, Any]) -> None:
        """Make the buffers that forwards had made when `state` was taken, before the model's state is loaded."""
        for name, is_persistent in state.get("made", ()):
            if name not in self._places:
                _register(self._roots, name, is_persistent)
        self._places = places_of(self._roots)
        self._share_as(state)

    def _share_as(self, state: Mapping[str, Any]) -> None:
        """Have buffers share memory as they did when `state` was taken."""
        others = {name: (first, is_same) for name, first, is_same in state.get("shared", ())}
        if others:
            _share(self._places, {**self._built_shared, **others})

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, once the model's state is loaded."""
        self._follow(name for name in state.get("parameters", ()) if name in self._plain)
        device = next(iter(self._parameters.values())).device
        for name, value in state.get("buffers", {}).items():
            self._changed.add(name)
            if name in self._plain and self._plain[name].shape == value.shape:
                self._plain[name].copy_(value)
                self._follow([name])
                continue
            if name not in self._places:
                what = "job" if name.startswith(OUTSIDE) else "model"
                raise ModelError(f"the checkpoint has the buffer {shown(name)}, unlike this {what}")
            held, key = self._places[name]
            now = tensor_at(held, key)
            if now is not None and layout_of(now) == layout_of(value):
                now.copy_(value)  # others may be the same tensor
            else:
                held[key] = value.to(device if now is None else now.device)
        self._share_as(state)


# How many forwards of a model in eval mode were compared, with what is beside it, and the parameters that they wrote.
_seen_in_eval: "WeakKeyDictionary[nn.Module, dict[tuple[str, ...], tuple[int, frozenset[str]]]]" = WeakKeyDictionary()


class EvalState(Writable):
    """The state that a forward may write in eval mode: every shard must start from the same values.

    Some modules change buffers in eval mode too, as the observers of quantization do, and `nn.Embedding` with
    `max_norm` its weight. Forwards run in `forward`, which compares all parameters after the EARLY ones of a model.
    A large buffer is put back once its stamps show a write; if none is trusted to, always.
    """

    def __init__(self, model: nn.Module, beside: Roots = NONE, trusts_stamps: bool = True) -> None:
        super().__init__(model, beside)
        self._num_runs, written = _seen_in_eval.get(model, {}).get(tuple(beside), (0, frozenset()))
        self._has_checked = False
        self._follow(written)
        self._held = [module._buffers for _, module in modules_of(self._roots)]
        self._keys = [frozenset(held.keys()) for held in self._held]
        self._lengths = list(map(len, self._held))
        taken = self._take(_Copies(self, {}, {}))
        # To copy a large one takes time, so its stamps must show a write first.
        self._large = _Stamps(
            {
                name: one
                for name, one in taken.tensors.items()
                if trusts_stamps and one is not None and one.nbytes > SMALL and name not in self._followed
            }
        )
        self._copies = _Copies(self, taken.tensors, taken.values, self._large.tensors)
        self._before: Before | None = None  # in early runs
        self._lost: dict[str, None] = {}  # written so that it cannot be undone; of a trial, that is no error

    def forward(self) -> AbstractContextManager[None]:
        """Return the context of a forward; after early ones, the content of all parameters is compared.

        Raises ModelError for a write that cannot be undone.
        """
        return self._looking() if self._num_runs < EARLY else USUAL

    @contextmanager
    def _looking(self) -> Iterator[None]:
        if self._before is None:
            self._before = Before(self._watched.tensors, self._smallest())
        self._num_runs += 1
        try:
            yield
        finally:
            lost = self._see({*self._before.written(self._plain), *self._watched.written()}, self._before)
            self._lost.update(dict.fromkeys(lost))
        if lost:
            raise ModelError(f"the forward wrote {listed(map(shown, lost))} {LOST}")
        seen = _seen_in_eval.setdefault(self._model, {})
        seen[tuple(self.beside)] = self._num_runs, frozenset(self._followed)
        if self._num_runs == EARLY:
            self._before = None

    running = forward  # what sees a whole batch, on all workers alike

    def begin(self, num_shards: int) -> None:
        """Begin a step: each shard starts from the values with which this was made."""

    def _see(self, written: Iterable[str], before: Before) -> list[str]:
        """Follow what a forward has written; return the names of those whose value of before is lost."""
        values = {name: before.value(name) for name in written if name not in self._followed}
        found = {name: value for name, value in values.items() if value is not None}
        self._follow(found)
        tensors = {**self._copies.tensors, **{name: self._plain[name] for name in found}}
        self._copies = _Copies(self, tensors, {**self._copies.values, **found}, self._large.tensors)
        return [name for name in values if name not in found]

    def restore(self) -> None:
        """Undo the changes of a forward; raises ModelError for a change that cannot be undone."""
        if not self._has_checked:
            self._check_parameters()
        self._has_checked = True
        if self._lost:
            raise ModelError(f"the forward wrote {listed(map(shown, self._lost))} {LOST}")
        if written := [name for name in self._watched.written() if name not in self._followed]:
            raise ModelError(
                f"the forward wrote {listed(map(shown, written))}, and not in its first {EARLY} runs, so it cannot "
                f"be put back; {ADVICE}"
            )
        self.put_back()

    def put_back(self) -> None:
        """Undo the changes of a forward to the state of which there is a copy."""
        if list(map(len, self._held)) != self._lengths:
            for held, keys in zip(self._held, self._keys, strict=True):
                for key in set(held) - keys:
                    del held[key]
        written = self._large.written()
        self._put(self._copies, written)
        if written:
            self._large.note()


@contextmanager
def on_copies(modules: Roots) -> Iterator[None]:
    """Run the block with copies in the place of the tensors of modules beside a model, if these are not too large.

    A graph that waits for its backward may need the tensors as they are: to write their old values would be a write.
    """
    places = {name: (held, key, tensor_at(held, key)) for name, (held, key) in places_of(modules).items()}
    large = sum(one.nbytes for _, one in _named_parameters(modules)) > LARGEST_COPY
    parameters = [
        (module._parameters, key, one)
        for _, module in (() if large else modules_of(modules))
        for key, one in module._parameters.items()
        if one is not None and _is_plain(one)
    ]
    held_now = [*places.values(), *parameters]
    copies = {id(one): one.detach().clone() for _, _, one in held_now if one is not None}
    try:
        for held, key, one in held_now:
            fresh = None if one is None else copies[id(one)]
            if fresh is not None and isinstance(one, nn.Parameter):
                fresh = nn.Parameter(fresh, one.requires_grad)
            held[key] = fresh
        yield
    finally:
        for name, (held, key) in places_of(modules).items():
            if name not in places:
                del held[key]
        for held, key, one in held_now:
            held[key] = one


def shown(name: str) -> str:
    """Return the name of a tensor, or of a module beside the model, for errors."""
    return name.removeprefix(OUTSIDE)


def _of_sharded(names: list[str]) -> str:
    return (
        f"the forward wrote {listed(names)}, of which each worker holds a part, so that what is written would be "
        "lost (nn.Embedding with max_norm writes its weight): leave it out, or take strategy: ddp"
    )


def make_room(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Give memory to the buffers that are None, and of which there are weights: a first forward had made them."""
    device = next((one.device for one in model.parameters()), None)
    for name, (held, key) in places_of({"": model}).items():
        weight = weights.get(name)
        if tensor_at(held, key) is None and weight is not None:
            whole = weight.whole() if isinstance(weight, Stored) else weight
            held[key] = torch.empty_like(whole, device=device)
    _make_apart(model, weights)


@torch.no_grad()
def _make_apart(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Give memory of its own to a buffer that shares it with others, but has weights apart: a forward set it anew."""
    places = places_of({"": model})
    tensors = held_in(places)
    shared = _shared(tensors)
    wanted: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in {**{first: None for first, _ in shared.values()}, **shared}:
        weight, one = weights.get(name), tensors[name]
        if isinstance(weight, Stored):
            weight = weight.whole()
        if one is not None and isinstance(weight, torch.Tensor) and weight.shape == one.shape:
            wanted[name] = one, weight.to(one)
            one.copy_(weight)
    for name, (one, weight) in wanted.items():
        if not torch.equal(as_bytes(one), as_bytes(weight)):
            held, key = places[name]
            held[key] = weight


def same_buffers(model: nn.Module, copy: nn.Module) -> None:
    """Give a copy of a model the buffers that the model's forwards have made since."""
    lasting, theirs = non_persistent({"": model}), places_of({"": copy})
    for name, place in places_of({"": model}).items():
        if name not in theirs:
            _register({"": copy}, name, name not in lasting)
        held, key = places_of({"": copy})[name] if name not in theirs else theirs[name]
        one = tensor_at(*place)
        if layout_of(tensor_at(held, key)) != layout_of(one):
            held[key] = None if one is None else one.detach().clone()
    places = places_of({"": copy})
    _share(places, _shared(held_in(places_of({"": model}))))


def modules_of(roots: Roots) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in others, each once, by their names."""
    seen: set[nn.Module] = set()
    for name, root in roots.items():
        yield from root.named_modules(seen, name)


def _named_parameters(roots: Roots) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of modules, each once, by their names."""
    seen: set[int] = set()
    for prefix, root in roots.items():
        for name, one in root.named_parameters(prefix):
            if id(one) not in seen:
                seen.add(id(one))
                yield name, one


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def places_of(roots: Roots) -> dict[str, Place]:
    """Return the place of each dense buffer, by its name; a buffer that is None too."""
    return {
        _joined(prefix, key): (module._buffers, key)
        for prefix, module in modules_of(roots)
        for key, one in module._buffers.items()
        if one is None or (one.layout is torch.strided and not one.is_quantized)
    }


def _shared(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Shared]:
    """Return which tensors share memory with one before them."""
    firsts: dict[int, str] = {}
    shared: dict[str, Shared] = {}
    for name, one in tensors.items():
        if one is not None:
            first = firsts.setdefault(one.untyped_storage()._cdata, name)
            if first != name:
                shared[name] = first, one is tensors[first]
    return shared


def _sharing(tensors: Values, wanted: Mapping[str, Shared]) -> Values:
    """Return tensors of the same values that share memory as is wanted.

    What is a part of another can be made apart, but not made a part.
    """
    now, made = _shared(tensors), dict(tensors)
    for name, one in tensors.items():
        first, is_same = wanted.get(name, (name, True))
        if one is None or now.get(name, (name, True)) == (first, is_same):
            continue
        if first == name:
            made[name] = one.detach().clone()
        elif is_same and made.get(first) is not None:
            made[name] = made[first]
    return made


def _share(places: Mapping[str, Place], wanted: Mapping[str, Shared]) -> None:
    """Have the tensors in these places share memory as is wanted."""
    tensors = held_in(places)
    for name, one in _sharing(tensors, wanted).items():
        if one is not tensors[name]:
            held, key = places[name]
            held[key] = one


def held_in(places: Mapping[str, Place]) -> Values:
    """Return the buffers in places."""
    return {name: tensor_at(*place) for name, place in places.items()}


def tensor_at(held: Any, key: str) -> torch.Tensor | None:
    """Return the tensor in a place; None if there is none."""
    buffer: torch.Tensor | None = held[key] if key in held else None  # noqa: SIM401  TorchScript's has no `get`
    return buffer


def _register(roots: Roots, name: str, is_persistent: bool) -> None:
    """Register a buffer. Raises ModelError if there is no such module."""
    prefix, _, key = name.rpartition(".")
    module = dict(modules_of(roots)).get(prefix)
    if module is None:
        raise ModelError(f"the checkpoint has the buffer {shown(name)}, unlike this job")
    module.register_buffer(key, None, is_persistent)


def non_persistent(roots: Roots) -> set[str]:
    """Return the names of the buffers that no state_dict has."""
    return {
        _joined(prefix, key)
        for prefix, module in modules_of(roots)
        for key in getattr(module, "_non_persistent_buffers_set", ())
    }


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be copied and sent as it is."""
    return not (
        is_lazy(parameter)
        or parameter.is_meta
        or is_sharded(parameter)
        or parameter.layout is not torch.strided
        or parameter.is_quantized
        or overlaps(parameter)
    )


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter, which a write increments; None for an inference tensor, without one."""
    return None if tensor.is_inference() else tensor._version


def _has_address(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has an address: a fake or an empty one has none."""
    return not isinstance(tensor, FakeTensor) and tensor.data_ptr() != 0  # to ask a fake one for it warns, or raises


def layout_of(tensor: torch.Tensor | None) -> Form | None:
    """Return a tensor's size and dtype; None of none."""
    return None if tensor is None else Form(tensor.shape, tensor.dtype)


def _layouts(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Form | None]:
    return {name: layout_of(one) for name, one in tensors.items()}


def _present(values: Values) -> dict[str, torch.Tensor]:
    return {name: one for name, one in values.items() if one is not None}


@torch.no_grad()
def copy_all(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy the values into the tensors, many at once: on a GPU each single copy is a kernel."""
    _copy(_grouped(list(zip(into, values, strict=True))))


def _grouped(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Groups:
    """Return the tensors of each device and dtype, and the values to copy into them."""
    kinds = [(into.device, into.dtype) for into, _ in pairs]
    groups = [[pair for pair, one in zip(pairs, kinds, strict=True) if one == kind] for kind in dict.fromkeys(kinds)]
    return [([into for into, _ in group], [value for _, value in group]) for group in groups]


def _copy(groups: Groups) -> None:
    for into, values in groups:
        if into[0].dtype in TOGETHER:
            torch._foreach_copy_(into, values)
        else:
            for one, value in zip(into, values, strict=True):
                one.copy_(value)


@torch.no_grad()
def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a number of 64 bits for the content of each tensor; waits for each device once.

    Contents that differ, by their order too, have the same number by chance alone; at worst, if nothing but the signs
    of two numbers differ, once in 2 ** 30 pairs.
    """
    found: dict[str, int] = {}
    for device in dict.fromkeys(one.device for one in tensors.values()):
        here = {name: one for name, one in tensors.items() if one.device == device}
        keys = _keys(device, max(one.nbytes for one in here.values()))
        found.update(zip(here, torch.stack([_digest(one, keys) for one in here.values()]).tolist(), strict=True))
    return found


def _keys(device: torch.device, largest: int) -> torch.Tensor:
    """Return an odd number, with bits that look random, for each word of a piece: int64 [words].

    A piece has at most as many bytes as the largest tensor, and the same numbers in any size.
    """
    piece = min(PIECE_ON_CPU if device.type == "cpu" else PIECE, largest)
    keys = torch.arange(max(1, -(-piece // 8)), device=device).mul_(ODD)
    keys ^= keys >> 29
    return keys.mul_(ODD).bitwise_or_(1)


def _digest(tensor: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's words, each times the key of its place."""
    total: torch.Tensor | None = None
    for piece in torch.split(as_bytes(tensor), keys.nbytes):
        is_aligned_here = piece.storage_offset() % 8 == 0 and len(piece) % 8 == 0
        words = (piece if is_aligned_here else nn.functional.pad(piece, (0, -len(piece) % 8))).view(torch.int64)
        # A sign in the highest bit alone would change no other bit of a product: two of them would leave the sum.
        mixed, own = (words >> 29).add_(words), keys[: len(words)]
        found = torch.dot(mixed, own) if mixed.device.type == "cpu" else mixed.mul_(own).sum()
        total = found if total is None else total * 31 + found
    assert total is not None  # what is empty has a piece too
    return total
