"""A module's calls on the workers of this process: who runs which shard, and what happens if one of them is lost.

All parallel modules of a process share its workers, `SharedWorkers`: the first module has them serve, and the last
one that is closed ends that. `Exchange` is one module's use of it. A call is kept until its backward, so that any
of its shards can be run again: the same inputs, seed, buffers and weights give the same graph.
"""

import atexit
import gc
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch

from dp_ray.cluster.kinds import Workers
from dp_ray.cluster.resources import resources_text
from dp_ray.engine.world import is_gpu
from dp_ray.errors import ClusterError, JobError, ModelError, WorkerError
from dp_ray.job.keys import WorkerKeys
from dp_ray.parallel.weights import Version
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import worker_shards
from dp_ray.process.modes import Modes
from dp_ray.serving import wire
from dp_ray.serving.shipped import TensorForm
from dp_ray.text import counted

TRIES = 4  # of one call, each after a worker was lost
SHARED = WorkerKeys.model_fields.keys() - {"workers", "timeouts"}  # what all modules of shared workers have alike


class SharedWorkers:
    """Workers that serve parallel modules, and which modules use them, from the first one to the last.

    A process has them for the modules that name no session, and for those that it serves itself; so has each session.
    Where a session's serve first, modules that name none use these too.
    """

    by_owner: ClassVar[dict[Hashable, "SharedWorkers"]] = {}  # those that serve, by owner
    lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, kind: Workers, keys: WorkerKeys) -> None:
        self.kind = kind
        self.serving = kind.serve(keys)
        self.users: set[int] = set()  # numbers of the modules that are open
        self.closed: deque[int] = deque()  # of those that the workers may forget
        self._num_modules = 0
        self._is_of_one_kind = False
        for owner in kind.owners:
            self.by_owner.setdefault(owner, self)
        atexit.register(self.close)

    @classmethod
    def taken(cls, kind: Workers, keys: WorkerKeys, say: Callable[[str], object] = print) -> "SharedWorkers":
        """Return the workers that serve for the owner of a kind; they start if there are none.

        If `keys` ask for more of them, all start anew, which it will `say`; modules that are open go on. Those that
        no module uses any more end if they are not what `keys` ask for. Raises JobError if those that run take
        otherwise.
        """
        with cls.lock:
            has = cls.by_owner.get(kind.owners[0])
            if has is not None:
                try:
                    has._cover(keys, say)
                    return has
                except JobError:
                    gc.collect()  # a module in a circle of references is gone only then
                    if has.users:
                        raise
                    has.close()
            made = cls(kind, keys)
            try:
                made._cover(keys, say)  # a session's are what it has
            except JobError:
                made.close()
                raise
            return made

    def _cover(self, keys: WorkerKeys, say: Callable[[str], object]) -> None:
        """Have as many workers as `keys` ask for; raises JobError if they take something else than these."""
        before = self.serving.keys
        for key in sorted(SHARED & keys.model_fields_set):
            mine, theirs = getattr(before, key), getattr(keys, key)
            if mine != theirs:
                shown = "another value" if key == "env" else f"{theirs!r}, not {mine!r}"
                raise JobError(
                    f"{key}: this module asks for {shown}, and this process's parallel modules share their workers, "
                    f"of {resources_text(self.serving.each)} each: close them first"
                )
        if keys.max_workers <= before.max_workers:
            return
        if self.kind.most is not None:
            raise JobError(
                f"workers: this module asks for {keys.max_workers}, and the session whose workers serve this "
                f"process's parallel modules has {self.kind.most}"
            )
        if self.users:
            more = counted(keys.max_workers, "worker")
            say(f"{more} start in place of {before.max_workers}, since a module asks for more")
        self.serving.close()
        try:
            self.serving = self.kind.serve(before.model_copy(update={"workers": keys.workers}))
        except BaseException:
            self.serving = self.kind.serve(before)  # for the modules that are open
            raise
        if self._is_of_one_kind:
            self.serving.keep_one_kind()

    def keep_one_kind(self) -> None:
        """Take no worker from now on that computes otherwise than those that are there."""
        self.serving.keep_one_kind()
        self._is_of_one_kind = True

    def enter(self) -> int:
        """Return the number of a module that begins to use the workers."""
        self._num_modules += 1
        self.users.add(self._num_modules)
        return self._num_modules

    def forget(self, module_number: int) -> None:
        """Note that nobody holds a module any more; this runs in the garbage collector."""
        self.users.discard(module_number)
        self.closed.append(module_number)

    def leave(self, module_number: int) -> None:
        """Note that a module uses them no longer; the last one ends them."""
        with self.lock:
            self.forget(module_number)
            if not self.users:
                self.close()

    @property
    def is_open(self) -> bool:
        """Whether these workers still serve."""
        return self in self.by_owner.values()

    def close(self) -> None:
        """Have the workers serve no longer, and end those that are there for this alone."""
        with self.lock:
            atexit.unregister(self.close)
            if self.is_open:
                for owner in [owner for owner, workers in self.by_owner.items() if workers is self]:
                    del self.by_owner[owner]
                self.users.clear()
                self.serving.close()


