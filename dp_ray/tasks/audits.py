"""What the audits of a training have found, from one attempt to the next: begin at `begun_auditor`.

Where a worker is convicted, `rewinding` removes the checkpoints that may hold what it computed: the next attempt goes
on from an earlier one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from dp_ray.engine.audit import Auditor, Differs
from dp_ray.engine.loads.loading import Source
from dp_ray.engine.world import World, gathered
from dp_ray.plan.audits import Audits
from dp_ray.plan.split import Split
from dp_ray.records import Record
from dp_ray.rundir.checkpoint import checkpoint_name
from dp_ray.rundir.files import AUDITS, CHECKPOINTS, steps_of
from dp_ray.rundir.ledger import fenced
from dp_ray.tasks.setup import Context
from dp_ray.text import listed


@dataclass(frozen=True)
class Noted:
    """What the audits of a run know of processors, by their places (`processor_of`).

    `clean` has the last step in which each was audited and right, `suspects` those in which it was wrong, once. Those
    that are `convicted`, with the step, take no part any more.
    """

    clean: dict[str, int] = field(default_factory=dict)
    suspects: dict[str, list[int]] = field(default_factory=dict)
    convicted: dict[str, int] = field(default_factory=dict)


AUDITS_JSON = Record[Noted](Noted, AUDITS, missing=Noted(), indent=2)


def processor_of(world: World) -> str:
    """Return what tells a worker's processor from others: its node, and its GPU or its place there."""
    if world.device.type == "cuda":
        return f"{world.node}, GPU-{torch.cuda.get_device_properties(world.device).uuid}"
    return f"{world.node}, {world.device.type} {world.local_rank}"


def begun_auditor(context: Context, source: Source, split: Split, at: int) -> Auditor | None:
    """Return the auditor of a training that begins at the step `at`, None if its job is not audited.

    Every rank calls this. Raises Differs if a worker's processor was convicted before: no other one was there.
    """
    audit, job, world = context.job.audit, context.job, context.world
    if audit is None:
        return None
    noted = AUDITS_JSON.read(context.run) if world.rank == 0 else Noted()
    told: list[tuple[str, str, Noted]] = gathered((str(world), processor_of(world), noted))
    (names, places, (noted, *_)) = zip(*told, strict=True)
    if bad := [rank for rank, place in enumerate(places) if place in noted.convicted]:
        who = listed(f"{names[rank]} ({places[rank]}), in step {noted.convicted[places[rank]]}" for rank in bad)
        raise Differs(
            f"audit: this run was found to compute wrong on {who}, and no other processor is free for it: leave that "
            f"node out; if it is mended, delete {context.run}/{AUDITS}"
        )
    plan = Audits(split, Fraction(str(audit.share)), job.seed, world.world_size)
    clean = [min(at, noted.clean.get(place, at)) for place in places]
    suspects = {rank: [*noted.suspects[place]] for rank, place in enumerate(places) if place in noted.suspects}
    return Auditor(plan, source, world, names, places, clean, suspects, context.say)


def noted_audits(auditor: Auditor) -> Noted:
    """Return what an auditor knows now."""
    places = auditor.places
    return Noted(
        dict(zip(places, auditor.clean, strict=True)),
        {places[rank]: [*steps] for rank, steps in auditor.suspects.items()},
        dict.fromkeys((places[rank] for rank in auditor.convicted), auditor.step),
    )


def note_audits(context: Context, found: Noted) -> None:
    """Keep what an attempt has found, with what is known of other places; rank 0 calls this."""
    before = AUDITS_JSON.read(context.run)
    known = Noted(
        {**before.clean, **found.clean},
        {**before.suspects, **found.suspects},
        {**before.convicted, **found.convicted},
    )
    AUDITS_JSON.write(fenced(context.run, context.attempt), known)


@contextmanager
def rewinding(context: Context, auditor: Auditor | None) -> Iterator[None]:
    """Remove the checkpoints that may be wrong, where the block ends since a worker computes wrong.

    All workers end the block after the same step, and wait until that is done.
    """
    try:
        yield
    except Exception:
        if auditor is None or auditor.since is None:
            raise
        audit, since = context.job.audit, auditor.since
        if context.world.rank == 0:
            note_audits(context, noted_audits(auditor))
            checkpoints = fenced(context.run, context.attempt).child(CHECKPOINTS)
            steps = f"the steps from {since} to {auditor.step - 1}" if auditor.step > since + 1 else f"step {since}"
            if audit is not None and audit.rewind:
                context.say(f"audit: {steps} may be wrong, and run again; checkpoints of them are removed")
                for step in steps_of(checkpoints):
                    if step > since:
                        checkpoints.delete(checkpoint_name(step))
            else:
                context.say(f"audit: {steps} may be wrong, and stay so (audit.rewind: false)")
        gathered(None)
        raise
