"""The model of a loop of the user's, and its passes: each is a `Pass` of the engine, with buckets of its own.

Begin at `LoopModel.pass_for`. Workers must run the same passes in the same order. One that does not would have its
gradients summed with others'; so before each pass all compare what they are about to run (`SameCalls`).
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from dp_ray.engine.clock import StepClock
from dp_ray.engine.gradient_hooks import check_sums_once
from dp_ray.engine.loading import LoadedShard, LoadedStep
from dp_ray.engine.model import autocast
from dp_ray.engine.optimizer import scale_by
from dp_ray.engine.placement import Placement
from dp_ray.engine.reduce import ShardLoss, make_gradients_dense, numbers_of
from dp_ray.engine.replica import Replica
from dp_ray.engine.step import Metrics, StepOutput
from dp_ray.engine.trainer import Pass, TrainedModel
from dp_ray.engine.update import PassGradients, Updates
from dp_ray.engine.votes import Lagged, LossWatch, StepSums
from dp_ray.engine.whole_batch import BatchLoss, ShardOutput, WholeBatches, merge
from dp_ray.engine.world import World, all_gather, everyone, gathered, has_peers, is_gpu, new_group
from dp_ray.errors import ModelError
from dp_ray.plan.split import Shard, Split, Work, worker_pieces
from dp_ray.system.threads import waiting
from dp_ray.tensors.scatter import cut, num_rows
from dp_ray.text import listed

OfRows = Callable[[Any], Any]  # of a shard's batch


class LoopModel(TrainedModel):
    """The model of a loop, its updates and passes."""

    def __init__(
        self, placement: Placement, split: Split, updates: Updates, clock: StepClock, watch: LossWatch | None
    ) -> None:
        world, job = placement.world, placement.job
        self.placement, self.model, self.called, self.watch = placement, placement.model, placement.called, watch
        self._split, self.clock = split, clock
        if job.bitwise:
            make_gradients_dense(self.model)  # the fixed tree adds only dense ones
        self.optimizer_step, self.schedule = updates, updates.schedule
        self.average = placement.average(updates)
        if not self.model.training:
            self.model.train()
        check_sums_once({"": self.model})
        self.state = self._new_state({})
        self.measured = ["loss"]  # and what the first step logs
        self.calls = SameCalls(world)
        self._votes = Lagged() if world.world_size > 1 else None
        self._passes: dict[Any, LoopPass] = {}
        self._names = {id(module): name or "model" for name, module in self.model.named_modules()}
        self._replica: Replica | None = None
        self.constant: dict[str, nn.Parameter] = {}  # what would have gradients but for the pass that runs

    def names_of(self, modules: Sequence[nn.Module]) -> list[str]:
        """Return the names of parts of the model."""
        return [self._names.get(id(module), type(module).__qualname__) for module in modules]

    def trained_of(self, modules: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
        """Return the parameters that a pass trains, by name; raises ModelError if modules are not the model's."""
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            got = listed(dict.fromkeys(type(module).__qualname__ for module in modules)) or "no part"
            raise ModelError(f"step.backward: of is a part of run.model, or a list of parts, and got {got}")
        names = {id(one): name for name, one in self.model.named_parameters()}
        own = [one for module in modules for one in module.parameters()]
        if any(id(one) not in names for one in own):
            raise ModelError(f"step.backward: {listed(self.names_of(modules))} is no part of run.model")
        return {names[id(one)]: one for one in own if one.requires_grad}

    @contextmanager
    def only(self, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Have all other parameters need no gradient while the block runs."""
        ids = set(map(id, trained.values()))
        named = self.model.named_parameters()
        self.constant = {name: one for name, one in named if one.requires_grad and id(one) not in ids}
        for one in self.constant.values():
            one.requires_grad_(False)
        try:
            yield
        finally:
            for one in self.constant.values():
                one.requires_grad_(True)

    def pass_for(
        self, loss: OfRows, over: Any, modules: Sequence[nn.Module], trained: dict[str, nn.Parameter]
    ) -> "LoopPass":
        """Return the pass of a place in the code and what it trains; it is made once."""
        key = (_code_of(loss), _code_of(over) if over is not None else None, tuple(map(id, trained.values())))
        if key not in self._passes:
            self._passes[key] = self.new_pass(modules, trained, over is not None, self._split)
        return self._passes[key]

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
        pieces = worker_pieces(rows, self._split.shards, world.world_size, world.rank)
        shards = [Shard(loaded.step, shard, start, stop, loaded.whole.epoch) for shard, start, stop in pieces]
        read = [
            LoadedShard(one, np.asarray(one.positions), cut(batch, one.start, one.stop, job.batch_dim))
            for one in shards
        ]
        return LoadedStep(loaded.step, shards, read, Shard(loaded.step, -1, 0, rows, loaded.whole.epoch))

    def gather(self, function: OfRows, loaded: LoadedStep, number: int) -> Any:
        """Call a function on this worker's shards; return the merged outputs of all workers."""
        placement, world = self.placement, self.placement.world
        job = placement.job
        if self._replica is None:
            work = Work(self._split, world.world_size, world.rank)
            self._replica = Replica(
                job.seed, self.model, world.device, self.state, work, placement.forwards(), self.clock
            )
        replica, own = self._replica, []
        filled = [one for one in loaded.loaded if one.shard.rows]
        replica.begin(len(filled))
        for one in filled:
            with autocast(job.precision, world.device):
                outputs = replica.run(one.shard, function, one.batch, number=number)
            own.append(ShardOutput(one.shard, outputs, None))
            if one.shard.shard == 0:
                self.state.keep()
        if loaded.lacks_shard_0:
            self.state.keep()
        self.state.share()
        self.state.finish(ends_step=number == 0)
        merged = merge(own, world.device, WholeBatches(job))
        return None if merged is None else merged.outputs

    def votes_of(self, votes: Any) -> float | None:
        """Return how many workers want to stop, as far as it is known; None for a worker alone."""
        return None if self._votes is None else self._votes.take(votes)

    def close(self) -> None:
        """Stop the threads of the reductions, and let the model be freed."""
        for one in self._passes.values():
            one.close()


class LoopPass:
    """A pass of a loop: what it trains, and the sums of its gradients. `stats` has the sums of its loss."""

    def __init__(
        self,
        model: LoopModel,
        modules: Sequence[nn.Module],
        trained: dict[str, nn.Parameter],
        is_over_batch: bool,
        split: Any,
    ) -> None:
        placement: Placement = model.placement
        job, world = placement.job, placement.world
        self._model, self._label = model, listed(model.names_of(modules))
        self._may_lose_rows, self._is_over_batch = job.may_lose_rows, is_over_batch
        self._loss: OfRows | None = None
        self._over: Callable[[Any, Any], Any] | None = None
        called = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        if is_over_batch:
            batches = WholeBatches(job, placement.row_trial())
            of_batch = {"loss": lambda outputs, target: self._over(outputs, target)}  # type: ignore[misc]
            loss: ShardLoss = BatchLoss(called, self._outputs, Metrics({}), job, world.device, batches, of_batch)
        else:
            loss = ShardLoss(called, self._shard, Metrics({}), job, world.device)
        self._gradients = PassGradients(trained)
        self._pass = Pass(placement, loss, self._gradients, split, model.state, model.clock)
        self.stats = StepSums(split.shards, 1, world)
        self._earlier: list[torch.Tensor | None] | None = None

    def _shard(self, _: nn.Module, batch: Any) -> Any:
        assert self._loss is not None
        value = self._loss(batch)
        total = value[0] if isinstance(value, tuple | list) and value else value
        if isinstance(total, torch.Tensor) and not total.requires_grad:
            self._refuse(batch)
        return value

    def _refuse(self, batch: Any) -> NoReturn:
        """Raise ModelError for a loss that trains nothing of its pass; it names what the loss does depend on."""
        assert self._loss is not None
        constant = self._model.constant
        for one in constant.values():
            one.requires_grad_(True)
        value = self._loss(batch)
        total = value[0] if isinstance(value, tuple | list) else value
        found: Sequence[Any] = [None] * len(constant)
        if total.requires_grad and constant:
            found = torch.autograd.grad(total.sum(), list(constant.values()), allow_unused=True)
        reached = [name.partition(".")[0] for name, one in zip(constant, found, strict=True) if one is not None]
        but = f", but on those of {listed(dict.fromkeys(reached))}" if reached else ""
        raise ModelError(
            f"the loss does not depend on any parameter of {self._label}{but}; name in `of` what it trains"
        )

    def _outputs(self, _: nn.Module, batch: Any) -> StepOutput:
        assert self._loss is not None
        returned = self._loss(batch)
        if not isinstance(returned, Mapping) or "outputs" not in returned:
            raise ModelError('with over, the loss function returns {"outputs": ..., "target": ...}')
        return StepOutput(None, returned["outputs"], returned.get("target"))

    def run(self, loaded: LoadedStep, loss: OfRows, over: Any, on_shard: Any, number: int) -> None:
        """Run the shards forward and backward; every rank calls this."""
        self._loss, self._over = loss, over
        has_any = any(one.grad is not None for one in self._gradients.trained.values())
        self._earlier = self._pass.set_apart() if has_any else None
        if not self._gradients.trained:
            raise ModelError(f"step {loaded.step}: {self._label} has no parameter that requires a gradient")
        self._pass.run(loaded, self.stats, on_shard, number)

    def finish(self, sums: Any, rows: int, step: int) -> None:
        """Make the gradients those of the mean, call hooks on them, and add what was there before."""
        gradients = [one.grad for one in self._gradients.trained.values() if one.grad is not None]
        weight = sums[1]
        if not self._is_over_batch:
            if isinstance(weight, torch.Tensor):
                factor: Any = torch.where(weight > 0, rows / weight, 0.0)
            else:
                factor = None if weight == rows else rows / weight if weight > 0 else 0.0
            if factor is not None and gradients:
                scale_by(list(map(numbers_of, gradients)), factor)
        if has_peers():
            self._leave_buckets()
        if self._may_lose_rows and float(weight) == 0:  # nothing was trained on: an update would only decay
            self._gradients.drop_gradients()
        if self._gradients.hooks.hooked and self._gradients.hooks.are_any():
            self._gradients.hooks.run(step)
        if self._earlier is not None:
            self._pass.add(self._earlier)
            self._earlier = None

    def _leave_buckets(self) -> None:
        """Give the gradients memory of their own: the loop may hold them while this pass runs again."""
        held = [one for one in self._gradients.trained.values() if one.grad is not None and not one.grad.is_sparse]
        if held:
            own = torch._foreach_mul([one.grad for one in held], 1.0)  # type: ignore[misc]
            for one, gradient in zip(held, own, strict=True):
                one.grad = gradient

    def close(self) -> None:
        """Stop the threads of the reduction."""
        self._pass.close()


class SameCalls:
    """Compares what the workers are about to run, so that none sums its gradients with those of another pass.

    On a GPU the comparison runs while the pass is launched, and is read before the next one and at the step's end: so
    the host waits for no other, and nothing is kept of a step whose calls are not known to be the same.
    """

    def __init__(self, world: World) -> None:
        self._size, self._reads_later = world.world_size, is_gpu(world.device)
        self._group: Any = None
        if has_peers():
            self._group = new_group("gloo") if self._reads_later else everyone()
        self._begun: tuple[Any, torch.Tensor, int, str] | None = None

    def check(self, call: str) -> None:
        """Raise ModelError, on all workers, unless all make this call. Every rank calls this."""
        if self._group is None:
            return
        self.read()
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
        calls = gathered(call)
        raise ModelError(
            "loop: the workers make other calls: "
            + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            + "; each worker must call the same in the same order, so decide by what all have alike"
        )


def _code_of(function: Any) -> Any:
    """Return what tells a function's place in the code: a loop makes it anew in each step."""
    while hasattr(function, "func"):  # a partial
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return id(type(function)) if code is None else id(code)
