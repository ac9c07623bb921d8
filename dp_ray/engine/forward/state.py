"""The state of a model that calls write: buffers (BatchNorm's statistics), parameters (a momentum encoder's).

The modules `beside` the model have such a state too: a loss's (the centre of its targets), a step's, a metric's.
Every shard starts from the same values (`State`). After a step of a training every worker has those of shard 0, as
with nn.DataParallel (`StepState`). An evaluation or a prediction leaves no change (`EvalState`). The calls of a
parallel module have the caller's (`engine/forward/call_state.py`).

Three roles. `WriteWatch` of `tensors/changed.py` notices what a forward writes of parameters. `Writable` and `Copies`
of `engine/forward/buffers.py` hold the values from which each shard starts: of buffers, and of each parameter that
was seen to be written, which is followed from then on. `State` acts on what is noticed, and `StepState` shares the
values.

It is an error if the value of before is lost. The watch knows it if there was a copy: of the smallest parameters in
the EARLY steps, of those that may be a momentum encoder's in the first forward. Around that one it sees what no
version shows. Later only checkpoints show that, of what is frozen.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.alignment import aligned
from dp_ray.engine.forward.buffers import (
    NONE,
    OUTSIDE,
    Copies,
    Forms,
    Roots,
    Writable,
    can_be_copied,
    copy_all,
    form_or_none,
    forms_of,
    joined,
    modules_of,
    named_parameters_of,
    non_persistent,
    places_of,
    present_in,
    shared_in,
    shown,
    tensor_at,
)
from dp_ray.engine.world import everyone, gathered, has_peers, is_rank_0
from dp_ray.errors import ModelError
from dp_ray.system.threads import waiting
from dp_ray.tensors.changed import Stamps, WriteWatch, digests
from dp_ray.tensors.files import is_sharded, local
from dp_ray.text import listed

if TYPE_CHECKING:
    from dp_ray.engine.forward.carried import Carried
    from dp_ray.engine.sharded.state import BlockParameters

EARLY = 3  # steps: a momentum encoder that is a copy of another begins to change in the second one
SMALL = 1 << 18  # bytes: to copy and to send them takes about as long as the smallest collective

ADVICE = "write it in one of these too, or make it a buffer (register_buffer)"
LOST = (
    "in place, so that its value of before is lost, from which each shard must start: give it new data "
    "(parameter.data = value), or make it a buffer (register_buffer)"
)


class State:
    """What calls of a model, and of modules beside it, may write: its buffers, and parameters seen to be written.

    Each shard's forward runs in `forward`, which looks at what it has written, and starts from the same values:
    `restore` sets these before each forward but the first. With `aligns`, a buffer begins at a multiple of 16 bytes,
    also where a forward has set a view in its place.
    """

    _of_blocks: "BlockParameters | None" = None
    _first = f"first {EARLY} steps since the workers started"  # the forwards whose writes are looked at

    def __init__(self, model: nn.Module, beside: Roots = NONE, aligns: bool = False) -> None:
        self.beside = beside
        self._roots = {"": model, **beside}
        self._parameters = dict(named_parameters_of(self._roots))
        self._plain = {name: parameter for name, parameter in self._parameters.items() if can_be_copied(parameter)}
        self._held = Writable(self._roots, aligns)
        self._watch = WriteWatch(self._plain)
        self.follow(self._always_followed())
        self._start: Copies | None = None  # the values from which each shard starts
        self._num_runs = 0
        self._is_early = True  # and so looked at
        self.carried: Carried | None = None  # who looks at attributes in two runs
        self.lost: dict[str, None] = {}  # written so that it cannot be undone; of a trial, that is no error

    def _always_followed(self) -> Iterator[str]:
        """Yield what is copied from the begin: weights of embeddings with `max_norm`, and small modules' beside."""
        for name, module in modules_of(self._roots):
            weight = joined(name, "weight")
            is_renormed = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
            if is_renormed and weight in self._plain:
                yield weight
        outside = [name for name in self._plain if name.startswith(OUTSIDE)]
        if sum(self._plain[name].nbytes for name in outside) <= SMALL:
            yield from outside

    def _trained(self) -> set[str]:
        """Return the names of what an optimizer trains, of which an average may be kept."""
        return {name for name, tensor in self._plain.items() if tensor.requires_grad and not name.startswith(OUTSIDE)}

    def follow(self, names: Iterable[str]) -> None:
        """Copy these parameters from now on, and watch the others; all workers call this alike, between steps."""
        known = {*self._held.followed, *names}
        # In the model's order, and not in that of the writes: rank 0's values go to the others as they stand here.
        self._held.followed = {name: tensor for name, tensor in self._plain.items() if name in known}
        self._watch.watch_all_but(known)

    def begin(self, num_runs: int) -> None:
        """Begin a step in which this worker runs so many shards."""

    def keep(self) -> None:
        """Keep the current values, those of shard 0, as the values after the step."""

    def forward(self) -> AbstractContextManager[object]:
        """Return the context of a forward, which looks at what it has written; early ones, at contents too.

        At its end it raises ModelError for a parameter that the forward has made, or whose value of before is needed
        and lost.
        """
        watched = self._looking() if self._is_early else self
        carried = self.carried
        return watched if carried is None or not carried.is_open else carried.looking(watched)

    def running(self) -> AbstractContextManager[object]:
        """Return the context of what sees a whole batch, on all workers alike."""
        return self.forward()

    def __enter__(self) -> None:
        """Begin a forward that is not early."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End it."""
        if names := self._watch.stamps.written():
            self._see(dict.fromkeys(names), kind is None)
        if self._of_blocks is not None and kind is None:
            self._of_blocks.check()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._watch.look(self._trained())
        is_right = False
        try:
            with nullcontext() if self._of_blocks is None else self._of_blocks.comparing():
                yield
            is_right = True
        finally:
            if written := self._watch.written():
                self._see(written, is_right)
        if self._of_blocks is not None:
            self._of_blocks.check()
        self._check_parameters()
        self._check_buffers()

    def _see(self, written: dict[str, torch.Tensor | None], raises: bool) -> None:
        """Follow what a forward has written; with `raises`, raise ModelError if a value of before is lost."""
        self._remember(present_in(written))
        if lost := [name for name, value in written.items() if value is None]:
            self._lose(lost, raises)

    def _remember(self, found: Mapping[str, torch.Tensor]) -> None:
        """Follow parameters from now on, of which these are the values from which each shard starts."""
        if found:
            self.follow(found)
            if self._start is not None:
                self._start.values.update(found)

    def _lose(self, names: Collection[str], raises: bool) -> None:
        self.lost.update(dict.fromkeys(names))
        if raises:
            self._raise_lost()

    def _raise_lost(self) -> None:
        """Raise ModelError if the value of before of a parameter is lost, from which each shard must start."""
        if not self.lost:
            return
        text = f"the forward wrote {listed(map(shown, self.lost))}"
        if self._is_early:
            raise ModelError(f"{text} {LOST}")
        raise ModelError(
            f"{text}, and not in the {self._first}, so its value of before is not known, from which each shard must "
            f"start; {ADVICE}"
        )

    def _check_unseen(self, found: Mapping[str, int], before: Mapping[str, int], but: Collection[str] = ()) -> None:
        """Raise ModelError if digests differ from those of before: something was written that nothing else shows."""
        written = [name for name, one in found.items() if before.get(name, one) != one and name not in but]
        if written:
            raise ModelError(
                f"the forward wrote {listed(map(shown, written))} through .data, or numpy, and not in the "
                f"{self._first}; {ADVICE}"
            )

    def _check_parameters(self) -> None:
        """Raise ModelError if there is a parameter that was not there before."""
        known = self._parameters
        # Of a sharded model, torch sets others in their place.
        ids = set() if any(map(is_sharded, known.values())) else set(map(id, known.values()))
        for name, parameter in named_parameters_of(self._roots):
            if name not in self._parameters or (ids and id(parameter) not in ids):
                raise ModelError(
                    f"the forward made the parameter {shown(name)}, which no optimizer trains and each worker draws "
                    "by itself: make it in the constructor, or run a batch through the model where it is made"
                )

    def _check_buffers(self) -> None:
        """Raise ModelError if there is a buffer that was not there before."""
        if made := places_of(self._roots).keys() - self._held.places.keys():
            raise ModelError(
                f"the forward made the buffer {listed(map(shown, sorted(made)))}: make it in the constructor "
                "(register_buffer), as None if its size is not known there"
            )

    def restore(self) -> None:
        """Undo what forwards have written; raises ModelError if a value of before is lost."""
        self._raise_lost()
        if self._start is not None:
            self._held.put(self._start)


