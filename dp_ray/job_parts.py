"""The parts of a job: mappings with keys of their own, as strict frozen models."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from dp_ray.job_target import TARGET, Strict, Target, Targeted, target_parser


class Group(Strict):
    """Parameters with optimizer args of their own."""

    match: str = Field(description="A regular expression that is searched in the parameters' names.")
    args: dict[str, Any] = Field(description="The optimizer's args for these parameters.")

    @model_validator(mode="after")
    def _is_a_pattern(self) -> "Group":
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match must be a regular expression, got {self.match!r}: {error}") from None
        return self


class Optimizer(Target):
    """A target that is called with the trainable parameters and `args`."""

    EXAMPLE: ClassVar[str] = "torch.optim:Adam"

    groups: list[Group] = Field(
        default_factory=list,
        description="Parameters with args of their own. A parameter belongs to the first group whose `match` finds "
        "it.",
    )


class Shape(Strict):
    """The short form of a scheduler: a warm-up, and then a shape, over all updates of the training."""

    shape: Literal["cosine", "linear", "constant"] = Field(
        default="constant",
        description="In place of a target: how the learning rate goes on after the warm-up. cosine and linear: down "
        "to 0 at the training's end. constant: it stays.",
    )
    warmup: Annotated[float, Field(ge=0, lt=1)] | PositiveInt = Field(
        default=0.0,
        description="In place of a target: the updates in which the learning rate rises to the optimizer's, in equal "
        "steps. A share of all updates, below 1, or their number.",
    )


class Scheduler(Target):
    """A target that is called with the optimizer and `args`."""

    EXAMPLE: ClassVar[str] = "torch.optim.lr_scheduler:StepLR"
    SHAPED: ClassVar[str] = "dp_ray.replica.optimizer:warmed_up"  # what the short form calls; it stands in run.json
    LENGTHS: ClassVar = ("T_max", "total_steps", "total_iters", "num_training_steps")

    per: Literal["step", "epoch"] = Field(
        default="step", description="Step the scheduler after each step, or each epoch."
    )
    metric: str | None = Field(
        default=None,
        description="What a ReduceLROnPlateau watches: `loss`, the epoch's mean, or a metric that `eval` measures, "
        "like `eval_loss`. It needs `scheduler.per: epoch`.",
    )

    @model_validator(mode="after")
    def _has_lengths(self) -> "Scheduler":
        for name, value in self.args.items():
            if value == "auto" and isinstance(value, str) and name not in self.LENGTHS and self.is_torchs:
                raise ValueError(
                    f"args.{name}: auto, the length of the training, is for {', '.join(self.LENGTHS)}; give a number"
                )
        return self

    @property
    def is_torchs(self) -> bool:
        """Whether it is one of torch's own, by its name: torch is not imported for that."""
        return self.label.startswith("torch.optim.lr_scheduler:")

    @property
    def lengths(self) -> dict[str, Any]:
        """The args that say how often it is stepped in all, a number or `auto`."""
        return {name: value for name, value in self.args.items() if name in self.LENGTHS}

    @property
    def is_planned(self) -> bool:
        """Whether it is made for the length of the training, whatever that is."""
        return any(isinstance(value, str) and value == "auto" for value in self.lengths.values())

    def planned(self, length: int) -> "Scheduler":
        """The same with the length of the training in place of `auto`."""
        numbers = {name: length for name, value in self.lengths.items() if isinstance(value, str) and value == "auto"}
        return self.model_copy(update={"args": {**self.args, **numbers}})

    @property
    def is_plateau(self) -> bool:
        """Whether it is torch's ReduceLROnPlateau, by its name: torch is not imported for that."""
        return self.label == "torch.optim.lr_scheduler:ReduceLROnPlateau"

    @property
    def most_steps(self) -> int | None:
        """How often torch's OneCycleLR can be stepped, by its args; None for others, which have no end."""
        if self.label != "torch.optim.lr_scheduler:OneCycleLR":
            return None
        total, epochs, steps = (self.args.get(name) for name in ("total_steps", "epochs", "steps_per_epoch"))
        if isinstance(total, int):
            return total
        return epochs * steps if isinstance(epochs, int) and isinstance(steps, int) else None


