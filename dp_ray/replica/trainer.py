"""One step of training: the shards of this worker forward and back, the whole batch's gradient, the update."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dp_ray.errors import JobError, ModelError
from dp_ray.job import Job
from dp_ray.plan.reduction_tree import Node
from dp_ray.plan.seeds import derive_seed
from dp_ray.plan.split import Shard, Split, num_filled
from dp_ray.replica.buffers import Buffers
from dp_ray.replica.data import Indices
from dp_ray.replica.optimizer import Schedule, build_optimizer, build_scaler, load_optimizer, scale_by, total_norm
from dp_ray.replica.reducer import Reducer, ShardSums, SumReducer, TreeReducer
from dp_ray.replica.rng import ForwardSeeds, seed_all
from dp_ray.replica.shard_loss import ShardLoss
from dp_ray.replica.sparse import make_gradients_dense, numbers_of, sparse_parameters, sum_over_workers
from dp_ray.replica.step import Metrics, Step, StepOutput
from dp_ray.replica.user_code import at, raising
from dp_ray.replica.world import World

OnShard = Callable[[Shard, Any, StepOutput], None]


class Update(NamedTuple):
    """What a step of the whole batch came to, still on the device.

    `totals` are sums and weights, float64 [2 * names]: of the loss and of each metric; `learning_rate` is that of
    the first parameter group, `gradient_norm` the norm of the whole batch's gradient before clipping; `stops` says
    on every worker after the same step that one of them is asked to stop.
    """

    totals: torch.Tensor
    learning_rate: float
    gradient_norm: torch.Tensor
    stops: bool


class StopVote:
    """Whether to stop, read from what travels with every step anyway: by all workers after the same one.

    A GPU is not waited for: what it added up is read LAG steps later.
    """

    LAG = 16

    def __init__(self, device: torch.device) -> None:
        self._lag = self.LAG if device.type == "cuda" else 0
        self._told: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def stops(self, asked: torch.Tensor) -> bool:
        """Take in how many asked in this step."""
        if self._lag:
            here = torch.empty((), dtype=asked.dtype, pin_memory=True).copy_(asked, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(asked.device))
            self._told.append((here, copied))
        else:
            self._told.append((asked, None))
        if len(self._told) <= self._lag:
            return False
        told, ready = self._told.popleft()
        if ready is not None:
            ready.synchronize()
        return bool(told.item())


class Trainer:
    """The model's training state on one worker, and the step that changes it: the same on all workers."""

    def __init__(
        self, job: Job, model: nn.Module, called: nn.Module, step: Step, measures: Metrics, world: World
    ) -> None:
        self.job = job
        self.model = model
        self.world = world
        if job.bitwise:
            make_gradients_dense(model)  # the fixed tree adds dense ones
        self.optimizer = build_optimizer(job.optimizer, model)
        self.schedule = Schedule(job.scheduler, self.optimizer)
        self.scaler = build_scaler(job, world.device)
        if not model.training:  # as a model comes that was loaded; parts that are left in eval mode alone stay so
            model.train()
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._sparse = sparse_parameters(model)
        self._names = {id(one): name for name, one in model.named_parameters()}
        self._buffers = Buffers(model)
        self._seeds = ForwardSeeds(job.seed, model, world.device)
        self._sums = ShardSums(self._parameters, job.num_shards) if job.bitwise else None
        self._loss = ShardLoss(called, step, measures, job, world.device)
        self._measure_names = list(measures.functions)
        self._columns = 2 + 2 * len(measures.functions)
        self._consent = StopVote(world.device)
        self._reducer: Reducer | None = None
        self._replica: nn.Module | None = None

    @property
    def measure_names(self) -> list[str]:
        return self._measure_names

    @property
    def parameter_names(self) -> list[str]:
        """The trainable parameters, in the order of the optimizer's groups."""
        return [self._names[id(one)] for group in self.optimizer.param_groups for one in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """All that a later step depends on; its tensors are the live ones."""
        return {name: None if part is None else part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. ModelError where it is another model's, or another optimizer's."""
        for name, part in self._parts().items():
            if (part is None) != (state.get(name) is None):
                raise ModelError(f"the checkpoint has {'no' if part is not None else 'a'} {name}, unlike this job")
            try:
                if isinstance(part, torch.optim.Optimizer):
                    load_optimizer(part, state[name])
                elif part is not None:
                    part.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise ModelError(f"the checkpoint's {name} does not fit this job's: {error}") from None

    def _parts(self) -> dict[str, Any]:
        schedule = self.schedule.scheduler
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": schedule, "scaler": self.scaler}

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()

    def step(
        self,
        split: Split,
        step: int,
        shards: Sequence[Shard],
        batches: Iterator[tuple[Indices, Any]],
        on_shard: OnShard,
        wants_stop: bool = False,
    ) -> Update:
        """Train on one global batch, of which this worker runs `shards`, maybe none."""
        start, stop = split.batch(step)
        filled = num_filled(stop - start, split.shards)
        pending = [next(batches)[1] for _ in shards[:1]]
        if self._replica is None:
            self._replica = self._wrap(shards[:1], pending)
        leaves = self._sums.leaves([shard.shard for shard in shards]) if self._sums else []
        if self._reducer is not None:
            self._reducer.begin(filled, leaves[-1] if leaves else None)
        self._buffers.begin(len(shards))
        stats = torch.zeros(split.shards + 1, self._columns, dtype=torch.float64, device=self.world.device)
        if wants_stop:
            stats[-1] = 1.0
        for number, shard in enumerate(shards):
            batch = pending.pop() if pending else next(batches)[1]
            if number:
                self._buffers.restore()
            is_last = number == len(shards) - 1
            self._shard(shard, batch, stop - start, stats, is_last, on_shard)
            if self._sums is not None and (not is_last or self._reducer is None):
                self._take(leaves, shard.shard + 1)
        if not shards:
            self._backward(self._run(None, 0), stats, f"step {step}")
        self._check_all_reduced(step)
        self._finish_reduction()
        # What the optimizer draws, it draws after a seed that is the same on all workers.
        seed_all(derive_seed(self.job.seed, "update", step // split.steps, step), self.world.device)
        return self._update(stats, stop - start, step)

    def _wrap(self, shards: Sequence[Shard], batches: Sequence[Any]) -> nn.Module:
        """DDP around the shard's loss; what the first shard uses tells whether it must look for unused parameters."""
        if self.world.world_size == 1:
            return self._loss
        if len(types := {one.device.type for one in self._parameters}) > 1:
            raise JobError(f"devices: of several workers must be of one type, got {' and '.join(sorted(types))}")
        unused = self.job.find_unused_parameters
        if unused == "auto":
            unused = self._finds_unused(shards, batches)
        ignored = self._loss.prepare(self._sparse, looks_for_unused=bool(unused))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._loss, ignored)  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # torch 2.13 has a new name for the option, whose meaning differs: it syncs at the start, as was done.
            warnings.simplefilter("ignore", FutureWarning)
            replica = DistributedDataParallel(
                self._loss,
                broadcast_buffers=False,
                init_sync=False,
                find_unused_parameters=unused,
                gradient_as_bucket_view=True,
            )
        self._reducer = (
            SumReducer() if self._sums is None else TreeReducer(self._sums, self.world.world_size, self.world.rank)
        )
        replica.register_comm_hook(None, self._reducer.hook)
        return replica

    def _finds_unused(self, shards: Sequence[Shard], batches: Sequence[Any]) -> bool:
        """Whether any worker's first shard leaves a parameter without a gradient; nothing of it is kept."""
        found = torch.zeros(1, device=self.world.device)
        self._buffers.begin(2)
        for shard, batch in zip(shards, batches, strict=True):
            _go_back(self._forward(self._loss, shard, batch), _place(shard))
            sparse = {id(one) for one in self._sparse}
            found += any(one.grad is None for one in self._parameters if id(one) not in sparse)
        self._buffers.restore()
        self.optimizer.zero_grad()
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def _shard(
        self, shard: Shard, batch: Any, rows: int, stats: torch.Tensor, is_last: bool, on_shard: OnShard
    ) -> None:
        """Forward and back, the reduction beginning with the last shard's way back."""
        assert self._replica is not None
        waits = not is_last and isinstance(self._replica, DistributedDataParallel)
        with self._replica.no_sync() if waits else nullcontext():  # type: ignore[operator]
            loss = self._forward(self._replica, shard, batch)
            assert self._loss.row is not None
            stats[shard.shard] = self._loss.row
            on_shard(shard, batch, self._loss.step_output)
            if shard.shard == 0:
                self._buffers.keep()
            if is_last:
                if self._sums is not None and self._loss.anchor is not None:
                    self._sums.stand_in()
                self._backward(loss / rows, stats, _place(shard))
            else:
                _go_back(self._scaled(loss / rows), _place(shard))

    def _take(self, leaves: Sequence[Node], stop: int) -> None:
        """Take the gradients away, unless the next shard's are to be added to them as they are made."""
        assert self._sums is not None
        for node in leaves:
            if node[1] == stop:
                self._sums.take(node)

    def _forward(self, replica: nn.Module, shard: Shard, batch: Any) -> torch.Tensor:
        self._seeds.begin(shard)
        with at(_place(shard)):
            loss: torch.Tensor = replica(batch, shard.rows)
        return loss

    def _run(self, batch: Any, rows: int) -> torch.Tensor:
        assert self._replica is not None
        loss: torch.Tensor = self._replica(batch, rows)
        return loss

    def _backward(self, loss: torch.Tensor, stats: torch.Tensor, where: str) -> None:
        """The last way back of the step; what else the workers exchange travels meanwhile."""
        work = dist.all_reduce(stats, async_op=True) if self._reducer is not None else None
        self._buffers.share()
        _go_back(self._scaled(loss), where)
        if work is not None:
            work.wait()

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _check_all_reduced(self, step: int) -> None:
        if self._reducer is not None and not self._reducer.saw_last:
            unused = [self._names[id(one)] for one in self._parameters if one.grad is None]
            raise ModelError(
                f"step {step}: parameters were not used, so the workers would wait for their gradients for ever: "
                f"{', '.join(unused[:8])}; set find_unused_parameters: true"
            )

    def _finish_reduction(self) -> None:
        self._buffers.finish()
        sum_over_workers(self._sparse)
        if self._sums is None:
            return
        if self._reducer is None:
            self._sums.finish()
        self._sums.held = {}

    def _weighted_sum(self, gradients: list[torch.Tensor], weight: torch.Tensor, rows: int) -> None:
        """Each loss counted 1 / rows so far; a batch whose weights sum to 0 has no gradient."""
        if weight.device.type == "cpu":
            known = weight.item()
            if known != rows:
                torch._foreach_mul_(gradients, rows / known if known > 0 else 0.0)
        else:  # without waiting for the device
            scale_by(gradients, torch.where(weight > 0, rows / weight, 0.0))

    def _update(self, stats: torch.Tensor, rows: int, step: int) -> Update:
        """Clip the whole batch's gradient and step; the loss's weights count now that all are known."""
        totals = stats[:-1].sum(0)
        rate = float(self.optimizer.param_groups[0]["lr"])
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [numbers_of(one.grad) for one in self._parameters if one.grad is not None]
        self._weighted_sum(gradients, totals[1], rows)
        norm = total_norm(gradients)
        if self.job.grad_clip is not None:
            scale_by(gradients, (self.job.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        with raising(f"step {step}: optimizer"):
            is_skipped = self._step_optimizer()
        if not is_skipped:
            with raising(f"step {step}: scheduler"):
                self.schedule.after_step()
        self.optimizer.zero_grad()
        return Update(totals, rate, norm, self._consent.stops(stats[-1, 0]))

    def _step_optimizer(self) -> bool:
        """Update the parameters; True where fp16 overflowed, so that this was skipped and does not count."""
        if self.scaler is None:
            self.optimizer.step()
            return False
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() < scale)


def _place(shard: Shard) -> str:
    return f"step {shard.step}, shard {shard.shard}"


def _go_back(loss: torch.Tensor, where: str) -> None:
    with raising(f"{where}: backward"):
        loss.backward()  # type: ignore[no-untyped-call]