@dataclass(eq=False)
class Call:
    """A call of a module, as it is kept until its backward."""

    number: int
    version: Version
    modes: Modes
    spec: bytes
    shards: int
    inputs: Sequence[Sequence[torch.Tensor | Any]]  # of each shard that runs: its leaves, on the caller's device
    requires_grad: frozenset[int]  # indices of leaves
    seed: int
    owners: dict[int, wire.ServingWorker] = field(default_factory=dict)  # of the shards' graphs
    lost: str = ""  # why a worker was lost in the forward, last
    sparse: frozenset[int] = frozenset()  # which of the trained parameters have sparse gradients
    input_versions: list[int] = field(default_factory=list)  # torch's, of the inputs: whether they were written to

    @property
    def filled(self) -> range:
        """The shards that run."""
        return range(len(self.inputs))

    @property
    def forms(self) -> list[TensorForm]:
        """The forms of the module's tensors that require a gradient."""
        pairs = zip(self.version.structure.forms, self.modes.requires_grad, strict=True)
        return [form for form, wants in pairs if wants]


class Exchange:
    """One module's calls on the workers of this process, of which at most `max_workers` run its shards."""

    def __init__(self, workers: SharedWorkers, bitwise: bool, max_waiting: int, max_workers: int) -> None:
        self.workers = workers
        self.threads: int | None = None  # torch's, on each worker
        if bitwise:
            self.threads = max(1, int(workers.serving.keys.cpus_per_worker))
            workers.keep_one_kind()
        self.module_number = workers.enter()
        # Once nobody holds the module, and no call of it waits for its backward: tickets hold this too.
        self._end = weakref.finalize(self, workers.forget, self.module_number)
        self._end.atexit = False
        self.pickler = workers.serving.pickler
        self.max_waiting = max_waiting
        self.max_workers = max(1, max_workers)
        self.waiting: dict[int, int] = {}  # bytes kept here, by the number of a call that waits for its backward
        self._dropped: deque[int] = deque()  # numbers of calls whose graphs nobody waits for any more

    def check_open(self) -> None:
        """Raise ClusterError if the workers have ended."""
        if not self._end.alive:
            raise ClusterError("the module was closed: make another dp_ray.DataParallel of it")
        if not self.workers.is_open:
            raise ClusterError("the module's workers have ended: make another dp_ray.DataParallel of it")

    def close(self) -> None:
        """Leave the workers; the last module that does ends them."""
        if self._end.detach() is not None and self.workers.is_open:
            self.workers.leave(self.module_number)

    def drop(self, call_number: int) -> None:
        """Have the workers drop a call's graphs; the message goes with the next call."""
        del self.waiting[call_number]
        self._dropped.append(call_number)

    def check_waiting(self) -> None:
        """Raise ModelError, naming calls and bytes, if too many calls wait for their backward."""
        if len(self.waiting) < self.max_waiting:
            return
        gc.collect()  # outputs in a circle of references are gone only then
        if len(self.waiting) < self.max_waiting:
            return
        with self.workers.lock:
            members = self.workers.serving.ready()
            held = self.workers.serving.ask(dict.fromkeys(members, wire.HeldBytes(self.module_number)))
        most = max(((size, rank) for rank, size in enumerate(held.values()) if isinstance(size, int)), default=(0, 0))
        raise ModelError(
            f"{len(self.waiting)} calls of this module wait for their backward, as many as max_waiting allows; they "
            f"hold {sum(self.waiting.values()):,} bytes of inputs here, and graphs of up to {most[0]:,} bytes on a "
            f"worker (rank {most[1]}): call backward, let their outputs go, or call the module under torch.no_grad()"
        )

    def forward(self, call: Call) -> tuple[list[wire.ForwardResult], list[int]]:
        """Run a call's shards; return their outputs in order, and the ranks that ran them.

        Raises ModelError if the model raised, naming the shard, and WorkerError if workers are lost again and again.
        """
        with self.workers.lock:
            self.check_open()
            outputs: dict[int, wire.ForwardResult] = {}
            ranks: dict[int, int] = {}  # one that has run a shard may be lost while others run theirs again
            for _ in range(TRIES):
                members = self.workers.serving.ready()
                lacking = [shard for shard in call.filled if shard not in outputs]
                self._run(call, members, lacking, outputs)
                for shard in outputs.keys() - ranks.keys():
                    ranks[shard] = members.index(call.owners[shard])
                if len(outputs) == len(call.inputs):
                    return [outputs[shard] for shard in call.filled], [ranks[shard] for shard in call.filled]
            raise self._lost_again(call)

    @staticmethod
    def _lost_again(call: Call) -> WorkerError:
        return WorkerError(
            f"call {call.number}: workers were lost in each of {TRIES} tries, as where the forward ends its "
            f"process or takes all memory; the last one: {call.lost or 'a collective failed'}"
        )

    def _run(
        self,
        call: Call,
        members: list[wire.ServingWorker],
        lacking: Sequence[int],
        outputs: dict[int, wire.ForwardResult],
    ) -> None:
        """Have the workers run these shards, with what they lack of the module; note that, and the outputs."""
        messages: dict[wire.ServingWorker, wire.Forward] = {}
        syncs = self._syncs(call.version, members)
        running = min(self.max_workers, len(members))
        for rank, member in enumerate(members):
            own = worker_shards(call.shards, running, rank) if rank < running else range(0)
            shards = tuple(
                wire.ShardInput(
                    shard, self._seed(call, shard), tuple(wire.packed(leaf) for leaf in call.inputs[shard])
                )
                for shard in own
                if shard in lacking
            )
            sync = syncs[member]
            if shards or sync.whole or sync.changed or sync.dropped or sync.closed:
                spec = call.spec if shards else None
                messages[member] = wire.Forward(call.number, sync, call.modes, spec, call.requires_grad, shards)
        raised: list[tuple[wire.Raised, wire.ServingWorker]] = []
        for member, answer in self.workers.serving.ask(messages).items():
            if isinstance(answer, list) or (isinstance(answer, wire.Raised) and answer.has_module):
                member.loaded[self.module_number] = call.version
            elif not isinstance(answer, wire.PeerLost):  # it has taken nothing in
                member.loaded.pop(self.module_number, None)
            if isinstance(answer, wire.Lost):
                call.lost = answer.why
            if isinstance(answer, wire.Raised):
                raised.append((answer, member))
            for given in answer if isinstance(answer, list) else []:
                outputs[given.shard] = given
                call.owners[given.shard] = member
                call.sparse = given.sparse
        if raised:
            self._raise(call, members, raised, {shard: output.text for shard, output in outputs.items()})

    def _seed(self, call: Call, shard: int) -> int:
        """Return the number from which a shard's random numbers come: no two modules draw the same."""
        of_module = (self.module_number,) if self.module_number > 1 else ()
        return derive_seed(call.seed, "parallel", call.number, shard, *of_module)

    def _syncs(self, version: Version, members: Sequence[wire.ServingWorker]) -> dict[wire.ServingWorker, wire.Sync]:
        """Return what each worker lacks of this version of the module.

        A worker that has not what most have gets that whole: so it is with newcomers. What has changed since then is
        the same for all, and comes to rank 0 alone, and from there to all.
        """
        had = [member.loaded.get(self.module_number) for member in members]
        known = [has for has in had if has is not None and has.structure is version.structure]
        base = max(known, key=known.count, default=None)
        changed = version.changed_since(base)
        dropped, closed = popped(self._dropped), popped(self.workers.closed)
        if closed:
            for member in members:
                for module_number in closed:
                    member.loaded.pop(module_number, None)
        syncs = {}
        for rank, (member, has) in enumerate(zip(members, had, strict=True)):
            whole: wire.WholeModule | None = None
            if base is None or has is not base:
                elements = base.flat(base.changed_since(None)) if base is not None and base.tensors else None
                whole = wire.WholeModule(version.structure, elements)
            data = version.flat(changed) if changed and rank == 0 else None
            syncs[member] = wire.Sync(self.module_number, whole, changed, data, dropped, closed)
        return syncs

    def _raise(
        self,
        call: Call,
        members: Sequence[wire.ServingWorker],
        raised: Sequence[tuple[wire.Raised, wire.ServingWorker]],
        texts: Mapping[int, str],
    ) -> NoReturn:
        """Print what user code has printed, then raise the first shard's error as a ModelError that names it."""
        printed = {**texts, **{error.shard or 0: error.text for error, _ in raised}}
        sys.stdout.write("".join(printed[shard] for shard in sorted(printed)))
        answer, member = min(raised, key=lambda pair: pair[0].shard or 0)
        where = f"rank {members.index(member)} on {member.place.node}"
        if answer.shard is not None:
            where = f"call {call.number}, shard {answer.shard} of {len(call.inputs)} ({where})"
        error = ModelError(f"{where}: {answer.error}")
        error.add_note(answer.frames)
        raise error from (None if answer.exception is None else pickle.loads(answer.exception))

    def backward(
        self, call: Call, gradients: Mapping[int, Sequence[torch.Tensor | None]], keep_graph: bool
    ) -> tuple[dict[int, Mapping[int, wire.Packed | None]], list[torch.Tensor | None]]:
        """Run a call's backward; return the shards' gradients of input leaves, and the sums of the parameters'.

        `gradients` are those of the outputs' leaves, by shard. Raises what `forward` raises.
        """
        given = {
            shard: tuple(None if tensor is None else wire.packed(tensor) for tensor in of_shard)
            for shard, of_shard in gradients.items()
        }
        with self.workers.lock:
            self.check_open()
            for _ in range(TRIES):
                members = self.workers.serving.ready()
                if any(call.owners.get(shard) not in members for shard in call.filled):
                    self._run_again(call)
                    members = self.workers.serving.ready()
                layout = wire.VectorLayout(call.forms, call.sparse, len(members))
                owners, call.owners = call.owners, {}  # until all have answered: some may have dropped their graphs
                ranks = {shard: members.index(owners[shard]) for shard in call.filled}
                answers = self.workers.serving.ask(
                    {
                        member: wire.Backward(
                            self.module_number,
                            call.number,
                            keep_graph,
                            {shard: given[shard] for shard in call.filled if owners[shard] is member},
                            ranks,
                            call.shards,
                            layout.lengths,
                            {index: call.forms[index] for index in sorted(call.sparse)},
                            self.threads,
                        )
                        for member in members  # those without a shard too: they take part in the sum
                    }
                )
                raised = [(answer, member) for member, answer in answers.items() if isinstance(answer, wire.Raised)]
                if all(isinstance(answer, wire.BackwardResult) for answer in answers.values()):
                    parts: list[wire.BackwardResult] = list(answers.values())
                    sys.stdout.write("".join(part.text for part in parts))
                    call.owners = owners
                    inputs = {shard: found for part in parts for shard, found in part.inputs.items()}
                    return inputs, self._sums(call, layout, parts)
                if raised:
                    texts = [answer.text for answer in answers.values() if isinstance(answer, wire.BackwardResult)]
                    self._raise(call, members, raised, {-1: "".join(texts)})
            raise WorkerError(f"the backward of call {call.number}: workers were lost in each of {TRIES} tries")

    def _run_again(self, call: Call) -> None:
        """Run those shards of a call's forward again whose graphs are lost."""
        versions = [tensor._version for shard in call.inputs for tensor in tensors_in(shard)]
        if versions != call.input_versions:
            raise WorkerError(
                f"the backward of call {call.number}: a worker was lost, and its shard cannot be run again, since "
                "the call's inputs were written to since"
            )
        if not call.owners:
            self._dropped.append(call.number)  # what may be left of it
        for _ in range(TRIES):
            members = self.workers.serving.ready()
            lacking = [shard for shard in call.filled if call.owners.get(shard) not in members]
            if not lacking:
                return
            self._run(call, members, lacking, {})
        raise self._lost_again(call)

    def _sums(
        self, call: Call, layout: wire.VectorLayout, parts: Sequence[wire.BackwardResult]
    ) -> list[torch.Tensor | None]:
        """Return the gradient of each trained parameter, on its device; None for one that no shard has used."""
        device = call.version.tensors[0].device if call.version.tensors else torch.device("cpu")
        slices = zip(*(part.slices for part in parts), strict=True)
        vectors = [to_caller(torch.cat(list(map(wire.unpacked, pieces))), device) for pieces in slices]
        views, counts = layout.views(vectors)
        sparse = {index: wire.of_parts(parts_of, device) for part in parts for index, parts_of in part.sparse.items()}
        return [
            (sparse[index] if index in sparse else views[index]) if count else None
            for index, count in enumerate(counts.tolist())
        ]


class Ticket:
    """Holds a call that waits for its backward; once nobody holds the ticket, its graphs are dropped.

    `of` are the call's exchange and the call, None once its backward has run and does not run again.
    """

    def __init__(self, exchange: Exchange, call: Call) -> None:
        tensors = [tensor for shard in call.inputs for tensor in tensors_in(shard)]
        call.input_versions = [tensor._version for tensor in tensors]
        exchange.waiting[call.number] = sum(tensor.nbytes for tensor in tensors)
        self.of: tuple[Exchange, Call] | None = exchange, call
        self._end = weakref.finalize(self, exchange.drop, call.number)
        self._end.atexit = False

    def done(self) -> None:
        """The call's backward has run, and does not run again."""
        self._end.detach()
        if self.of is not None:
            exchange, call = self.of
            del exchange.waiting[call.number]
        self.of = None


def tensors_in(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among leaves."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def popped(numbers: deque[int]) -> tuple[int, ...]:
    """Take the numbers out of a queue that the garbage collector may fill meanwhile."""
    return tuple(numbers.popleft() for _ in range(len(numbers)))


def to_caller(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host's memory on the caller's device, by way of pinned memory for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor
