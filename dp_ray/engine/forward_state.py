"""The state of a model that a forward writes: buffers (BatchNorm's statistics), parameters (a momentum encoder's).

The modules `beside` the model have such a state too: a loss's (the centre of its targets), a step's, a metric's.

Every shard of a step starts from the same values; after the step every worker has those of shard 0, as with
nn.DataParallel (`ForwardState`). An evaluation or a prediction leaves no change (`EvalState`). `buffers.py` has three
means for it, by cost:

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from dp_ray.engine.alignment import aligned
from dp_ray.engine.buffers import (
    ADVICE,
    EARLY,
    LOST,
    NONE,
    OUTSIDE,
    VERSION,
    Before,
    Copies,
    Roots,
    Stamps,
    Values,
    Writable,
    copy_all,
    digests,
    layout_of,
    layouts_of,
    non_persistent,
    places_of,
    present_in,
    register_buffer,
    share,
    shared_in,
    sharing,
    shown,
    tensor_at,
)
from dp_ray.engine.world import everyone, gathered, has_peers, is_rank_0
from dp_ray.errors import ModelError
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import is_sharded, local
from dp_ray.tensors.flat import Form, room, views
from dp_ray.text import listed

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
BlockTensors = Iterable[tuple[nn.Module, list[Any]]]


class _SeesReplaced(TorchFunctionMode):
    """Raises ModelError if a forward replaces the data of a sharded parameter, which nothing else shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and is_sharded(args[0]):
            raise ModelError(_of_sharded([f"the data of a parameter of size {list(args[0].shape)}"]))
        return func(*args, **(kwargs or {}))