def _shaped(value: Any) -> Any:
    """The short form `scheduler: {warmup: 0.05, shape: cosine}` as the target that makes it."""
    if not isinstance(value, Mapping) or "target" in value or not Shape.model_fields.keys() & value.keys():
        return value
    if others := [str(key) for key in value if key not in Shape.model_fields]:
        raise ValueError(
            f"a target, or the short form with the keys shape and warmup alone; got {', '.join(others)} too"
        )
    args = Shape.model_validate(dict(value)).model_dump()
    return {"target": Scheduler.SHAPED, "args": {**args, "total_steps": "auto"}}


SchedulerKey = Annotated[
    Any,
    target_parser(Scheduler),
    BeforeValidator(
        _shaped, json_schema_input_type=Annotated[str, Field(pattern=f"^{TARGET.pattern}$")] | Scheduler | Shape
    ),
]


def _metric(value: Any) -> Any:
    """The short form `best: eval_loss` as a mapping."""
    return {"metric": value} if isinstance(value, str) else value


def location(value: Any) -> Any:
    """A path, or the run directory of a Result, as text."""
    if hasattr(value, "run_dir"):
        return getattr(value, "location", "") or value.run_dir
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class Best(Strict):
    """The metric by which a training keeps its best weights."""

    metric: str = Field(description="A metric that `eval` measures, like `eval_loss` or `eval_accuracy`.")
    mode: Literal["min", "max"] = Field(
        default="min", description="Whether the smallest or the largest value is best."
    )


class Checkpoint(Strict):
    """When a training writes checkpoints, besides at its end, and which it keeps."""

    every_steps: PositiveInt | None = Field(default=None, description="Write a checkpoint every so many steps.")
    every_seconds: Literal["auto"] | NonNegativeFloat | None = Field(
        default="auto",
        description="Write a checkpoint every so many seconds. null: never by the clock. auto: every 300 s; without "
        "`every_steps` also at each epoch's end, and more often if that costs at most 1 % of the time.",
    )
    keep: PositiveInt = Field(default=2, description="How many checkpoints are kept: the newest ones.")
    best: Annotated[Best, BeforeValidator(_metric, json_schema_input_type=str | Best)] | None = Field(
        default=None,
        description="Also keep the best weights, `best.safetensors`: by `eval_loss`, or `{metric: eval_accuracy, "
        "mode: max}`. The search for the best starts again if metric or mode change.",
    )


class OnError(Strict):
    """What becomes of bad samples: they are set aside, up to a limit."""

    quarantine: PositiveInt = Field(
        description="The most samples that are set aside. One more ends the job. A sample counts once a run."
    )
    timeout: PositiveFloat | None = Field(
        default=None,
        description="Seconds after which reading a sample counts as hung. null: no limit. With a limit and "
        "`loader.processes: 0` one process reads for each worker.",
    )
    finite: bool = Field(
        default=False, description="Whether a sample with a NaN or an infinity in its floating numbers is bad."
    )


class Timeouts(Strict):
    """How long a step may take, and how long to wait for nodes that were lost."""

    step: PositiveFloat | None = Field(
        default=600, description="Seconds in one step after which a worker counts as hung. null: no limit."
    )
    capacity: PositiveFloat | None = Field(
        default=600,
        description="Seconds to wait for capacity after nodes were lost, if no autoscaler can add nodes. null: no "
        "limit.",
    )


def _blocks(value: Any) -> Any:
    """The short form `shuffle: blocks` as a mapping."""
    return {} if value == "blocks" else value


class ShuffleBlocks(Strict):
    """A shuffle of blocks of consecutive samples, and then of the samples in windows of blocks."""

    window_blocks: PositiveInt = Field(
        default=16,
        description="How many blocks are shuffled into each other at a time. Each shard draws from its own share of "
        "them.",
    )
    block_rows: PositiveInt | None = Field(
        default=None,
        description="Samples in a block. null: the blocks that the dataset's `block_rows` names, like row groups.",
    )


BlocksKey = Annotated[
    ShuffleBlocks, BeforeValidator(_blocks, json_schema_input_type=Literal["blocks"] | ShuffleBlocks)
]


class Eval(Strict):
    """When and on which dataset a training evaluates its model, besides at its end."""

    dataset: Targeted = Field(description="The dataset to evaluate on, which task evaluate uses too.")
    every_steps: PositiveInt | None = Field(default=None, description="Evaluate every so many steps.")
    every_epochs: PositiveInt | None = Field(
        default=None, description="Evaluate every so many epochs. Default: 1 if `every_steps` is not set."
    )
    batch_size: PositiveInt | None = Field(
        default=None, description="Samples in a global batch of an evaluation. Default: the job's `batch_size`."
    )


