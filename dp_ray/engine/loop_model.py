"""The model of a loop of the user's, and its passes: each is a `Pass` of the engine, with buckets of its own.

Begin at `LoopModel.pass_for`. Workers must run the same passes in the same order. One that does not would have its
gradients summed with others'; so before each pass all compare what they are about to run (`SameCalls`).
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.clock import StepClock
from dp_ray.engine.devices import mixed_devices
from dp_ray.engine.forward.model import autocast
from dp_ray.engine.forward.replica import Replica
from dp_ray.engine.forward.step import Metrics, OnShard, StepOutput, as_tensor, what_it_is
from dp_ray.engine.loads.loading import LoadedShard, LoadedStep
from dp_ray.engine.placement import Placement
from dp_ray.engine.sums.reduce import ShardLoss
from dp_ray.engine.sums.votes import StepSums, Totals
from dp_ray.engine.sums.whole_batch import BatchLoss, MergedBatch, ShardOutput, WholeBatches, detached, merged_batch
from dp_ray.engine.trainer import Pass, TrainedModel, TrainingStep
from dp_ray.engine.update import Gradients, Updates
from dp_ray.engine.user_code import batch_hint, locating, location, reraise_as, shards_hint
from dp_ray.engine.world import World, all_gather, everyone, has_peers, is_gpu, new_group
from dp_ray.errors import ModelError, other_calls
from dp_ray.plan.history import of_further
from dp_ray.plan.split import Shard, Split, Work, worker_pieces
from dp_ray.system.threads import note_call, waiting
from dp_ray.tensors.scatter import cut, num_rows
from dp_ray.tensors.tree import map_leaves
from dp_ray.text import listed

OfRows = Callable[[Any], Any]  # of a shard's batch


class LoopModel(TrainedModel):
    """The model of a loop, its updates and passes."""

    optimizer_step: Updates

    def __init__(self, placement: Placement, split: Split, updates: Updates, clock: StepClock) -> None:
        super().__init__(placement, split, updates, clock)
        world = placement.world
        self.state = self._new_state({})
        self.measured = ["loss"]  # and what the first step logs
        self.calls = SameCalls(world)
        work = Work(split, world.world_size, world.rank)
        self._replica = Replica(
            placement.job.seed, self.model, world.device, self.state, work, placement.forwards(), self.clock
        )
        self._names = {id(module): name or "model" for name, module in self.model.named_modules()}
        self._has_ended = False  # a step, which fixes the names that are logged

    def names_of(self, modules: Sequence[nn.Module]) -> list[str]:
        """Return the names of parts of the model."""
        return [self._names.get(id(module), type(module).__qualname__) for module in modules]

    def trained_of(self, modules: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
        """Return the parameters that a pass trains, by name; raises ModelError if modules are not the model's."""
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            got = listed(dict.fromkeys(type(module).__qualname__ for module in modules)) or "no part"
            raise ModelError(f"step.backward: of is a part of run.model, or a list of parts, and got {got}")
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        own = [parameter for module in modules for parameter in module.parameters()]
        if any(id(parameter) not in names for parameter in own):
            raise ModelError(f"step.backward: {listed(self.names_of(modules))} is no part of run.model")
        return {names[id(parameter)]: parameter for parameter in own if parameter.requires_grad}

    @contextmanager
    def only(self, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Have all other parameters need no gradient while the block runs."""
        ids = set(map(id, trained.values()))
        constant = [other for other in self.model.parameters() if id(other) not in ids and other.requires_grad]
        for parameter in constant:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in constant:
                parameter.requires_grad_(True)

    def pass_for(
        self, loss: OfRows, over: Any, is_sum: bool, modules: Sequence[nn.Module], trained: dict[str, nn.Parameter]
    ) -> "LoopPass":
        """Return the pass of a place in the code and what it trains; it is made once."""
        code_of_batch = _code_of(over) if over is not None else None
        key = (_code_of(loss), code_of_batch, is_sum, tuple(map(id, trained.values())))
        if key not in self.passes:
            self.passes[key] = self.new_pass(modules, trained, over is not None, is_sum)
        found: LoopPass = self.passes[key]
        return found

    def new_pass(self, *args: Any) -> "LoopPass":
        """Return a pass that has not run yet."""
        return LoopPass(self, *args)

    def cut(self, loaded: LoadedStep, batch: Any) -> LoadedStep:
        """Return a step whose shards are those of a batch of the loop's own."""
        job, world = self.placement.job, self.placement.world
        rows = num_rows(batch, job.batch_dim)
        if not rows:
            raise ModelError(
                f"step {loaded.step}: batch has no rows; give a tree of tensors with a row for each sample"
            )
        pieces = worker_pieces(rows, self.split.shards, world.world_size, world.rank)
        shards = [Shard(loaded.step, shard, start, stop, loaded.whole.epoch) for shard, start, stop in pieces]
        read = [
            LoadedShard(shard, np.asarray(shard.positions), cut(batch, shard.start, shard.stop, job.batch_dim))
            for shard in shards
        ]
        return LoadedStep(loaded.step, shards, read, Shard(loaded.step, -1, 0, rows, loaded.whole.epoch))

    def gather(self, function: OfRows, loaded: LoadedStep, number: int) -> MergedBatch | None:
        """Call a function on this worker's shards; return the merged outputs of all workers, None without any row."""
        job, device, replica = self.placement.job, self.placement.world.device, self._replica

        def outputs_of(batch: Any) -> StepOutput:
            with reraise_as(name_of(function)), autocast(job.precision, device):
                return StepOutput(None, _without_graph(function(batch)))

        replica.begin(sum(bool(shard.rows) for shard in loaded.shards), loaded.lacks_shard_0)
        own = []
        for turn in replica.rounds(loaded, ()):
            assert turn.shard is not None
            outputs = replica.run(turn.shard, outputs_of, turn.batch, number=number, keeps=True)
            own.append(detached(outputs, turn.shard))
        self.state.share()
        self.state.finish(ends_step=number == 0)
        return self.merged(own, f"step {loaded.step}: step.gather({name_of(function)})")

    def merged(self, own: Sequence[ShardOutput], where: str) -> MergedBatch | None:
        """Merge what a function gave of the shards of all workers; None without any row. Every rank calls this."""
        batches = WholeBatches(self.placement.job.batch_dim, joins_lists=True)
        with locating(where):
            return merged_batch(own, self.placement.world.device, batches)

    def end(self, step: TrainingStep, logged: Mapping[str, Any]) -> None:
        """End a step: make its sums and its first update those of its row in the history, with what was logged.

        Raises ModelError if it left gradients, or logged other names than the first step.
        """
        left = [name for name, parameter in self.model.named_parameters() if parameter.grad is not None]
        if left:
            raise ModelError(
                f"step {step.number}: the gradient of {listed(left)} is left at the step's end; update it "
                "(update.step()), or drop it (zero_grad()); to accumulate over more rows, set a larger batch_size, "
                "and shards"
            )
        self.calls.read()
        device = self.placement.world.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        updates = {n: (each.learning_rate, zero) for n, each in enumerate(self.optimizer_step.each)} | step.updated
        numbers = dict(logged)
        for number in range(1, len(updates)):
            numbers |= zip(of_further(number), updates[number], strict=True)
        if not self._has_ended:
            self.measured[1:] = numbers
            self._has_ended = True
        elif numbers.keys() != set(self.measured[1:]):
            raise ModelError(
                f"step {step.number}: step.log has the names {listed(numbers)}, and in the first step it had "
                f"{listed(self.measured[1:])}; log the same in each step"
            )
        totals = step.totals or StepSums(1, 1, self.placement.world).total()
        cells = [value for name in self.measured[1:] for value in (numbers[name], 1.0)]
        step.totals = totals.with_more(as_tensor(cells, device)) if cells else totals
        step.updated[0] = updates.get(0, (float("nan"), zero))
        step.loaded = step.loaded._replace(loaded=())  # frees the batches before those of the next step are read

    def close(self) -> None:
        """Stop the threads of the reductions, and let the model be freed."""
        self.calls.close()
        super().close()


class LoopPass(Pass):
    """A pass of a loop: what it trains, and the sums of its gradients, which it adds to what is there.

    `function` is the loop's, of a shard's batch, and `over` that of the merged outputs. If it `is_sum`, the function
    gives sums. If the pass `keeps` what the function gives beside its loss, `kept` has it of this worker's shards
    after `run`.
    """

    function: OfRows
    over: Callable[[Any, Any], Any] | None
    keeps = False
    kept: Sequence[ShardOutput] = ()

    def __init__(
        self,
        model: LoopModel,
        modules: Sequence[nn.Module],
        trained: dict[str, nn.Parameter],
        is_over_batch: bool,
        is_sum: bool,
    ) -> None:
        placement = model.placement
        job, device = placement.job, placement.world.device
        self._model, self._label = model, listed(model.names_of(modules))
        called = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        if is_over_batch:
            of_batch = {"loss": lambda outputs, target: self.over(outputs, target)}  # type: ignore[misc]
            loss: ShardLoss = BatchLoss(called, self._called, Metrics({}), job, device, of_batch)
        else:
            loss = ShardLoss(called, self._shard, Metrics({}, is_sum=is_sum), job, device)
        super().__init__(model, loss, Gradients(trained))
        self._earlier: list[torch.Tensor | None] | None = None

    def _called(self, _: nn.Module, batch: Any) -> Any:
        """Call the loop's function; an error names it."""

        def hint(error: BaseException) -> str:
            return mixed_devices(self._model.model, error) or shards_hint(error) or batch_hint(error, batch)

        with reraise_as(name_of(self.function), hint):
            returned = self.function(batch)
        outputs = returned.get("outputs") if isinstance(returned, Mapping) else None
        if self.keeps and not isinstance(outputs, Mapping):
            got = what_it_is(returned) if outputs is None else f"as outputs {what_it_is(outputs)}"
            returns = "{'loss': ..., 'outputs': {name: ...}} (with over, no loss, and maybe a target)"
            raise ModelError(
                f"step.backward: with keep, {name_of(self.function)} returns {returns}, and it returned {got}"
            )
        return returned

    def _shard(self, called: nn.Module, batch: Any) -> Any:
        value = self._called(called, batch)
        total = value.get("loss") if isinstance(value, Mapping) else value
        total = total[0] if isinstance(total, tuple | list) and total else total
        if isinstance(total, torch.Tensor) and not total.requires_grad:
            raise ModelError(
                f"the loss does not depend on any parameter of {self._label}; name in `of` what it trains"
            )
        return value

    def run(self, loaded: LoadedStep, on_shard: OnShard | None = None, number: int = 0) -> None:
        """Run a step's shards, with the gradients of earlier passes set apart: this pass's may be in their memory."""
        trained = self.gradients.trained.values()
        if not trained:
            raise ModelError(f"step {loaded.step}: {self._label} has no parameter that requires a gradient")
        self._earlier = None
        if any(parameter.grad is not None for parameter in trained):
            self._earlier = [None if parameter.grad is None else parameter.grad.clone() for parameter in trained]
            for parameter in trained:
                parameter.grad = None
        kept: list[ShardOutput] = []

        def keep(shard: Shard, batch: Any, output: StepOutput) -> None:
            if on_shard is not None:
                on_shard(shard, batch, output)
            with locating(location(shard)):
                kept.append(detached(StepOutput(None, _without_graph(output.outputs)), shard))

        super().run(loaded, keep if self.keeps else on_shard, number)
        self.kept = kept

    def finish(self, totals: Totals, loaded: LoadedStep, is_empty: bool) -> None:
        """Make the gradients those of the loss, and add what was there before; all None if the pass `is_empty`."""
        trained, rows = self.gradients.trained.values(), loaded.whole.planned_rows
        if is_empty:
            for parameter in trained:
                parameter.grad = None
        else:
            self.gradients.weigh(totals.weight if self.loss.is_of_rows else rows, rows, loaded.step)
        held = [each for each in trained if each.grad is not None and not each.grad.is_sparse]
        if has_peers() and held:
            # In memory of their own, not of DDP's buckets: the loop may hold them while this pass runs again.
            for parameter, own in zip(held, torch._foreach_mul([each.grad for each in held], 1.0), strict=True):  # type: ignore[misc]
                parameter.grad = own
        for parameter, before in zip(trained, self._earlier or (), strict=False):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._earlier = None


class SameCalls:
    """Compares what the workers are about to run, so that none sums its gradients with those of another pass.

    On a GPU the comparison runs while the pass is launched, and is read before the next one and at the step's end: so
    the host waits for no other, and nothing is kept of a step whose calls are not known to be the same. A worker may
    wait there for its GPU, and that for the others', and never read it: so beats carry the call too, and the driver
    compares them.
    """

    def __init__(self, world: World) -> None:
        self._size, self._reads_later = world.world_size, is_gpu(world.device)
        self._group: Any = None
        if has_peers():
            self._group = new_group("gloo") if self._reads_later else everyone()
        self._begun: tuple[Any, torch.Tensor, int, str] | None = None
        self._number = 0

    def check(self, call: str) -> None:
        """Raise ModelError, on all workers, unless all make this call. Every rank calls this."""
        if self._group is None:
            return
        self.read()
        self._number += 1
        note_call(self._number, call)
        digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "little")
        theirs = torch.empty(self._size, dtype=torch.int64)
        work = all_gather(theirs, torch.tensor([digest]), group=self._group, async_op=True)
        self._begun = work, theirs, digest, call
        if not self._reads_later:
            self.read()

    def read(self) -> None:
        """Raise what `check` raises, for its last call."""
        if self._begun is None:
            return
        (work, theirs, digest, call), self._begun = self._begun, None
        with waiting("the other workers' calls"):
            work.wait()
        if (theirs == digest).all():
            return
        calls: list[Any] = [None] * self._size
        with waiting("the other workers' calls"):  # not in the group of the passes, which the GPUs may still be in
            dist.all_gather_object(calls, call, group=self._group)
        raise ModelError(other_calls(dict(enumerate(calls))))

    def close(self) -> None:
        """Have the beats carry no call any more."""
        note_call(0, "")


def _without_graph(outputs: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs)


def name_of(function: Any) -> str:
    """Return the name of a function of the loop's, for messages."""
    return str(getattr(function, "__qualname__", type(function).__qualname__)).replace(".<locals>", "")


def _code_of(function: Any) -> Any:
    """Return what tells a function's place in the code: a loop makes it anew in each step."""
    while hasattr(function, "func"):  # a partial
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return id(type(function)) if code is None else id(code)