# What forwards of a model in eval mode, with what is beside it, were seen to write. Only the first one is looked at.
_seen_in_eval: "WeakKeyDictionary[nn.Module, dict[tuple[str, ...], frozenset[str]]]" = WeakKeyDictionary()


class EvalState(State):
    """The state that a forward may write in eval mode: every shard starts from the values with which this is made.

    Some modules change buffers in eval mode too, as the observers of quantization do, and `nn.Embedding` with
    `max_norm` its weight.
    """

    _first = "first run of the model"

    def __init__(self, model: nn.Module, beside: Roots = NONE) -> None:
        super().__init__(model, beside)
        self._seen = _seen_in_eval.setdefault(model, {})
        self._is_early = tuple(beside) not in self._seen
        self.follow(self._seen.get(tuple(beside), ()))
        self._start = self._held.take(self._start)

    def _trained(self) -> set[str]:
        return set()  # so nothing large is copied: in eval mode no average is updated

    @contextmanager
    def _looking(self) -> Iterator[None]:
        with super()._looking():
            yield
        self._is_early = False
        self._watch.forget()
        self._seen[tuple(self.beside)] = frozenset(self._held.followed)

    def put_back(self) -> None:
        """Undo the changes of a forward to the state of which there is a copy."""
        assert self._start is not None
        self._held.put(self._start)

    def check(self) -> None:
        """Raise ModelError if forwards have changed a parameter unseen; not if an earlier state had the first one."""
        self._check_buffers()
        first = self._watch.first
        unseen = {name: self._plain[name].detach() for name in first if name not in self._held.followed}
        self._check_unseen(digests(unseen), first)