class ForwardState(Writable):
    """The state that the forwards of a training write, during a step.

    A step calls `begin`; runs each shard's forward in `forward`, with `restore` before it but for the first one, and
    `keep` after shard 0's; then `share` and `finish`. `blocks` are those of a sharded model, with torch's records of
    their parameters, which no forward may write. Modules `beside` the model are called within its forwards, or by
    `running` on all workers alike. With `keeps_start` each step can be dropped before its update.
    """

    def __init__(
        self,
        model: nn.Module,
        is_compiled: bool = False,
        blocks: BlockTensors = (),
        beside: Roots = NONE,
        aligns: bool = False,
        keeps_start: bool = False,
    ) -> None:
        super().__init__(model, beside, aligns)
        self._is_compiled = is_compiled
        self._has_peers, self._is_first = has_peers(), is_rank_0()
        for held, key in self._places.values() if aligns else ():
            if (tensor := tensor_at(held, key)) is not None:
                held[key] = aligned(tensor)  # alone in its memory then, as all are that are moved to a GPU
        self._built = frozenset(self._places)
        self._blocks = [(block, list(units)) for block, units in blocks]
        self._versions: list[int] = []  # of sharded parameters
        self._digests: dict[str, int] | None = None  # of the last `state`; the first one is called before any step
        self._last_unseen = Stamps({})  # of the parameters that were frozen then
        self._changed: set[str] = set()  # non-persistent buffers
        self._shared = self._built_shared = shared_in(self._buffers_of(self._now()))
        self._unlike_built: set[str] = set()  # buffers that shared memory otherwise when the loaded state was taken
        self._num_tensors = 0  # of rank 0's buffers, each once, when the workers last agreed
        self._start, self._last, self._nothing = (Copies(self, {}, {}) for _ in range(3))
        self._kept: Copies | None = None  # the values of shard 0, once it has run
        self._last_for: Copies | None = None  # whose tensors get what is received; its values are in `_last`
        self._writes_late = False  # whether anything is written after the forwards
        self._before: Before | None = None  # in early steps
        self._num_steps = 0
        self._num_left = 0  # shards of the step whose forwards have not run
        self._is_early = True  # whether what forwards write is looked for
        self._is_alone = self._was_alone = True
        self._layouts: dict[str, Form | None] = {}
        self._keeps_start = keeps_start
        self.is_open = False  # a step has begun, and its update has not come
        self._flat = torch.empty(0)  # what is sent, in one piece
        self._views: Values = {}  # the values in it, by their names
        self._work: Any = None

    def begin(self, num_shards: int) -> None:
        """Begin a step in which this worker runs `num_shards` shards."""
        self._kept = None
        self._num_left = num_shards
        self._is_alone = num_shards <= 1 and not self._has_peers
        self._was_alone = self._was_alone and self._is_alone
        self.is_open = True
        if num_shards > 1 or self._is_early or (self._keeps_start and (self._places or self._followed)):
            self._start = self._take(self._start)
        else:
            self._start = Copies(self, self._now(), {}) if self._shared else self._nothing
        self._watched.note()
        if self._is_early and self._before is None:
            self._before = Before(self._watched.tensors, {*self._smallest(), *self._twins()})
        if self._sharded:
            self._versions = self._versions_of_sharded()

    def _versions_of_sharded(self) -> list[int]:
        whole = [getattr(unit, "_unsharded_param", None) for _, units in self._blocks for unit in units]
        return [
            *map(VERSION, self._sharded.values()),
            *(0 if tensor is None else tensor._version for tensor in whole),
        ]

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
                    copies.values.update(present_in(found))
        if self._sharded and (now := self._versions_of_sharded()) != self._versions:
            names = [*self._sharded, *(self._name_of(unit) for _, units in self._blocks for unit in units)]
            pairs = zip(names, now, self._versions, strict=True)
            raise ModelError(_of_sharded([name for name, version, other in pairs if version != other]))

    def _name_of(self, unit: Any) -> str:
        return next(
            (name for name, parameter in self._parameters.items() if parameter is unit.sharded_param), "of a block"
        )

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        """Raise ModelError in the forward of a block that has changed the parameters gathered for it, in any way."""
        before: dict[int, dict[str, int]] = {}

        def digests_of(units: list[Any]) -> dict[str, int]:
            whole = {self._name_of(unit): getattr(unit, "_unsharded_param", None) for unit in units}
            return digests({name: tensor.detach() for name, tensor in whole.items() if tensor is not None})

        def begin(units: list[Any], block: nn.Module, *_: Any) -> None:
            before[id(block)] = digests_of(units)

        def end(units: list[Any], block: nn.Module, *_: Any) -> None:
            earlier, now = before.pop(id(block)), digests_of(units)
            written = [name for name, digest in now.items() if earlier.get(name) != digest]
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

    def drop(self) -> None:
        """Set all to the values before a step that has begun and will not end; it must have kept them."""
        if self.is_open:
            self._work = self._before = self._kept = None
            self.is_open = False
            self.restore()

    def share(self) -> None:
        """Start the broadcast of rank 0's values; every rank calls this once a step."""
        if not self._has_peers:
            return
        # All send and take the same bytes: first they agree on the buffers that these are.
        if self._is_early:
            self._agree()
        if not any(self._layouts.values()):
            return
        if self._is_first and (self._kept is None or self._kept.values is not self._views):
            self._fill()
        # The memory is the same in each step, so `finish` waits for this before the next forward may write there.
        self._work = dist.broadcast(self._flat, src=0, group=everyone(), async_op=True)

    def _fill(self) -> None:
        """Copy rank 0's values to what is sent; raises ModelError if the workers know of others."""
        kept = self._kept
        values = self._now() if kept is None else {**self._now(), **kept.values}
        now = layouts_of(values)
        self._check_shared(values if kept is None else kept.tensors)
        if now != self._layouts:
            names = [name for name in {**now, **self._layouts} if now.get(name) != self._layouts.get(name)]
            raise ModelError(
                f"the forward changed the size or dtype of {listed(names)} after the first {EARLY} steps since "
                "the workers started: make such a buffer in the constructor, as large as it will be"
            )
        given = present_in(values)
        copy_all([view for name in given if (view := self._views[name]) is not None], list(given.values()))

    def _check_shared(self, tensors: Values) -> None:
        """Raise ModelError on rank 0 if other buffers are one tensor than those of which the workers know."""
        if len({id(tensors[name]) for name in self._places if name in tensors}) != self._num_tensors:
            now = shared_in(self._buffers_of(tensors))
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
        mine = list(self._followed), layouts_of(values), sorted(non_persistent(self._roots)), shared_in(values)
        everybodys = gathered(mine)
        self._num_tensors = len(set(map(id, values.values())))
        self._follow(name for names, *_ in everybodys for name in names)
        _, of_buffers, lasting, self._shared = everybodys[0]
        self._start.tensors.update(sharing(self._buffers_of(self._start.tensors), self._shared))
        for name in of_buffers.keys() - self._places.keys():
            register_buffer(self._roots, name, name not in lasting)
        self._places = places_of(self._roots)
        layouts = {
            **of_buffers,
            **layouts_of({name: tensor for name, tensor in self._plain.items() if name in self._followed}),
        }
        if layouts != self._layouts:
            self._layouts = layouts
            present = {name: layout for name, layout in layouts.items() if layout is not None}
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

    def _received(self, of: Copies) -> Copies:
        """Return what rank 0 has sent, as values of the tensors of these copies; without one, of those of now.

        On rank 0, `keep` copies into it in the next step.
        """
        if self._last.values is not self._views or (of is not self._last and of is not self._last_for):
            self._last, self._last_for = Copies(self, of.tensors or self._now(), self._views), of
        return self._last

    def _may_have_moved(self, kept: Copies) -> bool:
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
        for name, parameter in self._parameters.items():
            if name.startswith(OUTSIDE) and parameter.requires_grad and parameter.grad is not None:
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
            name: tensor.detach()
            for name, tensor in self._now().items()
            if tensor is not None and (name in lasting or name.startswith(OUTSIDE))
        }
        found = {**digests(now), **self.compare()}
        before = found if self._digests is None else self._digests
        self._changed |= {name for name in now if before.get(name) != found[name]}
        self._digests = found
        shared, built = shared_in(self._buffers_of(self._now())), self._built_shared
        state = {
            "parameters": sorted(self._followed.keys() - self._static),
            "made": [[name, name not in lasting] for name in self._places if name not in self._built],
            "buffers": {name: buffer for name, buffer in now.items() if name in self._changed},
            "shared": [
                [name, *shared.get(name, (name, True))]
                for name in self._places
                if name in self._unlike_built or shared.get(name) != built.get(name)
            ],
        }
        return {key: value for key, value in state.items() if value}

    def compare(self) -> dict[str, int]:
        """Return digests of the frozen parameters; raises ModelError if forwards have changed them unseen."""
        unseen = self._unseen()
        found = digests({name: local(tensor.detach()) for name, tensor in unseen.items()})
        before = found if self._digests is None else self._digests
        updated = self._last_unseen.written()  # one that was not frozen meanwhile, by an update
        written = [name for name, digest in found.items() if before.get(name, digest) != digest]
        written = [name for name in written if name not in updated]
        self._last_unseen = Stamps({name: self._plain[name] for name in unseen if name in self._plain})
        if written and not self._was_alone:
            raise ModelError(
                f"the forward wrote {listed(map(shown, written))} through .data, or numpy, and not in the first "
                f"{EARLY} steps since the workers started; {ADVICE}"
            )
        return found

    @contextmanager
    def comparing_around(self) -> Iterator[None]:
        """Compare frozen parameters before the block and from its end on: in it the model may round them itself."""
        self.compare()
        yield
        if self._digests is not None:
            self._digests = {name: digest for name, digest in self._digests.items() if name not in self._unseen()}
            self._digests |= self.compare()

    def _unseen(self) -> dict[str, nn.Parameter]:
        """Return the frozen parameters that no forward was seen to write, by name; all of those beside the model."""
        return {
            name: parameter
            for name, parameter in self._parameters.items()
            if (not parameter.requires_grad or name.startswith(OUTSIDE))
            and name not in self._followed
            and parameter.layout is torch.strided
            and not parameter.is_quantized
        }

    def make(self, state: Mapping[str, Any]) -> None:
        """Make the buffers that forwards had made when `state` was taken, before the model's state is loaded."""
        for name, is_persistent in state.get("made", ()):
            if name not in self._places:
                register_buffer(self._roots, name, is_persistent)
        self._places = places_of(self._roots)
        # A model that goes on among other workers has them already, unlike one that is built.
        self._built -= {name for name, _ in state.get("made", ())}
        self._unlike_built = {name for name, *_ in state.get("shared", ())}
        self._share_as(state)

    def _share_as(self, state: Mapping[str, Any]) -> None:
        """Have buffers share memory as they did when `state` was taken."""
        others = {name: (first, is_same) for name, first, is_same in state.get("shared", ())}
        if others:
            share(self._places, {**self._built_shared, **others})

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


def _of_sharded(names: list[str]) -> str:
    return (
        f"the forward wrote {listed(names)}, of which each worker holds a part, so that what is written would be "
        "lost (nn.Embedding with max_norm writes its weight): leave it out, or take strategy: ddp"
    )
