"""Call the user's hooks on rank 0 with a view of the training, which cannot change it."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from dp_ray.engine.forward.weights import tensors_of
from dp_ray.engine.sums.votes import Totals
from dp_ray.engine.trainer import TrainedModel, Update
from dp_ray.engine.user_code import reraise_as
from dp_ray.errors import JobError, ModelError
from dp_ray.job.keys import Target
from dp_ray.job.targets import bind, resolve
from dp_ray.rundir.history import FinishedStep
from dp_ray.tasks.checkpoints import Training
from dp_ray.tensors.files import is_sharded
from dp_ray.text import a_kind

Hook = Callable[["TrainingView"], object]


@dataclass(frozen=True)
class TrainingView:
    """A training after a step, as a hook sees it. Nothing in it changes the training.

    `step` and `epoch` count from 0, as in the history. `samples` counts those of all steps so far. `learning_rate` is
    that of the first parameter group in this step. `run_dir` is the run directory, a path or a URL.
    `loss`, `gradient_norm` and `metrics` are numbers that are read from the device when they are asked for: on a GPU
    that waits for the step to end. They are NaN and nothing if this process has run no step.

    >>> import dp_ray, torch
    >>> rows = torch.utils.data.TensorDataset(torch.arange(6.0)[:, None], torch.arange(6.0)[:, None])
    >>> job = {"task": "train", "model": torch.nn.Linear(1, 1), "dataset": rows, "batch_size": 3}
    >>> job |= {"loss": torch.nn.MSELoss, "optimizer": torch.optim.SGD}
    >>> seen = []
    >>> def note(view):
    ...     seen.append((view.step, view.epoch, view.samples))
    >>> run = dp_ray.run(**job, hooks={"on_step": note}, workers=0, quiet=True)
    >>> seen
    [(0, 0, 3), (1, 0, 6)]
    """

    step: int
    epoch: int
    samples: int
    learning_rate: float
    run_dir: str = field(repr=False)  # a URL may hold a secret
    _update: Update | None = field(repr=False, compare=False)
    _measured: Mapping[str, float] = field(repr=False, compare=False)
    _trainer: TrainedModel = field(repr=False, compare=False)

    @property
    def loss(self) -> float:
        """The loss of the whole batch: its mean, or with `reduction: sum` its sum."""
        return self._numbers["loss"]

    @property
    def gradient_norm(self) -> float:
        """The norm of the whole batch's gradient, before clipping."""
        return self._numbers["gradient_norm"]

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """The job's metrics in this step, and measurements after it, like `eval_loss` and `epoch_loss`."""
        names = self._trainer.measured[1:]
        own = {name: self._numbers[name] for name in names if name in self._numbers}
        return MappingProxyType({**own, **self._measured})

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the weights as they are now, named as in `weights.safetensors`, on the model's device."""
        with self._trainer.optimizer_step.evaluating():
            return self._copied(tensors_of(self._trainer.model))

    @property
    def ema_weights(self) -> dict[str, torch.Tensor] | None:
        """A copy of the average of the weights, if the job has `ema`."""
        average = self._trainer.average
        return None if average is None else self._copied(average.tensors())

    def _copied(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if any(map(is_sharded, tensors.values())):
            raise ModelError("hooks: with strategy: fsdp rank 0 has only a part of the weights; read a checkpoint")
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @cached_property
    def _numbers(self) -> dict[str, float]:
        """The loss, the metrics and the gradient's norm, read from the device at once."""
        if self._update is None:
            return {"loss": float("nan"), "gradient_norm": float("nan")}
        sums = self._update.sums
        *row, norm = torch.cat([sums, self._update.gradient_norm.to(sums).reshape(1)]).tolist()
        means = [float("nan") if mean is None else mean for mean in Totals.means(row, self._update.is_sum)[0]]
        return {**dict(zip(self._trainer.measured, means, strict=True)), "gradient_norm": norm}


class HookCalls:
    """The hooks of a job, called on rank 0. Each error names the hook and the step."""

    def __init__(self, training: Training) -> None:
        given = training.context.job.hooks.given
        self._hooks = {name: make_hook(f"hooks.{name}", value) for name, value in given.items()}
        self._trainer, self._split, self._train_state = training.trainer, training.split, training.state
        self._run_dir = training.context.run.location
        self._last: Update | None = None

    def after_step(self, finished: FinishedStep) -> None:
        """Call the hooks of a finished step."""
        self._last = finished.update
        view = self._view(finished.number, finished.update, finished.measured)
        if finished.measured.keys() - {"epoch_loss"}:
            self._call("on_evaluate", view)
        self._call("on_step", view)

    def at_end(self) -> None:
        """Call the hook of the training's end, with its last step and its last evaluation."""
        state = self._train_state
        self._call("on_end", self._view(state.step - 1, self._last, {**state.measured, **state.at_end}))

    def _view(self, step: int, update: Update | None, measured: Mapping[str, float]) -> TrainingView:
        epoch = self._split.cursor(step)[0]
        rate = self._trainer.optimizer_step.learning_rate if update is None else update.learning_rate
        samples = epoch * self._split.rows_kept + self._split.batch(step)[1]
        return TrainingView(step, epoch, samples, rate, self._run_dir, update, dict(measured), self._trainer)

    def _call(self, name: str, view: TrainingView) -> None:
        hook = self._hooks.get(name)
        if hook is not None:
            with reraise_as(f"step {view.step}: hooks.{name}"):
                hook(view)


def make_hook(key: str, value: Any) -> Hook:
    """Return the function that a hook's key names, with its args; an object of a class that it names.

    Raises JobError if it cannot be imported, built, or called with a view.
    """
    if isinstance(value, Target) and inspect.isclass(resolve(key, value)):
        value = bind(key, value)()
    elif isinstance(value, Target):
        bind(key, value, leading=1)  # checks the args
        return functools.partial(resolve(key, value), **value.args)
    if not callable(value):
        raise JobError(f"{key}: must be called with a view of the training, and {a_kind(value)} cannot be")
    return value  # type: ignore[no-any-return]


def check_hook(key: str, value: Any) -> None:
    """Raise JobError if a hook cannot be imported, or rejects its args; builds no object of a class."""
    if not isinstance(value, Target):
        make_hook(key, value)
    else:
        bind(key, value, leading=0 if inspect.isclass(resolve(key, value)) else 1)