class StepState(State):
    """The state that the forwards of a training write, during a step.

    A step calls `begin`; runs each shard's forward in `forward`, with `restore` before it but for the first one, and
    `keep` after shard 0's; then `share` and `finish`. Modules `beside` the model are called in its forwards, or by
    `running` on all workers alike. `of_blocks` are a sharded model's parameters, which no forward may write. With
    `keeps_start` each step can be dropped before its update.
    """

    def __init__(
        self,
        model: nn.Module,
        of_blocks: "BlockParameters | None" = None,
        beside: Roots = NONE,
        aligns: bool = False,
        keeps_start: bool = False,
    ) -> None:
        super().__init__(model, beside, aligns)
        for held, key in self._held.places.values() if aligns else ():
            if (tensor := tensor_at(held, key)) is not None:
                held[key] = aligned(tensor)  # alone in its memory then, as all are that are moved to a GPU
        self._of_blocks = of_blocks
        self._baseline: dict[str, int] | None = None  # digests of before the first forward, or when last compared
        self._frozen = Stamps({})  # of the parameters that were frozen then
        self._changed: set[str] = set()  # non-persistent buffers
        self._shared = shared_in(self._held.buffers())
        self._has_peers = has_peers()
        self._forms: Forms = {}  # of rank 0's values, on which the workers have agreed
        self._last: Copies | None = None  # the values after the last step: rank 0's
        self._work: Any = None  # the broadcast of them that is under way
        self._kept: Copies | None = None  # the values of shard 0, once it has run
        self._is_alone = self._was_alone = True
        self._keeps_start = keeps_start
        self._opened: Copies | None = None  # the values before the step, in which several passes may begin
        self.is_open = False  # a step has begun, and its update has not come

    def begin(self, num_runs: int) -> None:
        """Begin a step, or a further pass of it, in which this worker runs so many shards."""
        self._kept = None
        self._is_alone = num_runs <= 1 and not self._has_peers
        self._was_alone = self._was_alone and self._is_alone
        is_further, self.is_open = self.is_open and self._keeps_start, True
        if self._baseline is None:
            self.compare()
        held = self._held
        is_needed = num_runs > 1 or self._is_early or (self._keeps_start and (held.places or held.followed))
        self._start = held.take(None if is_further else self._start) if is_needed else None
        if not is_further:
            self._opened = self._start
        self._watch.stamps.note()
        if self._of_blocks is not None:
            self._of_blocks.note()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run in the block what all workers call alike, and what it writes stays."""
        if self.beside and not self._is_early:
            self._watch.stamps.note()
        with self.forward() if self.beside else nullcontext():
            yield

    def _remember(self, found: Mapping[str, torch.Tensor]) -> None:
        super()._remember(found)
        for copies in (self._kept, self._opened):
            if copies is not None:
                copies.values.update(found)

    def _lose(self, names: Collection[str], raises: bool) -> None:
        if self._is_alone:
            self.follow(names)  # nobody needs what was before
        else:
            super()._lose(names, raises)

    def keep(self) -> None:
        """Keep the current values, those of shard 0, as the values after the step.

        Raises ModelError if its forward has changed which buffers share memory: other workers would not know of it.
        """
        if self._held.places or self._held.followed:
            last = self._last
            self._kept = self._last = self._held.take(last)
            if self._kept is not last and (now := shared_in(self._held.buffers())) != self._shared:
                names = [name for name in {**now, **self._shared} if now.get(name) != self._shared.get(name)]
                raise ModelError(
                    f"the forward has {listed(map(shown, names))} share memory with other buffers, or no longer: "
                    "give each a tensor of its own in the constructor (clone it)"
                )

    def shared_by_all(self) -> dict[str, torch.Tensor]:
        """Return the tensors that forwards write, as far as all workers know that, with their values of now."""
        known = self._forms.keys() if self._has_peers else self._held.followed.keys()
        return {
            name: tensor
            for name, tensor in present_in(self._held.now()).items()
            if name in known or name in self._held.places
        }

    def drop(self) -> None:
        """Set all to the values before a step that has begun and will not end; it must have kept them."""
        if self.is_open:
            self._work = self._kept = None
            self.is_open = False
            self._watch.forget()
            self._start = self._opened
            self.restore()

    def share(self) -> None:
        """Start the broadcast of rank 0's values; every rank calls this once a step."""
        if not self._has_peers:
            return
        # All send and take the same bytes: first they agree on the buffers that these are.
        if self._is_early:
            self._agree()
        if not any(self._forms.values()):
            return
        last = self._last
        if is_rank_0():
            last = self._of_rank_0()
        elif last is None or last.forms != self._forms or not last.fits():
            tensors = self._held.now() if self._start is None else self._start.tensors
            last = Copies(self._held, tensors, self._forms)
        self._last = last
        # The memory may be that of the next step too: `finish` waits for this before a forward writes there.
        self._work = dist.broadcast(last.flat, src=0, group=everyone(), async_op=True)

    def _agree(self) -> None:
        """Follow each parameter that any worker's forward wrote, and know the forms of rank 0's buffers."""
        forms = forms_of(self._held.buffers()) if self._kept is None else self._kept.forms
        of_buffers = {name: forms[name] for name in self._held.places}
        everybodys = gathered((list(self._held.followed), of_buffers))
        names = dict.fromkeys(name for theirs, _ in everybodys for name in theirs)
        new = [name for name in names if name not in self._held.followed]
        # No forward has written them here yet; but one may that runs another worker's shard after these.
        self._remember({name: self._plain[name].detach().clone() for name in new})
        self.follow(names)
        self._forms = {**everybodys[0][1], **forms_of(self._held.followed)}

    def _of_rank_0(self) -> Copies:
        """Return what rank 0 sends; raises ModelError if the workers know of other values."""
        kept = self._kept
        if kept is not None and kept.forms == self._forms:
            return kept
        tensors = self._held.now()
        values = {**tensors, **({} if kept is None else kept.values)}
        if (now := forms_of(values)) != self._forms:
            names = [name for name in {**now, **self._forms} if now.get(name) != self._forms.get(name)]
            raise ModelError(
                f"the forward changed the size or dtype of {listed(map(shown, names))} after the {self._first}: make "
                "such a buffer in the constructor, as large as it will be"
            )
        sent = Copies(self._held, {**tensors, **({} if kept is None else kept.tensors)}, now)
        copy_all(present_in(sent.values).values(), present_in(values).values())
        return sent

    def finish(self, ends_step: bool = True) -> bool:
        """End a pass of the step: wait for the broadcast and set all to shard 0's values.

        Only one that `ends_step` counts as a step. Returns whether it was one of the early steps, whose forwards may
        make modules and set hooks.
        """
        was_early = self._is_early
        if self._work is not None:
            with waiting("rank 0's buffers"):
                self._work.wait()
            assert self._last is not None
            self._held.put(self._last)
        elif self._kept is not None:
            self._held.put(self._kept)  # also if no other shard has run: a backward may have run its forward again
        if was_early:
            self._check_untrained()
        self._num_runs += ends_step
        self._is_early = self._num_runs < EARLY
        self._kept = self._work = None
        if was_early:
            self._watch.forget()
        return was_early

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
        that has changed beside the model. Raises ModelError if frozen parameters have changed in a way that nothing
        else shows.
        """
        self._check_parameters()
        self._check_buffers()
        self.compare()
        state = {
            "parameters": sorted(self._held.followed),
            "buffers": {name: tensor for name, tensor in self._lacking().items() if name in self._changed},
        }
        return {key: value for key, value in state.items() if value}

    def _lacking(self) -> dict[str, torch.Tensor]:
        """Return what forwards may write and a state_dict of the model lacks."""
        lasting = non_persistent(self._roots)
        return {
            name: tensor.detach()
            for name, tensor in present_in(self._held.now()).items()
            if name in lasting or name.startswith(OUTSIDE)
        }

    def compare(self) -> None:
        """Compare with the last look, or look first: at frozen parameters, and at what a state_dict lacks.

        Raises ModelError if forwards have changed frozen parameters in a way that nothing else shows, so that the
        workers' may differ.
        """
        now = self._lacking()
        frozen = {  # what no forward was seen to write; beside the model, all parameters
            name: local(parameter.detach())
            for name, parameter in self._parameters.items()
            if (not parameter.requires_grad or name.startswith(OUTSIDE))
            and name not in self._held.followed
            and parameter.layout is torch.strided
            and not parameter.is_quantized
        }
        found = digests({**now, **frozen})
        before = found if self._baseline is None else self._baseline
        self._changed |= {name for name in now if before.get(name) != found[name]}
        updated = self._frozen.written()  # one that was not frozen meanwhile, by an update
        self._frozen = Stamps({name: self._plain[name] for name in frozen if name in self._plain})
        self._baseline = found
        if not self._was_alone:
            self._check_unseen({name: found[name] for name in frozen}, before, updated)

    @contextmanager
    def comparing_around(self) -> Iterator[None]:
        """Compare frozen parameters before the block and from its end on: in it the model may round them itself."""
        self.compare()
        yield
        lacking = self._lacking()
        self._baseline = {name: digest for name, digest in (self._baseline or {}).items() if name in lacking}
        self.compare()

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, once the model's state is loaded."""
        self.follow(name for name in state.get("parameters", ()) if name in self._plain)
        for name, value in state.get("buffers", {}).items():
            self._changed.add(name)
            if name in self._plain and self._plain[name].shape == value.shape:
                self._plain[name].copy_(value)
                self.follow([name])
                continue
            if name not in self._held.places:
                what = "job" if name.startswith(OUTSIDE) else "model"
                raise ModelError(f"the checkpoint has the buffer {shown(name)}, unlike this {what}")
            held, key = self._held.places[name]
            now = tensor_at(held, key)
            if now is not None and form_or_none(now) == form_or_none(value):
                now.copy_(value)  # others may be the same tensor
            else:
                held[key] = value.to(self._held.device if now is None else now.device)
