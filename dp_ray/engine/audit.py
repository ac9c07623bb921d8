"""Audits of a training on one worker: a leaf of the tree of sums is run twice, and compared. Begin at `StepAudit`.

In an audited step the workers exchange 16 bytes each, once: a digest of the state that they train, and of the two who
run the leaf, one of what they have computed. Only if these differ they say more, and a third worker runs the leaf.

A worker that computes wrong is convicted, or has the step done again: `Auditor.settle`, by `plan.audits.judged`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.forward.state import StepState
from dp_ray.engine.loads.loading import LoadedShard, LoadedStep, Source, load_steps
from dp_ray.engine.placement import Placement
from dp_ray.engine.sums import tree_sum
from dp_ray.engine.sums.reduce import NOTHING, Reduction, ShardLoss
from dp_ray.engine.update import Gradients
from dp_ray.engine.world import Trouble, World, all_gather, everyone, gathered
from dp_ray.errors import DataError, ModelError, WorkerError
from dp_ray.plan.audits import WITHIN, Audit, Audits, AuditVerdict, judged, odd_ones
from dp_ray.plan.split import Shard
from dp_ray.system.threads import waiting
from dp_ray.tensors.changed import begun_digests
from dp_ray.tensors.scatter import cut
from dp_ray.tensors.tree import flatten
from dp_ray.text import listed

Begun = list[tuple[list[str], torch.Tensor]]  # digests that nobody has waited for
PLAIN = (bool, int, float, str, bytes)


class ComputesWrong(ModelError):
    """The processor of this worker has computed other bits than those of other workers, and is left out."""

    trouble = Trouble.BROKEN_GPU


class Differs(ModelError):
    """Workers differ, and nobody knows who is at fault: to try again would find it again."""

    comes_back = True


class HasState(Protocol):
    """A model in training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on."""


class AuditedPass(Protocol):
    """A pass over a step's shards, as an audit sees it."""

    placement: Placement
    loss: ShardLoss
    gradients: Gradients
    state: StepState
    clock: StepClock

    def again(
        self, loaded: LoadedShard, number: int = 0, around: Any = None, in_step: bool = False
    ) -> AbstractContextManager[torch.Tensor]:
        """Run a shard's forward beside the reduction; the block runs its loss's backward."""


class Ran(NamedTuple):
    """What a worker has of a leaf, as digests: the batch, and gradients, losses and what the forward wrote."""

    batch: int = 0
    leaf: int = 0


@dataclass(eq=False)
class Auditor:
    """The audits of a training on this worker, and what they have found.

    `names` are the workers, by rank, and `places` their processors. `clean` has for each the last step in which it
    was audited and right; at first the step with which the training began. `suspects` have those in which it was
    wrong, once. `say` takes lines for the user. Once some are `convicted` in a `step`, or nobody knows who is wrong,
    the steps from `since` on are suspect.
    """

    plan: Audits
    source: Source
    world: World
    names: Sequence[str]
    places: Sequence[str]
    clean: list[int]
    suspects: dict[int, list[int]]
    say: Callable[[str], None]
    convicted: tuple[int, ...] = field(default=(), init=False)
    step: int = field(default=-1, init=False)
    since: int | None = field(default=None, init=False)

    def of_step(self, step: int, trainer: HasState) -> "StepAudit | None":
        """Return the audit of a step that is about to begin, None if it has none."""
        audit = self.plan.of_step(step)
        return None if audit is None else StepAudit(self, audit, trainer)

    @contextmanager
    def read(self, step: int, rank: int) -> Iterator[LoadedStep]:
        """Read a worker's part of a step once more, with what it runs again."""
        with closing(load_steps(self.source, self.plan.work(rank, step), self.world.device)) as steps:
            yield next(steps)

    def settle(self, step: int, what: str, verdict: AuditVerdict, is_of_state: bool = False) -> None:
        """Note who was at fault in a step. Returns if the step, without the update, can be done again.

        Else raises ComputesWrong on a convicted worker, Differs if nobody is known to be at fault, and WorkerError on
        all others. All raise after the same step.
        """
        again = [rank for rank in verdict.transient if any(step - at < WITHIN for at in self.suspects.get(rank, ()))]
        for rank in verdict.transient:
            self.suspects.setdefault(rank, []).append(step)
        self.convicted = tuple(sorted({*verdict.convicted, *again}))
        at_fault = self.convicted or verdict.unclear or verdict.transient
        told, rank = f"audit: step {step}: {listed(self.names[one] for one in at_fault)}", self.world.rank
        if not self.convicted and not verdict.unclear and not is_of_state:
            self.say(f"{told} had other bits of {what}, once: the step is done again")
            return
        self.step, self.since = step, min(self.clean[one] for one in at_fault)
        if verdict.unclear:
            raise Differs(f"{told} have different bits of {what}, and it is not known which of them computes wrong")
        then = "its processor computes wrong" if self.convicted else "all go on from an earlier checkpoint"
        told += f" has other bits of {what} than the other workers: {then}"
        if rank not in at_fault:
            raise WorkerError(told)
        if not self.convicted:
            raise ModelError(told)
        raise ComputesWrong(told)


