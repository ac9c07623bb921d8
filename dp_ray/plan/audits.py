"""Audits of a training: which step has one, who runs what again in it, and who is at fault if they differ.

One of so many steps is audited. In it one worker, the `runner`, runs a leaf of the tree of sums as in each step, and
another one, the `auditor`, runs the same leaf again: both must have the same bits. All of this is arithmetic, which
each worker does alike.

Audits are dealt: of W audits in a row each worker is the runner of one, and of W (W - 1) each pair has one.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import NamedTuple

from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard, Split, Work
from dp_ray.plan.tree import Node, leaf_pairs, leaves

WITHIN = 1000  # steps: a worker that differs a second time in so many is convicted


class Audit(NamedTuple):
    """The audit of a step: a leaf of its shards, who runs it, who runs it again, and who does if these two differ.

    One worker alone runs the leaf again itself; fewer than three have no `third`.
    """

    step: int
    leaf: Node
    runner: int
    auditor: int
    third: int | None


@dataclass(frozen=True)
class Audits:
    """The audits of a training: of a `share` of its steps, on so many workers."""

    split: Split
    share: Fraction
    seed: int
    world_size: int

    @cached_property
    def _pairs(self) -> set[Node]:
        return leaf_pairs((0, self.split.shards))

    def of_step(self, step: int) -> Audit | None:
        """Return the audit of a step; None if it has none, or if its runner has no rows.

        >>> audits = Audits(Split(rows=800, batch_size=8, shards=4), Fraction(1, 10), seed=0, world_size=2)
        >>> [audit.step // 10 for audit in map(audits.of_step, range(40)) if audit]
        [0, 1, 2, 3]
        """
        number, size = math.floor(step * self.share), self.world_size
        first, end = math.ceil(number / self.share), math.ceil((number + 1) / self.share)
        if step != first + derive_seed(self.seed, "audit", number) % (end - first):
            return None
        runner = number % size
        auditor = (runner + 1 + number // size % max(1, size - 1)) % size
        third = next((rank for rank in range(size) if rank not in (runner, auditor)), None)
        own = leaves((shard.shard for shard in self.split.worker(size, runner, step)), self._pairs)
        if not own:
            return None
        return Audit(step, own[derive_seed(self.seed, "audit", number, step) % len(own)], runner, auditor, third)

    def work(self, rank: int, start: int) -> Work:
        """Return the work of a worker from a step on, with what it runs again."""
        return Work(self.split, self.world_size, rank, start=start, again=partial(self.shards, rank=rank))

    def shards(self, step: int, rank: int) -> list[Shard]:
        """Return the shards that a worker runs again in a step, as its auditor."""
        audit = self.of_step(step)
        return [] if audit is None or audit.auditor != rank else self.of_leaf(audit)

    def of_leaf(self, audit: Audit) -> list[Shard]:
        """Return the shards of an audit's leaf."""
        ran = self.split.worker(self.world_size, audit.runner, audit.step)
        return [shard for shard in ran if shard.shard in range(*audit.leaf)]


class AuditVerdict(NamedTuple):
    """Ranks of workers that compute wrong: for certain, or once and not again; or of which some do, nobody knows who.

    It is false if all workers agree.
    """

    convicted: tuple[int, ...] = ()
    transient: tuple[int, ...] = ()
    unclear: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return any(self)


def judged(ran: Mapping[int, Sequence[Hashable]]) -> AuditVerdict:
    """Return who is at fault, by what each worker's runs of one leaf gave, in order.

    What most workers have given, and two at least, is right. Who never gave it in two runs is convicted. Of two
    workers that do not agree, one that does not repeat itself is at fault.

    >>> judged({0: "ab", 1: "bb", 2: "b"}).transient, judged({0: "aa", 1: "bb", 2: "b"}).convicted
    ((0,), (0,))
    >>> judged({0: "aa", 1: "bb"}).unclear
    (0, 1)
    """
    if len({value for values in ran.values() for value in values}) == 1:
        return AuditVerdict()
    everyone = tuple(ran)
    if len(ran) == 1:
        repeats = Counter(*ran.values()).most_common(1)[0][1] > 1
        return AuditVerdict(transient=everyone) if repeats else AuditVerdict(convicted=everyone)
    givers = Counter(value for values in ran.values() for value in set(values))
    (right, most), *others = givers.most_common()
    if most < 2 or (others and others[0][1] == most):  # nobody knows what is right
        unsteady = tuple(rank for rank, values in ran.items() if len(set(values)) > 1)
        return AuditVerdict(unsteady) if len(ran) == 2 and len(unsteady) == 1 else AuditVerdict(unclear=everyone)
    differ = {rank: values for rank, values in ran.items() if set(values) != {right}}
    convicted = tuple(rank for rank, values in differ.items() if len(values) > 1 and right not in values)
    return AuditVerdict(convicted, tuple(rank for rank in differ if rank not in convicted))


def odd_ones(words: Sequence[Hashable]) -> AuditVerdict:
    """Return who does not have the state that more than half of the workers have; without such a state, all.

    >>> odd_ones("aab").transient, bool(odd_ones("aa")), odd_ones("ab").unclear
    ((2,), False, (0, 1))
    """
    right, most = Counter(words).most_common(1)[0]
    if 2 * most <= len(words) and len(words) > 1:
        return AuditVerdict(unclear=tuple(range(len(words))))
    return AuditVerdict(transient=tuple(rank for rank, word in enumerate(words) if word != right))
