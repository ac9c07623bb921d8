"""A module's calls on the workers of this process: who runs which shard, and what happens if one of them is lost.

A process has one set of workers, `Workers`, for all of its parallel modules: the first module starts it, and the
last one that is closed ends it. `Exchange` is one module's use of it. A call is kept until its backward, so that any
of its shards can be run again: the same inputs, seed, buffers and weights give the same graph.
"""

import atexit
import gc
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dp_ray.cluster.pool import Lost, Member, Pool
from dp_ray.cluster.resources import text_of
from dp_ray.engine.world import World, is_gpu
from dp_ray.errors import ClusterError, JobError, ModelError, WorkerError
from dp_ray.job.keys import WorkerKeys
from dp_ray.parallel.gradients import gradients_of
from dp_ray.parallel.weights import Version
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import worker_shards
from dp_ray.plan.tree import transfers
from dp_ray.tasks.wire import (
    Backward,
    Forward,
    Modes,
    Packed,
    PeerLost,
    Raised,
    ShardInput,
    ShardOutput,
    Sync,
    packed,
)
from dp_ray.text import counted

TARGET = "dp_ray.parallel.replica:Replicas"
GROUPS = 8  # that may fail to form, one after the other
TRIES = 4  # of one call, each after a worker was lost


class Workers:
    """The one set of workers of this process, and who uses it."""

    current: ClassVar["Workers | None"] = None
    lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, keys: WorkerKeys, address: str | None, quiet: bool) -> None:
        self.pool = Pool(keys, TARGET, address, quiet)
        self.users: set[int] = set()  # numbers of the modules that are open
        self.closed: deque[int] = deque()  # of those that the workers may forget
        self._numbers = 0
        atexit.register(self.close)

    @classmethod
    def taken(cls, keys: WorkerKeys, address: str | None, quiet: bool) -> "Workers":
        """Return the process's workers, started if there are none.

        Those that no module uses any more end if they are not what `keys` ask for. Raises JobError if those that run
        are fewer, or take less each.
        """
        with cls.lock:
            if cls.current is not None:
                try:
                    cls.current.check_covers(keys)
                    return cls.current
                except JobError:
                    gc.collect()  # a module in a circle of references is gone only then
                    if cls.current.users:
                        raise
                    cls.current.close()
            cls.current = cls(keys, address, quiet)
            return cls.current

    def check_covers(self, keys: WorkerKeys) -> None:
        """Raise JobError if these workers are not what `keys` ask for."""
        has = self.pool.keys.max_workers
        if keys.max_workers > has:
            raise JobError(
                f"workers: this module asks for {keys.max_workers}, and this process's parallel modules share "
                f"{counted(has, 'worker')}: close them first, or give the first of them the most workers"
            )
        own = {"cpus_per_worker", "gpus_per_worker", "resources_per_worker", "accelerator_type", "placement"}
        own |= {"devices", "env"}
        for key in sorted(own & keys.model_fields_set):
            mine, theirs = getattr(self.pool.keys, key), getattr(keys, key)
            if mine != theirs:
                shown = "another value" if key == "env" else f"{theirs!r}, not {mine!r}"
                raise JobError(
                    f"{key}: this module asks for {shown}, and this process's parallel modules share their workers, "
                    f"of {text_of(self.pool.each)} each: close them first"
                )

    def enter(self) -> int:
        """Return the number of a module that begins to use the workers."""
        self._numbers += 1
        self.users.add(self._numbers)
        return self._numbers

    def leave(self, number: int) -> None:
        """Note that a module uses them no longer; the last one ends them."""
        with self.lock:
            self.users.discard(number)
            self.closed.append(number)
            if not self.users:
                self.close()

    def close(self) -> None:
        """End the workers, and the connection to Ray if it is theirs."""
        with self.lock:
            atexit.unregister(self.close)
            if Workers.current is self:
                Workers.current = None
                self.users.clear()
                self.pool.close()

    def members(self) -> list[Member]:
        """Return the workers that are there, in the order of their ranks in one process group.

        Raises ClusterError if they cannot form one.
        """
        why = "workers are lost again and again"
        for _ in range(GROUPS):
            if not self.pool.renew():
                return self.pool.members
            members = list(self.pool.members)
            nodes = list(dict.fromkeys(one.place.node_id for one in members))
            if len(members) == 1:
                port = 0
            else:
                opened = self.pool.call({members[0]: ("open_store", members[0].place.node)})
                port = opened[members[0]]
            joined: Mapping[Member, Any] = {}
            if not isinstance(port, Lost):
                backend = self._backend(members)
                calls: dict[Member, tuple[Any, ...]] = {}
                for rank, one in enumerate(members):
                    before = [other.place.node_id for other in members[:rank]]
                    world = World(
                        rank=rank,
                        world_size=len(members),
                        local_rank=before.count(one.place.node_id),
                        node_rank=nodes.index(one.place.node_id),
                        node=members[0].place.node,
                        device=torch.device(one.place.device),
                    )
                    calls[one] = ("join", world, backend, port)
                joined = self.pool.call(calls)
            if failed := [one for one in joined.values() if isinstance(one, PeerLost)]:
                why = failed[0].line
            if not joined or any(answer is not None for answer in joined.values()):
                self.pool.regroup()
        raise ClusterError(f"the workers cannot form a process group: {why}")

    def _backend(self, members: Sequence[Member]) -> str:
        shares = 0 < self.pool.each.get("GPU", 0) < 1
        return "cpu:gloo,cuda:nccl" if all("cuda" in one.place.device for one in members) and not shares else "gloo"