class EarlyStopping(Strict):
    """Stop a training once a metric has not improved for a while."""

    metric: str = Field(
        description="A metric that `eval` measures, like `eval_loss`; or `epoch_loss`, the epoch's mean, which "
        "`loss` names too."
    )
    patience: PositiveInt = Field(
        description="How many evaluations in a row may bring no improvement; of `epoch_loss`, how many epochs."
    )
    min_delta: NonNegativeFloat = Field(
        default=0.0, description="By how much at least a value must be better than the best one to be an improvement."
    )
    mode: Literal["min", "max"] = Field(default="min", description="Whether smaller or larger values are better.")

    @property
    def column(self) -> str:
        """The metric's name in the history."""
        return "epoch_loss" if self.metric == "loss" else self.metric


class Ema(Strict):
    """The exponential moving average of the weights."""

    decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        description="The share of the average that stays in each update: average = decay * average + (1 - decay) * "
        "weights."
    )
    evaluate: bool = Field(
        default=True, description="Evaluate the average during the training, in place of the weights."
    )


class Hooks(Strict):
    """Functions of your own that are called on rank 0 with a view of the training, which they cannot change."""

    on_step: Targeted | None = Field(default=None, description="Called after each step.")
    on_evaluate: Targeted | None = Field(default=None, description="Called after each evaluation.")
    on_end: Targeted | None = Field(
        default=None, description="Called once the training has ended, and its weights are written."
    )

    @property
    def given(self) -> dict[str, Any]:
        """The hooks that are set, by their names."""
        return {name: target for name, target in self if target is not None}


class Elastic(Strict):
    """As many workers as the cluster has room for, between `min` and `max`."""

    min: PositiveInt = Field(description="The fewest workers with which the job runs.")
    max: PositiveInt = Field(description="The most workers with which the job runs.")

    @model_validator(mode="after")
    def _in_order(self) -> "Elastic":
        if self.min > self.max:
            raise ValueError(f"min must not be above max, got min {self.min} and max {self.max}")
        return self


class MixedPrecision(Strict):
    """The dtypes in which `fsdp` gathers parameters and sums gradients."""

    param: Literal["bf16", "fp16"] | None = Field(
        default=None, description="The dtype of the gathered parameters, and so of the model's work. null: their own."
    )
    reduce: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="The dtype in which gradients are summed. null: that of the gathered parameters."
    )


class Fsdp(Strict):
    """How `strategy: fsdp` shards a model over the workers."""

    blocks: Literal["auto"] | Annotated[list[str], Field(min_length=1)] = Field(
        default="auto",
        description="The classes of the modules that are gathered as one, by name. auto: those that the model's "
        "`_no_split_modules` names, else the items of its ModuleLists and Sequentials.",
    )
    reshard_after_forward: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether a block's parameters are freed after its forward, and gathered again for its backward. "
        "auto: yes, except for those outside the blocks.",
    )
    offload: bool = Field(
        default=False, description="Keep parameters, gradients and the optimizer's state in the host's memory."
    )
    mixed_precision: MixedPrecision | None = Field(
        default=None, description="Gather parameters and sum gradients in other dtypes. null: in their own."
    )


class ActivationBudget(Strict):
    """How many blocks keep their activations, where the others compute theirs again."""

    budget: Annotated[float, Field(ge=0, le=1)] = Field(
        description="The share of the blocks that keep their activations: the last ones of the model. 0 is `true`, "
        "1 is `false`."
    )


class Loader(Strict):
    """The torch DataLoader of each worker."""

    processes: NonNegativeInt = Field(
        default=0,
        description="Processes that load data for each worker: DataLoader's num_workers. 0: the worker loads itself.",
    )
    prefetch: PositiveInt = Field(default=2, description="Batches that each process loads ahead.")
    pin_memory: Literal["auto"] | bool = Field(
        default="auto", description="Load batches into pinned memory. auto: if the worker has a GPU."
    )
    persistent: bool = Field(default=True, description="Keep the processes from one epoch to the next.")
    context: Literal["fork", "spawn", "forkserver"] | None = Field(
        default=None, description="How the processes are started. null: the system's default."
    )