@dataclass(eq=False)
class StepAudit:
    """The audit of one step on this worker: `begin`, `before` and `after` each forward, and `compare` in the end.

    `verdict` is false unless workers differ.
    """

    auditor: Auditor
    audit: Audit
    trainer: HasState
    verdict: AuditVerdict = field(default_factory=AuditVerdict, init=False)
    _batch: Begun = field(default_factory=list, init=False)
    _leaf: Begun = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._runs = self.auditor.world.rank == self.audit.runner
        # Of all that the training depends on, as it stands before the step.
        self._state = _digests(f"state, {self.audit.step}", self.trainer.state_dict())

    def begin(self, a_pass: AuditedPass, reduction: Reduction, divisor: int) -> None:
        """Begin a pass, whose losses are divided by `divisor`."""
        assert reduction.sums is not None, "an audited job is bitwise"
        self._pass, self._reduction, self._sums, self._divisor = a_pass, reduction, reduction.sums, divisor
        self._written = [*a_pass.state.shared_by_all()]  # all learn of more in the step's end
        self._sums.audit(self.audit.leaf if self._runs else None)

    def _is_of_leaf(self, shard: Shard | None) -> bool:
        return self._runs and shard is not None and shard.shard in range(*self.audit.leaf)

    def before(self, shard: Shard | None, batch: Any) -> None:
        """Take the digest of a batch of the leaf, before its forward, which may write it."""
        if shard is not None and self._is_of_leaf(shard):
            self._batch += _digests(f"batch of {shard.shard}", batch)

    def after(self, shard: Shard | None) -> None:
        """Take the digest of the losses of a shard of the leaf, and of what its forward has written."""
        if shard is not None and self._is_of_leaf(shard):
            self._leaf += self._seen(shard)

    def _seen(self, shard: Shard) -> Begun:
        row, now = self._pass.loss.result.row, self._pass.state.shared_by_all()
        written = {name: now[name] for name in self._written if name in now}
        return _digests(f"row and writes of {shard.shard}", [list(row or ()), [*written], [*written.values()]])

    def compare(self, again: Iterable[LoadedShard]) -> None:
        """Run the leaf again if it is this worker's turn, and compare; every rank calls this.

        Raises DataError if workers have other samples, and what `settle` raises if they have other weights.
        """
        auditor, audit = self.auditor, self.audit
        first = second = Ran()
        if self._runs:
            first = Ran(_word(self._batch), _word(self._leaf + self._sums.digests))
        self._sums.audit(None)
        if auditor.world.rank == audit.auditor:
            second = self._run(again)
        alone = [first, second] if audit.runner == audit.auditor else []
        own, state = (second if audit.auditor == auditor.world.rank else first), _word(self._state)
        if not alone and self._agree(state, _hashed(repr(own)) if any(own) else 0):
            self._note_clean()
            return
        if alone and first == second:
            self._note_clean()
            return
        told: list[tuple[int, Ran]] = gathered((state, own))
        ran = {0: alone} if alone else {rank: [told[rank][1]] for rank in (audit.runner, audit.auditor)}
        self._check_batches(ran)
        self.verdict = odd_ones([state for state, _ in told])
        if self.verdict:
            auditor.settle(audit.step, "the weights or the optimizer's state", self.verdict, is_of_state=True)
        asked = {audit.runner, audit.auditor, audit.third}
        if auditor.world.rank in asked:
            with auditor.read(audit.step, audit.runner) as read:
                own = self._run(shard for shard in read.loaded if shard.shard.shard in range(*audit.leaf))
        for rank, one in enumerate(gathered(own)):
            if rank in asked:
                ran.setdefault(rank, []).append(one)
        self._check_batches(ran)
        self.verdict = judged({rank: [one.leaf for one in values] for rank, values in ran.items()})

    def _note_clean(self) -> None:
        self.auditor.clean[self.audit.runner] = self.auditor.clean[self.audit.auditor] = self.audit.step

    def _run(self, shards: Iterable[LoadedShard]) -> Ran:
        """Run the leaf once more, in gradients of its own; return what the worker has of it."""
        a_pass, clock, sums = self._pass, self._pass.clock, self._sums
        batch, leaf, gradients = Begun(), Begun(), tree_sum.Gradients([None] * len(sums.parameters))
        for loaded in shards:
            batch += _digests(f"batch of {loaded.shard.shard}", loaded.batch)
            clock.enter(Part.FORWARD)
            with a_pass.again(loaded, in_step=True) as loss:
                leaf += self._seen(loaded.shard)
                clock.enter(Part.BACKWARD)
                for parameter, gradient in zip(sums.parameters, gradients, strict=True):
                    parameter.grad = gradient  # autograd adds that of a second shard, as in the step
                with self._reduction.adding_nothing() if a_pass.loss.result.is_nothing else NOTHING:
                    loss.backward(a_pass.gradients.of_loss(loss, self._divisor))  # type: ignore[no-untyped-call]
                gradients = [parameter.grad for parameter in sums.parameters]
        sums.audit(None)
        sums.digest(gradients)
        return Ran(_word(batch), _word(leaf + sums.digests))

    def _agree(self, *own: int) -> bool:
        """Return whether all workers have the same state, and the two who run the leaf the same of it."""
        device = self.auditor.world.device
        sent = torch.tensor(own, device=device)
        theirs = torch.empty(self.auditor.world.world_size, len(own), dtype=sent.dtype, device=device)
        with waiting("the worker that runs a leaf again"):
            all_gather(theirs.view(-1), sent, group=everyone())
        words = theirs.tolist()
        return len({state for state, _ in words}) == 1 and words[self.audit.runner][1] == words[self.audit.auditor][1]

    def _check_batches(self, ran: Mapping[int, Sequence[Ran]]) -> None:
        """Raise DataError, on all workers, if those who ran the leaf have got other samples for it."""
        if len({one.batch for values in ran.values() for one in values}) == 1:
            return
        audit, rows = self.audit, list[tuple[int, int]]()
        with self.auditor.read(audit.step, audit.runner) as read:
            for shard, indices, batch in read.loaded:
                if shard.shard in range(*audit.leaf):
                    dim = self._pass.placement.job.batch_dim
                    parts = [cut(batch, row, row + 1, dim) for row in range(shard.rows)]
                    rows += [(int(at), _word(_digests("row", part))) for at, part in zip(indices, parts, strict=True)]
        theirs: list[list[tuple[int, int]]] = gathered(rows)
        differ = [one[0][0] for one in zip(*theirs, strict=True) if len(set(one)) > 1]
        names = listed(self.auditor.names[rank] for rank in ran)
        raise DataError(
            f"audit: step {audit.step}: {names} have read other values for "
            f"{f'sample {differ[0]}' if differ else f'the samples {listed(str(at) for at, _ in rows)}'}: a dataset "
            "must give the same for an index in each process, and draw from the generators of torch, numpy or random"
        )

    def settle(self) -> None:
        """Note who has computed wrong; raises what the auditor's `settle` raises."""
        first, *more = [str(shard.shard) for shard in self.auditor.plan.of_leaf(self.audit)]
        what = f"shards {listed([first, *more])}" if more else f"shard {first}"
        self.auditor.settle(self.audit.step, what, self.verdict)


def _digests(what: str, tree: Any) -> Begun:
    """Begin to compute digests of the tensors in a tree; its plain values stand among their names."""
    leaves = flatten(tree)[0]
    plain = [repr(leaf) for leaf in leaves if isinstance(leaf, PLAIN)]
    tensors = {
        f"{what}: {at}, {leaf.dtype} {tuple(leaf.shape)}": leaf.detach()
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_quantized
    }
    return [*begun_digests(tensors), ([f"{what}: {plain}"], torch.zeros(1, dtype=torch.int64))]


def _word(begun: Begun) -> int:
    """Return one number for digests, whatever the order in which they were begun; it waits for them."""
    found = [pair for names, of_each in begun for pair in zip(names, of_each.tolist(), strict=True)]
    return _hashed(repr(sorted(found)))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