@dataclass(eq=False)
class Call:
    """A call of a module, as it is kept until its backward."""

    number: int
    version: Version
    modes: Modes
    spec: bytes
    shards: int
    inputs: Sequence[Sequence[torch.Tensor | Any]]  # of each shard that runs: its leaves, on the caller's device
    requires_grad: frozenset[int]  # numbers of leaves
    seed: int
    owners: dict[int, Member] = field(default_factory=dict)  # of the shards' graphs
    versions: list[int] = field(default_factory=list)  # of the leaves, which tell whether they were written to

    @property
    def filled(self) -> range:
        """The shards that run."""
        return range(len(self.inputs))


class Exchange:
    """One module's calls on the workers of this process."""

    def __init__(self, workers: Workers, bitwise: bool, max_waiting: int) -> None:
        self.workers = workers
        self.bitwise = bitwise
        self.threads = max(1, int(workers.pool.keys.cpus_per_worker)) if bitwise else None  # torch's, on each worker
        if bitwise:
            workers.pool.keep_one_kind()
        self.number = workers.enter()
        self.max_waiting = max_waiting
        self.waiting: dict[int, int] = {}  # calls that wait for their backward, with the bytes that are kept here
        self._dropped: deque[int] = deque()  # calls whose graphs nobody waits for any more
        self._is_closed = False

    def check_open(self) -> None:
        """Raise ClusterError if the workers have ended."""
        if self._is_closed or Workers.current is not self.workers:
            raise ClusterError(
                "the module's workers have ended: it was closed; make another dp_ray.DataParallel of it"
            )

    def close(self) -> None:
        """Leave the workers; the last module that does ends them."""
        if not self._is_closed:
            self._is_closed = True
            if Workers.current is self.workers:
                self.workers.leave(self.number)

    def forget(self) -> None:
        """Have the workers forget the module, which nobody holds any more; this runs in the garbage collector."""
        if not self._is_closed:
            self._is_closed = True
            self.workers.users.discard(self.number)
            self.workers.closed.append(self.number)

    def keep(self, call: Call) -> "Ticket":
        """Have a call wait for its backward, until the ticket is gone or done with."""
        tensors = [one for shard in call.inputs for one in tensors_in(shard)]
        call.versions = [one._version for one in tensors]
        self.waiting[call.number] = sum(one.nbytes for one in tensors)
        return Ticket(self, call)

    def drop(self, number: int) -> None:
        """Have the workers drop a call's graphs; the message goes with the next call."""
        if self.waiting.pop(number, None) is not None:
            self._dropped.append(number)

    def check_waiting(self) -> None:
        """Raise ModelError, naming calls and bytes, if too many calls wait for their backward."""
        if len(self.waiting) < self.max_waiting:
            return
        gc.collect()  # outputs in a circle of references are gone only then
        if len(self.waiting) < self.max_waiting:
            return
        with self.workers.lock:
            members = self.workers.members()
            held = self.workers.pool.call(dict.fromkeys(members, ("held_bytes", self.number)))
        most = max((size, rank) for rank, size in enumerate(held.values()) if isinstance(size, int))
        raise ModelError(
            f"{len(self.waiting)} calls of this module wait for their backward, as many as max_waiting allows; they "
            f"hold {sum(self.waiting.values()):,} bytes of inputs here, and graphs of up to {most[0]:,} bytes on a "
            f"worker (rank {most[1]}): call backward, let their outputs go, or call the module under torch.no_grad()"
        )

    def forward(self, call: Call) -> tuple[list[ShardOutput], list[Member]]:
        """Run a call's shards; return their outputs in order, and the workers in the order of their ranks.

        Raises ModelError if the model raised, naming the shard, and WorkerError if workers are lost again and again.
        """
        with self.workers.lock:
            self.check_open()
            outputs: dict[int, ShardOutput] = {}
            for _ in range(TRIES):
                members = self.workers.members()
                todo = [shard for shard in call.filled if shard not in outputs]
                for member, answer in self._run(call, todo, members).items():
                    for one in answer if isinstance(answer, list) else []:
                        outputs[one.shard] = one
                        call.owners[one.shard] = member
                if len(outputs) == len(call.inputs):
                    return [outputs[shard] for shard in call.filled], members
            raise WorkerError(f"call {call.number}: workers were lost in each of {TRIES} tries")

    def _run(self, call: Call, todo: Sequence[int], members: list[Member]) -> dict[Member, Any]:
        """Have the workers run the shards `todo`, with what they lack of the module; note what they have then."""
        pool = self.workers.pool
        messages: dict[Member, tuple[Any, ...]] = {}
        syncs = self._syncs(call.version, members)
        for rank, member in enumerate(members):
            own = [shard for shard in worker_shards(call.shards, len(members), rank) if shard in todo]
            sync = syncs[member]
            if not (own or sync.structure or sync.changed or sync.dropped or sync.closed):
                continue
            shards = tuple(
                ShardInput(
                    shard,
                    derive_seed(call.seed, "parallel", call.number, shard),
                    tuple(packed(leaf) for leaf in call.inputs[shard]),
                )
                for shard in own
            )
            spec = call.spec if own else None
            asked = Forward(call.number, sync, call.modes, spec, call.requires_grad, shards)
            messages[member] = ("forward", asked)
        answers = pool.call(messages)
        raised = []
        for member, answer in answers.items():
            if isinstance(answer, PeerLost | Lost) or (isinstance(answer, Raised) and answer.shard is None):
                member.loaded.pop(self.number, None)
                pool.regroup()
            else:
                member.loaded[self.number] = call.version
            if isinstance(answer, Raised):
                raised.append((answer, member))
        if raised:
            self._raise(call, members, min(raised, key=lambda one: one[0].shard or 0))
        return answers

    def _syncs(self, version: Version, members: Sequence[Member]) -> dict[Member, Sync]:
        """Return what each worker lacks of this version of the module.

        All get the same elements, since they come to rank 0 alone, and from there to all.
        """
        had = [member.loaded.get(self.number) for member in members]
        base = had[0] if all(one is had[0] for one in had) else None
        changed = version.changed_since(base)
        dropped, closed = taken(self._dropped), taken(self.workers.closed)
        if closed:
            for member in members:
                for number in closed:
                    member.loaded.pop(number, None)
        syncs = {}
        for rank, (member, has) in enumerate(zip(members, had, strict=True)):
            lacks = has is None or has.structure is not version.structure
            data = version.flat(changed) if changed and rank == 0 else None
            structure = version.structure if lacks else None
            syncs[member] = Sync(self.number, structure, changed, data, dropped, closed)
        return syncs

    def _raise(self, call: Call, members: Sequence[Member], raised: tuple[Raised, Member]) -> None:
        """Raise the error of user code on a worker as a ModelError that names the shard."""
        answer, member = raised
        where = f"rank {members.index(member) if member in members else '?'} on {member.place.node}"
        if answer.shard is not None:
            where = f"call {call.number}, shard {answer.shard} of {len(call.inputs)} ({where})"
        got = f"; it got {answer.got}" if answer.got else ""
        error = ModelError(f"{where}: {answer.what} raised {answer.text}{got}")
        error.add_note(answer.frames)
        cause = None
        if answer.exception is not None:
            cause = pickle.loads(answer.exception)
        raise error from cause

    def backward(
        self, call: Call, gradients: Mapping[int, Sequence[torch.Tensor | None]], keep_graph: bool
    ) -> tuple[dict[int, Mapping[int, Packed | None]], list[torch.Tensor | None]]:
        """Run a call's backward; return the shards' gradients of input leaves, and the sums of the parameters'.

        `gradients` are those of the outputs' leaves, by shard. Raises what `forward` raises.
        """
        with self.workers.lock:
            self.check_open()
            for _ in range(TRIES):
                members = self.workers.members()
                if any(call.owners.get(shard) not in members for shard in call.filled):
                    self._run_again(call)
                    members = self.workers.members()
                answers = self._backward(call, gradients, keep_graph, members)
                lost = [one for one in answers.values() if isinstance(one, PeerLost | Lost)]
                if not lost:
                    root = next(one for one in answers.values() if one.sum is not None)
                    inputs = {shard: found for one in answers.values() for shard, found in one.inputs.items()}
                    return inputs, gradients_of(root.sum, self._trained(call))
                self.workers.pool.regroup()
                call.owners.clear()  # some have dropped their graphs
            raise WorkerError(f"the backward of call {call.number}: workers were lost in each of {TRIES} tries")

    def _run_again(self, call: Call) -> None:
        """Run a call's forward again, for graphs that were lost."""
        versions = [one._version for shard in call.inputs for one in tensors_in(shard)]
        if versions != call.versions:
            raise WorkerError(
                f"the backward of call {call.number}: a worker was lost, and its shard cannot be run again, since "
                "the call's inputs were written to since"
            )
        call.owners.clear()
        self._dropped.append(call.number)  # what is left of it
        self.forward(call)

    def _backward(
        self,
        call: Call,
        gradients: Mapping[int, Sequence[torch.Tensor | None]],
        keep_graph: bool,
        members: list[Member],
    ) -> dict[Member, Any]:
        ranks = {member: rank for rank, member in enumerate(members)}
        owners = {shard: ranks[call.owners[shard]] for shard in call.filled}
        if self.bitwise:
            nodes, top = {shard: (shard, shard + 1) for shard in owners}, (0, call.shards)
            leaves = owners
        else:  # a worker adds its own shards as they come
            used = sorted(set(owners.values()))
            nodes = {shard: (used.index(rank), used.index(rank) + 1) for shard, rank in owners.items()}
            leaves, top = dict(enumerate(used)), (0, len(used))
        plan = tuple(transfers(leaves, top))
        messages: dict[Member, tuple[Any, ...]] = {}
        for member, rank in ranks.items():
            own = {
                shard: tuple(None if one is None else packed(one) for one in gradients[shard])
                for shard, owner in owners.items()
                if owner == rank
            }
            if own:
                root = leaves[min(leaves)]
                asked = Backward(self.number, call.number, keep_graph, own, nodes, plan, top, root, self.threads)
                messages[member] = ("backward", asked)
        answers = self.workers.pool.call(messages)
        raised = [(one, member) for member, one in answers.items() if isinstance(one, Raised)]
        if raised:
            if plan:
                self.workers.pool.regroup()
            self._raise(call, members, raised[0])
        return answers

    def _trained(self, call: Call) -> list[torch.Tensor]:
        """Return tensors like those of the module that require a gradient: their sizes, dtypes and device."""
        pairs = zip(call.version.tensors, call.modes.requires_grad, strict=True)
        return [one for one, wants in pairs if wants]


class Ticket:
    """Holds a call that waits for its backward; once nobody holds the ticket, its graphs are dropped."""

    def __init__(self, exchange: Exchange, call: Call) -> None:
        self.call: Call | None = call
        self.exchange = exchange
        self._end = weakref.finalize(self, exchange.drop, call.number)
        self._end.atexit = False

    def done(self) -> None:
        """The call's backward has run, and does not run again."""
        self._end.detach()
        if self.call is not None:
            self.exchange.waiting.pop(self.call.number, None)
        self.call = None


def tensors_in(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among leaves."""
    return [one for one in leaves if isinstance(one, torch.Tensor)]


def taken(numbers: deque[int]) -> tuple[int, ...]:
    """Take the numbers out of a queue that the garbage collector may fill meanwhile."""
    return tuple(numbers.popleft() for _ in range(len(numbers)))


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host's memory on the caller's device, by way of pinned memory for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor
