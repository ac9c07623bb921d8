"""The keys of a job: the type, the default and the meaning of each, in `JobKeys`, as strict frozen models.

The job file's reference and its JSON schema are made from these descriptions. Above `JobKeys` stand its parts, which
are mappings with keys of their own; and a `Target`, which names something to be called with args.
"""

import functools
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)

from dp_ray.job.args import DescribedArgs, describe_args, found_name, object_in

TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

# Whose form a description of a job has: this version's, or that of 0.2, as its runs keep it.
Form = Literal["now", "0.2"]
FORMS: tuple[Form, ...] = get_args(Form)

TargetText = Annotated[str, Field(pattern=f"^{TARGET.pattern}$")]


class Strict(BaseModel):
    """A frozen model in which unknown keys and wrong types are errors; the text below a key is its description."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True, use_attribute_docstrings=True
    )


class Target(Strict):
    """What to call, with `args` as keywords: `module:attribute`, or from Python a class or function itself."""

    EXAMPLE: ClassVar[str] = "jobs.digits:Net"
    AS_BEFORE: ClassVar[tuple[tuple[str, Any], ...]] = ()  # keys that 0.2 did not have, and what its runs have
    APART: ClassVar[tuple[str, ...]] = ("target",)  # keys that are described apart from the others

    target: Annotated[Any, WithJsonSchema({"type": "string", "pattern": f"^{TARGET.pattern}$"})]
    """`module:attribute`, imported from the current folder. From Python, a class or function too."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keywords with which the target is called."""
    _described: DescribedArgs = PrivateAttr()
    _found: str | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _opened(cls, values: Any) -> Any:
        return _without_partial(values)

    @model_validator(mode="after")
    def _checked(self) -> "Target":
        if not (TARGET.fullmatch(self.target) if isinstance(self.target, str) else _is_called(self.target)):
            or_object = "" if isinstance(self.target, str) else ", or a class or function"
            raise ValueError(f"must be 'module:attribute', like {self.EXAMPLE!r}{or_object}, got {self.target!r:.80}")
        try:
            # Before anything is called with the args: it may change them in place.
            told = {key: value for key, value in self if key not in self.APART and (key, value) not in self.AS_BEFORE}
            self._described = describe_args(told)
        except RecursionError:
            raise ValueError("args: must be plain YAML values, got some that are nested too deeply") from None
        # Once, on the driver: a worker that got the class by its code does not find it by its name.
        found = None if isinstance(self.target, str) else found_name(self.target)
        self._found = found if found is not None and TARGET.fullmatch(found) else None
        return self

    @property
    def untold(self) -> tuple[str, ...]:
        """The paths of Python objects in the args of which a file cannot tell whether they are the same."""
        return self._described.unknown

    @property
    def holds_objects(self) -> bool:
        """Whether its args hold more than plain values."""
        return object_in(self._described.values) is not None

    @property
    def is_named(self) -> bool:
        """Whether it is a name, not a class or function from Python."""
        return isinstance(self.target, str)

    @property
    def is_told(self) -> bool:
        """Whether a file tells it: by its name, or as a class or function that an import finds under its name."""
        return self.is_named or self._found is not None

    @property
    def label(self) -> str:
        """Its name, for messages."""
        return self.target if isinstance(self.target, str) else _qualified(self.target)


def _is_called(value: Any) -> bool:
    """Return whether a Python object is called with args; other objects are used as they are."""
    return inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, functools.partial)


def _without_partial(values: Any) -> Any:
    """Return a target's values, of which a partial is its function or class, and its keywords are args."""
    function = values.get("target") if isinstance(values, dict) else None
    if not isinstance(function, functools.partial) or (keywords := _keywords(function)) is None:
        return values
    return {**values, "target": function.func, "args": {**keywords, **values.get("args", {})}}


def _keywords(function: functools.partial[Any]) -> dict[str, Any] | None:
    """Return the arguments of a partial as keywords; None if they cannot be: a function gets others first."""
    if not function.args or not inspect.isclass(function.func):
        return None if function.args else function.keywords
    try:
        takes = inspect.signature(function.func)
        arguments = takes.bind_partial(*function.args, **function.keywords).arguments
    except (TypeError, ValueError):
        return None
    by_name = all(takes.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for name in arguments)
    return dict(arguments) if by_name else None


def _qualified(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def target_parser(cls: type[Target]) -> BeforeValidator:
    """Return the validator of a key that holds a target of this class, or an object from Python."""

    def parse(value: Any) -> Any:
        """Make text, a mapping, a class or a function a target; leave other objects as they are."""
        if isinstance(value, str) or _is_called(value):
            return cls(target=value)
        if isinstance(value, Mapping):
            named = [target.get("target") if isinstance(target, Mapping) else target for target in value.values()]
            are_targets = [
                TARGET.fullmatch(name) if isinstance(name, str) else hasattr(name, "__len__") for name in named
            ]
            if len(value) > 1 and "target" not in value and all(are_targets) and "args" not in value:
                kind = type(value).__qualname__
                raise ValueError(f"must be one target, got a {kind} of {', '.join(map(str, value))}")
            return cls.model_validate(dict(value))
        if value is None or isinstance(value, int | float):
            raise ValueError(f"must be a target, like {{target: 'jobs.digits:Net', args: {{}}}}, got {value!r}")
        return value

    return BeforeValidator(parse, json_schema_input_type=TargetText | cls)


Targeted = Annotated[Any, target_parser(Target)]


def describe_target(value: Any, form: Form = "now") -> Any:
    """Return a target as plain JSON values; an object from Python that no import finds is shown as its type.

    Version 0.2 showed every class and function so.
    """
    if value is None:
        return None
    if not isinstance(value, Target):
        return f"<{_qualified(value)}>"
    is_told = value.is_told if form == "now" else value.is_named
    apart = {key: describe_target(getattr(value, key), form) for key in value.APART if key != "target"}
    return {"target": value.label if is_told else f"<{value.label}>", **value._described.values, **apart}


class Compared(Target):
    """A target that is a function of (outputs, target)."""

    EXAMPLE: ClassVar[str] = "torch.nn:CrossEntropyLoss"
    AS_BEFORE: ClassVar[tuple[tuple[str, Any], ...]] = (("over", "shard"),)

    over: Literal["shard", "batch"] = "shard"
    """What it sees at once. shard: the rows of a shard. batch: those of the whole global batch, of all workers, in
    order; it returns one number."""


ComparedKey = Annotated[Any, target_parser(Compared)]


class Reduced(Target):
    """A target that gives the loss of a shard."""

    EXAMPLE: ClassVar[str] = "mine:step"
    AS_BEFORE: ClassVar[tuple[tuple[str, Any], ...]] = (("reduction", "mean"),)

    reduction: Literal["mean", "sum"] = "mean"
    """What the loss of the whole batch is. mean: that over its rows. sum: each shard gives a sum over its rows, or
    numbers to sum up, and the gradient is that of the sum over all rows. `epoch_loss` and `eval_loss` are then sums
    divided by rows."""


class LossTarget(Compared, Reduced):
    """The loss: a function of (outputs, target), or one of torch's."""

    AS_BEFORE: ClassVar[tuple[tuple[str, Any], ...]] = (*Compared.AS_BEFORE, *Reduced.AS_BEFORE)

    @model_validator(mode="before")
    @classmethod
    def _summed(cls, values: Any) -> Any:
        """Make the args `reduction: sum` of a loss of torch the key `reduction`; over the batch torch takes them."""
        opened = _without_partial(values)
        args = opened.get("args") if isinstance(opened, dict) and opened.get("over") != "batch" else None
        if not isinstance(args, dict) or "reduction" not in args:
            return opened
        target, of_args = opened.get("target"), args["reduction"]
        label = target if isinstance(target, str) else str(getattr(target, "__module__", ""))
        key = opened.get("reduction")
        if not label.startswith("torch.nn") or "sum" not in (key, of_args):
            return opened
        if of_args not in ("none", key or of_args):
            raise ValueError(f"args.reduction is {of_args!r}, and reduction {key!r}; leave one of them out")
        return {**opened, "args": {name: args[name] for name in args if name != "reduction"}, "reduction": "sum"}

    @model_validator(mode="after")
    def _sums_shards(self) -> "LossTarget":
        if self.reduction == "sum" and self.over == "batch":
            raise ValueError(
                "reduction: sum is of a loss of each shard; with over: batch the loss sees the whole batch, and the "
                "gradient is that of the one number that it returns, a sum or a mean; leave one of them out"
            )
        return self


LossKey = Annotated[Any, target_parser(LossTarget)]
StepKey = Annotated[Any, target_parser(Reduced)]


def is_over_batch(compared: Any) -> bool:
    """Return whether a loss or metric of a job sees the rows of the whole batch at once."""
    return isinstance(compared, Compared) and compared.over == "batch"


def _compiles(match: str) -> str:
    try:
        re.compile(match)
    except re.error as error:
        raise ValueError(f"must be a regular expression, got {match!r}: {error}") from None
    return match


Pattern = Annotated[str, AfterValidator(_compiles)]


class Group(Strict):
    """Parameters with optimizer args of their own."""

    match: Pattern
    """A regular expression that is searched in the parameters' names."""
    args: dict[str, Any]
    """The optimizer's args for these parameters."""


class Optimizer(Target):
    """A target that is called with the trainable parameters and `args`."""

    EXAMPLE: ClassVar[str] = "torch.optim:Adam"

    groups: list[Group] = Field(default_factory=list)
    """Parameters with args of their own. A parameter belongs to the first group whose `match` finds it."""


class Shape(Strict):
    """The short form of a scheduler: a warm-up, and then a shape, over all updates of the training."""

    shape: Literal["cosine", "linear", "constant"] = "constant"
    """In place of a target: how the learning rate goes on after the warm-up. cosine and linear: down to 0 at the
    training's end. constant: it stays."""
    warmup: Annotated[float, Field(ge=0, lt=1)] | PositiveInt = 0.0
    """In place of a target: the updates in which the learning rate rises to the optimizer's, in equal steps. A share
    of all updates, below 1, or their number."""


class Scheduler(Target):
    """A target that is called with the optimizer and `args`."""

    EXAMPLE: ClassVar[str] = "torch.optim.lr_scheduler:StepLR"
    PLATEAU: ClassVar[str] = "torch.optim.lr_scheduler:ReduceLROnPlateau"
    SHAPED: ClassVar[str] = "dp_ray.engine.optimizer:warmed_up"  # what the short form calls; it stands in run.json
    LENGTHS: ClassVar = ("T_max", "total_steps", "total_iters", "num_training_steps")

    per: Literal["step", "epoch"] = "step"
    """Step the scheduler after each step, or each epoch."""
    metric: str | None = None
    """What a ReduceLROnPlateau watches: `loss`, the epoch's mean, or a metric that `eval` measures, like `eval_loss`.
    It needs `scheduler.per: epoch`."""

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
        """Return the same with the length of the training in place of `auto`."""
        numbers = {name: length for name, value in self.lengths.items() if isinstance(value, str) and value == "auto"}
        return self.model_copy(update={"args": {**self.args, **numbers}})

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
    """Return the short form `scheduler: {warmup: 0.05, shape: cosine}` as the target that makes it."""
    if not isinstance(value, Mapping) or "target" in value or not Shape.model_fields.keys() & value.keys():
        return value
    if others := [str(key) for key in value if key not in Shape.model_fields]:
        raise ValueError(
            f"a target, or the short form with the keys shape and warmup alone; got {', '.join(others)} too"
        )
    args = Shape.model_validate(dict(value)).model_dump()
    return {"target": Scheduler.SHAPED, "args": {**args, "total_steps": "auto"}}


SchedulerKey = Annotated[
    Any, target_parser(Scheduler), BeforeValidator(_shaped, json_schema_input_type=TargetText | Scheduler | Shape)
]


class MatchedOptimizer(Optimizer):
    """One of several optimizers: of the parameters that its `match` finds, and that of no earlier one has found."""

    APART: ClassVar = ("target", "scheduler")

    match: Pattern | None = None
    """In a list of optimizers: a regular expression that is searched in the parameters' names. A parameter belongs to
    the first optimizer whose `match` finds it. The last one may have none: it gets the rest."""
    scheduler: SchedulerKey | None = None
    """In a list of optimizers: the scheduler of this one alone, in place of the job's `scheduler`."""


def _each_optimizer(value: Any) -> Any:
    """Return a list of optimizers as a tuple of targets, each with a `match`; leave all else as it is."""
    if not isinstance(value, list | tuple):
        return value
    if not value:
        raise ValueError("is an empty list; give one optimizer or more")
    return TypeAdapter(tuple[Annotated[Any, target_parser(MatchedOptimizer)], ...]).validate_python(tuple(value))


OptimizerKey = Annotated[
    Any,
    target_parser(Optimizer),
    BeforeValidator(
        _each_optimizer, json_schema_input_type=TargetText | Optimizer | list[TargetText | MatchedOptimizer]
    ),
]


def _metric(value: Any) -> Any:
    """Return the short form `best: eval_loss` as a mapping."""
    return {"metric": value} if isinstance(value, str) else value


def path_text(value: Any) -> Any:
    """Return a path, or the run directory of a Result, as text."""
    if hasattr(value, "run_dir"):
        return getattr(value, "location", "") or value.run_dir
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class Best(Strict):
    """The metric by which a training keeps its best weights."""

    metric: str
    """A metric that `eval` measures, like `eval_loss` or `eval_accuracy`."""
    mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest value is best."""


class CheckpointKeys(Strict):
    """When a training writes checkpoints, besides at its end, and which it keeps."""

    every_steps: PositiveInt | None = None
    """Write a checkpoint every so many steps."""
    every_seconds: Literal["auto"] | NonNegativeFloat | None = "auto"
    """Write a checkpoint every so many seconds. null: never by the clock. auto: every 300 s; without `every_steps`
    also at each epoch's end, and more often if that costs at most 1 % of the time."""
    keep: PositiveInt = 2
    """How many checkpoints are kept: the newest ones. With `best` the best one is kept beside them."""
    best: Annotated[Best, BeforeValidator(_metric, json_schema_input_type=str | Best)] | None = None
    """Also keep the best weights, `best.safetensors`: by `eval_loss`, or `{metric: eval_accuracy, mode: max}`. The
    search for the best starts again if metric or mode change."""


def _share(value: Any) -> Any:
    """The short form `audit: 0.01` as a mapping."""
    return {"share": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class AuditKeys(Strict):
    """How many steps are audited, and what follows."""

    share: Annotated[float, Field(ge=1e-6, le=1)]
    """The share of the steps in which one worker runs a part of another one's batch again."""
    rewind: bool = True
    """Whether a training goes back to a checkpoint from before the first suspect step. false: a line names these
    steps, and they stay."""


class OnError(Strict):
    """What becomes of bad samples: they are set aside, up to a limit."""

    quarantine: PositiveInt
    """The most samples that are set aside. One more ends the job. A sample counts once a run."""
    finite: bool = False
    """Whether a sample with a NaN or an infinity in its floating numbers is bad."""


class Timeouts(Strict):
    """How long a step may take, and how long to wait for nodes and workers that were lost."""

    step: PositiveFloat | None = 600
    """Seconds in one step after which a worker counts as hung. null: no limit."""
    capacity: PositiveFloat | None = 600
    """Seconds to wait for capacity after nodes were lost, if no autoscaler can add nodes. null: no limit."""
    rejoin: Annotated[float, Field(ge=3)] = 10
    """Where survivors go on, seconds without a sign of a worker, after which they go on without it."""


def _blocks(value: Any) -> Any:
    """The short form `shuffle: blocks` as a mapping."""
    return {} if value == "blocks" else value


class ShuffleBlocks(Strict):
    """A shuffle of blocks of consecutive samples, and then of the samples in windows of blocks."""

    window_blocks: PositiveInt = 16
    """How many blocks are shuffled into each other at a time. Each shard draws from its own share of them."""
    block_rows: PositiveInt | None = None
    """Samples in a block. null: the blocks that the dataset's `block_rows` names, like row groups."""


BlocksKey = Annotated[
    ShuffleBlocks, BeforeValidator(_blocks, json_schema_input_type=Literal["blocks"] | ShuffleBlocks)
]


def _by_name(value: Any) -> Any:
    """Return the names of metrics; the metrics themselves are the job's."""
    if isinstance(value, Mapping | Target):
        raise ValueError("must be a list of names of the job's metrics; define them in its own key `metrics`")
    return value


class Eval(Strict):
    """When and on which dataset a training evaluates its model, besides at its end."""

    dataset: Targeted
    """The dataset to evaluate on, which task evaluate uses too."""
    every_steps: PositiveInt | None = None
    """Evaluate every so many steps."""
    every_epochs: PositiveInt | None = None
    """Evaluate every so many epochs. Default: 1 if `every_steps` is not set."""
    batch_size: PositiveInt | None = None
    """Samples in a global batch of an evaluation. Default: the job's `batch_size`."""
    metrics: Annotated[list[str], BeforeValidator(_by_name)] | None = None
    """Which of the job's `metrics` it measures, by their names. null: all."""


EVAL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class NamedEval(NamedTuple):
    """An evaluation of a job: its name, "" of a single one, and its keys, as an Eval or as a file describes them."""

    name: str
    keys: Any

    @property
    def key(self) -> str:
        """The dotted key of the evaluation."""
        return f"eval.{self.name}" if self.name else "eval"

    @property
    def dataset_key(self) -> str:
        """The dotted key of its dataset."""
        return f"{self.key}.dataset"

    @property
    def prefix(self) -> str:
        """What stands before each name of what it measures, as in `eval_loss` and `eval_test_loss`."""
        return f"eval_{self.name}_" if self.name else "eval_"

    @property
    def of(self) -> str:
        """What stands before a place in it, in errors."""
        return f"evaluation {self.name}, " if self.name else "evaluation "


def named_evals(given: "Eval | Mapping[str, Any] | None") -> tuple[NamedEval, ...]:
    """Return the evaluations of a job's `eval`, or of one that a file describes; none if it has none."""
    if not given:
        return ()
    several = {"": given} if isinstance(given, Eval) or "dataset" in given else given
    return tuple(NamedEval(name, keys) for name, keys in several.items())


def measured_by(evals: Iterable[NamedEval], column: str) -> NamedEval | None:
    """Return which of the evaluations measures a column of the history: of several names the longest one counts."""
    fitting = [each for each in evals if column.startswith(each.prefix)]
    return max(fitting, key=lambda each: len(each.name), default=None)


def _several(value: Any) -> Any:
    """Return an `eval` as a single evaluation, or as several by name."""
    if not isinstance(value, Mapping):
        return value
    of_single = [key for key in value if key in Eval.model_fields]
    evals = [
        key for key, keys in value.items() if isinstance(keys, Eval) or (_is_for_eval(keys) and "dataset" in keys)
    ]
    if taken := [key for key in of_single if key in evals]:
        raise ValueError(f"{taken[0]!r} is a key of an evaluation, so none can have this name; rename it")
    if of_single and evals:
        raise ValueError(
            f"has {of_single[0]!r}, a key of a single evaluation, beside the evaluation {evals[0]!r}; give each a "
            "name, like {test: {dataset: ...}, hard: {dataset: ...}}"
        )
    if of_single or not (evals or any(_is_for_eval(keys) for keys in value.values())):
        return Eval.model_validate(dict(value))
    if bad := [name for name in value if not EVAL_NAME.fullmatch(str(name))]:
        raise ValueError(f"an evaluation's name must be a word of letters, digits, '_' and '-', got {bad[0]!r}")
    return TypeAdapter(dict[str, Eval]).validate_python(dict(value))


def _is_for_eval(value: Any) -> bool:
    """Return whether a value is meant as an evaluation's keys, and not as a target."""
    return isinstance(value, Mapping) and "target" not in value


EvalKey = Annotated[Eval | dict[str, Eval], BeforeValidator(_several, json_schema_input_type=Eval | dict[str, Eval])]


class EarlyStopping(Strict):
    """Stop a training once a metric is good enough, or has not improved for a while."""

    metric: str
    """A metric that `eval` measures, like `eval_loss`; or `epoch_loss`, the epoch's mean, which `loss` names too."""
    every: Literal["step"] | None = None
    """step: where the metric is `loss`, that of each step, not the epoch's mean. A GPU's is waited for."""
    below: FiniteFloat | None = None
    """Stop once the metric is below this."""
    patience: PositiveInt | None = None
    """How many evaluations in a row may bring no improvement; of `epoch_loss`, how many epochs. With `every`, how
    many steps. Needed without `below`."""
    min_delta: NonNegativeFloat = 0.0
    """By how much at least a value must be better than the best one to be an improvement."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger values are better."""

    @property
    def column(self) -> str:
        """The metric's name in the history."""
        return "epoch_loss" if self.metric == "loss" and self.every is None else self.metric


class Ema(Strict):
    """The exponential moving average of the weights."""

    decay: Annotated[float, Field(ge=0, lt=1)]
    """The share of the average that stays in each update: average = decay * average + (1 - decay) * weights."""
    evaluate: bool = True
    """Evaluate the average during the training, in place of the weights."""


class Hooks(Strict):
    """Functions of your own that are called on rank 0 with a view of the training, which they cannot change."""

    on_step: Targeted | None = None
    """Called after each step."""
    on_evaluate: Targeted | None = None
    """Called after each evaluation, and once after several that follow the same step."""
    on_end: Targeted | None = None
    """Called once the training has ended, and its weights are written."""

    @property
    def given(self) -> dict[str, Any]:
        """The hooks that are set, by their names."""
        return {name: target for name, target in self if target is not None}


class Elastic(Strict):
    """As many workers as the cluster has room for, between `min` and `max`."""

    min: PositiveInt
    """The fewest workers with which the job runs."""
    max: PositiveInt
    """The most workers with which the job runs."""

    @model_validator(mode="after")
    def _in_order(self) -> "Elastic":
        if self.min > self.max:
            raise ValueError(f"min must not be above max, got min {self.min} and max {self.max}")
        return self


class MixedPrecision(Strict):
    """The dtypes in which `fsdp` gathers parameters and sums gradients."""

    param: Literal["bf16", "fp16"] | None = None
    """The dtype of the gathered parameters, and so of the model's work. null: their own."""
    reduce: Literal["fp32", "bf16", "fp16"] | None = None
    """The dtype in which gradients are summed. null: that of the gathered parameters."""


class Fsdp(Strict):
    """How `strategy: fsdp` shards a model over the workers."""

    blocks: Literal["auto"] | Annotated[list[str], Field(min_length=1)] = "auto"
    """The classes of the modules that are gathered as one, by name. auto: those that the model's `_no_split_modules`
    names, else the items of its ModuleLists and Sequentials."""
    reshard_after_forward: Literal["auto"] | bool = "auto"
    """Whether a block's parameters are freed after its forward, and gathered again for its backward. auto: yes,
    except for those outside the blocks."""
    offload: bool = False
    """Keep parameters, gradients and the optimizer's state in the host's memory."""
    mixed_precision: MixedPrecision | None = None
    """Gather parameters and sum gradients in other dtypes. null: in their own."""


class ActivationBudget(Strict):
    """How many blocks keep their activations, where the others compute theirs again."""

    budget: Annotated[float, Field(ge=0, le=1)]
    """The share of the blocks that keep their activations: the last ones of the model. 0 is `true`, 1 is `false`."""


class Loader(Strict):
    """The torch DataLoader of each worker."""

    processes: NonNegativeInt = 0
    """Processes that load data for each worker: DataLoader's num_workers. 0: the worker loads itself."""
    prefetch: PositiveInt = 2
    """Batches that each process loads ahead."""
    pin_memory: Literal["auto"] | bool = "auto"
    """Load batches into pinned memory. auto: if the worker has a GPU."""
    persistent: bool = True
    """Keep the processes from one epoch to the next."""


class Outputs(Strict):
    """What is kept of a prediction's outputs, and how it is written."""

    after: Targeted | None = None
    """A function of a shard's outputs, on its device: what it returns is kept in their place. If it has a parameter
    `inputs`, it gets the model's inputs too."""
    ragged: bool = False
    """Lists in the outputs have an entry for each row, like the boxes in each image. Entries may differ in size, and
    may be dicts, texts or numbers. false: the tensors in a list hold all rows each, and a list of texts is one for
    each row."""
    keep: Annotated[list[str], Field(min_length=1)] | None = None
    """The outputs that are kept, by path, like `[logits, hidden_states.0]`, or `hidden_states.*`. null: all of
    them."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None
    """The type in which floating outputs are kept. null: as the model gives them."""
    carry: Annotated[list[str], Field(min_length=1)] | None = None
    """Keys of the dataset's items whose values are written beside each row, like `[id, path]`: numbers, text, truth
    values, lists of these."""
    file_bytes: PositiveInt = 1 << 30
    """About how many bytes each file of the outputs has. A resumed run keeps the files with which it began."""

    @model_validator(mode="after")
    def _carries_once(self) -> "Outputs":
        if twice := [key for key in self.carry or () if (self.carry or []).count(key) > 1]:
            raise ValueError(f"carry names {twice[0]!r} twice")
        return self


class Pack(Strict):
    """Rows of tokens, joined to windows of one length: a window is then a sample of the job."""

    length: PositiveInt
    """The tokens of a window."""
    how: Literal["cut", "whole"]
    """cut: all rows are one stream, which is cut anywhere. whole: rows stay whole; those that fill a window best are
    joined."""
    fields: Annotated[list[str], Field(min_length=1)] = ["input_ids"]
    """The keys of an item that hold a value for each token. The first one holds the tokens."""

    @model_validator(mode="after")
    def _has_fields_once(self) -> "Pack":
        if twice := [name for name in self.fields if self.fields.count(name) > 1]:
            raise ValueError(f"fields names {twice[0]!r} twice")
        if taken := [name for name in self.fields if name in self.ADDED]:
            raise ValueError(f"fields names {taken[0]!r}, which a window has of its own; rename it in the dataset")
        if self.fields[0] == self.LABELS:
            raise ValueError("fields: the first one is to hold the tokens, got 'labels'")
        return self

    ADDED: ClassVar[tuple[str, ...]] = ("position_ids", "document_ids")
    LABELS: ClassVar[str] = "labels"


class WorkKeys(Strict):
    """What to run, on what data, and how it is cut."""

    name: str | None = None
    """Name of the run: its directory is STORAGE/NAME. Default: the job file's name; from Python, the time."""
    task: Literal["predict", "evaluate", "train"] = "predict"
    """What to do; left out, `train` for a job with an `optimizer` or a `loop`. A key that only another task needs is
    ignored, so one file serves all three. evaluate uses `eval.dataset` and `eval.batch_size` if there is an
    `eval`."""
    model: Targeted
    """A class or function that gives a torch.nn.Module. For a TorchScript file: `torch.jit:load` with args `{f:
    PATH}`."""
    dataset: Targeted
    """A class or function that gives a map-style dataset, with `__len__` and `__getitem__`. `__getitems__` is used if
    there is one."""
    batch_size: PositiveInt
    """Samples in a global batch, over all workers."""
    shards: PositiveInt | Literal["auto"] | None = None
    """Pieces into which each global batch is cut. Default: the largest number of workers. auto: the fewest that fit
    the workers' GPUs, which the run finds once before its first step. A resumed run keeps the number with which it
    began."""


class WorkerKeys(Strict):
    """On what to run: the workers, and what each of them takes from the cluster."""

    workers: NonNegativeInt | Elastic = 1
    """Number of workers. A range, like `{min: 1, max: 8}`, grows and shrinks with the cluster. 0 runs in this
    process, without Ray."""
    gpus_per_worker: Literal["auto"] | NonNegativeFloat = "auto"
    """GPUs of each worker. auto: 1 if the cluster has GPUs or its autoscaler may add some, else 0. 2 or more: for a
    model over several GPUs. 0.5: two workers share a GPU, and communicate by gloo."""
    cpus_per_worker: NonNegativeFloat = 1
    """CPUs that Ray reserves for each worker, and the threads of torch on it. With `workers: 0` torch keeps its own
    number, but with `bitwise`."""
    resources_per_worker: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Other Ray resources of each worker, like `{slot: 1}`."""
    accelerator_type: str | None = None
    """Use only nodes with this type of accelerator, as Ray names it, like `A100`."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy: workers on as few nodes as possible, or on as many. STRICT_PACK needs one node for
    all workers, STRICT_SPREAD a node for each."""
    devices: Annotated[list[str], Field(min_length=1)] | None = None
    """The devices of each worker, by hand: `[cpu]`, or `[cuda:0, cpu]` for a model over both. With several workers
    `cuda:0` is the first of a worker's own GPUs, which Ray reserves; else it is the machine's."""
    timeouts: Timeouts = Timeouts()
    """How long a step may take, and how long to wait for nodes and workers that were lost."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables of the workers, and of the driver while it builds the dataset. Their values are not kept
    in the run directory."""

    @property
    def min_workers(self) -> int:
        """The fewest workers with which the job runs."""
        return self.workers.min if isinstance(self.workers, Elastic) else self.workers

    @property
    def max_workers(self) -> int:
        """The most workers with which the job runs."""
        return self.workers.max if isinstance(self.workers, Elastic) else self.workers

    @property
    def num_devices(self) -> int:
        """Devices of each worker over which its model is placed."""
        if self.devices is not None:
            return len(self.devices)
        return 1 if self.gpus_per_worker == "auto" else max(1, int(self.gpus_per_worker))

    @property
    def asks_for_gpus(self) -> bool:
        """Whether the job names GPUs or their number, so that it does not run where there are none."""
        return self.gpus_per_worker not in ("auto", 0) or any(
            gpu_number(device) is not None for device in self.devices or ()
        )

    def takes_gpus(self, gpus_per_worker: float) -> bool:
        """Return whether the job computes on GPUs, on workers of so many GPUs each."""
        types = {name.partition(":")[0] for name in self.devices or ()}
        return types != {"cpu"} if types else gpus_per_worker > 0 and self.gpus_per_worker != 0

    @property
    def own_gpus(self) -> int:
        """How many GPUs of its own each worker needs for its `devices`; 0 if a worker is alone on its node.

        The devices of such a worker are those of its machine, as they are named. Others would take the same GPU.
        """
        if self.max_workers < 2 or self.placement == "STRICT_SPREAD":
            return 0
        return max((number + 1 for number in map(gpu_number, self.devices or ()) if number is not None), default=0)


class ModuleKeys(WorkerKeys):
    """On what parallel modules run, if their workers are there for them alone."""


def runs_anywhere(gpus: float = 1) -> str:
    """How to change a job that asks for GPUs where there are too few."""
    if gpus > 1:
        return "to try the model without them, set devices: [cpu, cpu], a device for each, and no gpus_per_worker"
    return "with gpus_per_worker: auto and no devices the same file runs anywhere, and takes GPUs where there are any"


def gpu_number(device: str) -> int | None:
    """The number in a GPU's name, as of `cuda:1`, which is 0 in `cuda`; None for another device."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" and (number.isdecimal() or not number) else None


class JobKeys(WorkerKeys, WorkKeys):
    """The keys of a job, each by itself; `Job` adds what must hold among them."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the samples' order, of the model's initial weights and of all other random numbers."""
    shuffle: bool | BlocksKey = False
    """train only: take the samples in another random order in each epoch. blocks: shuffle blocks, like the row groups
    of files, and the samples in windows of them."""
    order: Literal["dataset", "shuffled"] = "dataset"
    """predict and evaluate only: take the samples in the dataset's order, or shuffled."""
    drop_last: bool = False
    """Drop an epoch's last global batch if it is smaller than `batch_size`."""
    pack: Pack | None = None
    """Join rows of tokens to windows of one length, like `{length: 2048, how: cut}`. Those of `eval.dataset` too."""
    epochs: PositiveInt = 1
    """train only: how many times to go through the dataset. With more of them a finished run goes on."""
    max_steps: PositiveInt | None = None
    """train only: the most steps in all. null: no limit. With more of them a finished run goes on."""

    inputs: Literal["auto", "all", "first"] | Annotated[list[str], Field(min_length=1)] = "auto"
    """What the model gets: all of an item, or the first of a pair (input, target). A list picks values of a dict: of
    `[image]` the value itself, of several keys a dict. auto: first in train and evaluate. In predict auto follows the
    model's `forward`, and a line says if the target is left out."""
    target: str | Annotated[list[str], Field(min_length=1)] | None = None
    """The key of an item's target, like `label`, if `inputs` is a list of keys; several give a dict."""
    call: Literal["auto", "args", "kwargs"] = "auto"
    """How the model is called. args: `model(*inputs)`. kwargs: `model(**inputs)`. auto: args for a tuple or list, but
    not for one of texts, else `model(inputs)`."""
    collate: Targeted | None = None
    """A function that makes a batch of a list of samples, those of a shard, or a class of such; its args are
    keywords. Default: torch's default_collate."""
    batch_dim: NonNegativeInt = 0
    """The dimension of tensors that holds the rows, as `dim` of nn.DataParallel. One-dimensional tensors hold them in
    dimension 0."""
    loader: Loader = Loader()
    """The torch DataLoader of each worker."""
    on_error: OnError | None = None
    """Set samples aside that raise, hang or cannot be collated, like `{quarantine: 100}`, and go on without them.
    null: such a sample ends the job."""

    skip: (
        Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(lambda given: sorted(set(given)))] | None
    ) = None
    """train only: samples of `dataset` to leave out, by their indices, like `[812, 1007]`. They are not read, and
    count with weight 0."""
    stop_on_nan: bool = False
    """train only: end the run with an error at the first step whose loss is NaN or infinite. No checkpoint of that
    step or a later one is kept."""

    loss: LossKey | None = None
    """A function of (outputs, target) that returns a number for each row or element, or (sum, weight). A loss of
    torch.nn or torch.nn.functional, named as a target, is built to do so. With `loss.reduction: sum` it returns a
    sum. With `loss.over: batch` it sees the outputs of the whole batch and returns one number, as contrastive losses
    do."""
    step: StepKey | None = None
    """A function `step(model, batch)` in place of the model's call and the loss, for items or models of another
    kind. Beside a loss over the batch, it returns the outputs and the target."""
    metrics: dict[str, ComparedKey] = Field(default_factory=dict)
    """Metrics by name. Each returns what a loss returns, or is a torchmetrics class, which needs the extra `metrics`.
    Those and metrics over the batch are measured in evaluations only. A name must not be a column of the history."""
    eval: EvalKey | None = None
    """Evaluate the model during a training and at its end. Several evaluations have names: `{test: {dataset: ...},
    hard: {dataset: ...}}`. What `hard` measures is `eval_hard_loss` and so on."""
    evaluation: str | None = None
    """evaluate only: the name of the evaluation to run, if `eval` has several."""
    loop: Targeted | None = None
    """train only: a function of a `dp_ray.Loop`, which trains in its own way: with several losses and optimizers, as
    of a GAN. It is in place of loss, step, optimizer, scheduler and grad_clip."""
    optimizer: OptimizerKey | None = None
    """A class or function that is called with the trainable parameters. train needs one. Or a list of several, each
    of the parameters that its `match` finds."""
    scheduler: SchedulerKey | None = None
    """A class or function that is called with the optimizer and gives a learning rate scheduler; or `{warmup: 0.05,
    shape: cosine}`. Its args `T_max`, `total_steps`, `total_iters` and `num_training_steps` may be `auto`: how often
    the training steps it in all."""
    early_stopping: EarlyStopping | None = None
    """train only: end the training once a metric has not improved for a while, like `{metric: eval_loss, patience:
    3}`. Or once it is good enough, like `early_stopping: {metric: loss, every: step, below: 0.1}`. With more
    patience, or a smaller `below`, a run that it has ended goes on."""
    ema: Ema | None = None
    """train only: also keep the exponential moving average of the weights, `ema.safetensors`, like `{decay: 0.999,
    evaluate: true}`."""
    hooks: Hooks = Hooks()
    """train only: functions that rank 0 calls with a view of the training, like `{on_step: 'my_hooks:log'}`."""
    grad_clip: PositiveFloat | None = None
    """The largest norm of the whole batch's gradient. null: gradients are not clipped."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 run the model under autocast. fp16 adds a loss scaler on which all workers agree."""
    activation_checkpointing: bool | Annotated[list[str], Field(min_length=1)] | ActivationBudget = False
    """train only: blocks keep their inputs alone, and their backward runs their forward again. true: the blocks that
    `fsdp.blocks: auto` finds. A list names their classes. The numbers stay the same bits."""
    compile: bool = False
    """Compile the model with torch.compile."""
    sync_batchnorm: bool = False
    """BatchNorm over the whole global batch, for GPUs only. Needs a worker for each shard."""
    find_unused_parameters: Literal["auto"] | bool = "auto"
    """Whether the model may leave parameters unused. auto: yes; a line names what no shard uses in the first
    step, or newly in a later one. true: without these lines. false: it is an error."""
    bucket_cap_mb: Annotated[float, Field(gt=0)] | None = None
    """Megabytes of gradients that several workers sum at once, while the backward goes on, as in torch's DDP. null:
    torch's own, which is 25 after a first one of 1."""
    bitwise: bool = False
    """Weights, losses and outputs are the same bits on any number of workers from 1 to `shards`."""
    audit: Annotated[AuditKeys, BeforeValidator(_share, json_schema_input_type=float | AuditKeys)] | None = None
    """train only: in a share of the steps one worker runs a part of another one's batch again, like `0.01`. A worker
    that computes other bits is found, and left out. It needs `bitwise: true`."""
    checkpoint: CheckpointKeys = CheckpointKeys()
    """When a training writes checkpoints, besides at its end, and which it keeps."""
    init_from: Annotated[str, Field(min_length=1), BeforeValidator(path_text)] | None = None
    """Start from a weights file (`.safetensors`, `.pt`), a run directory or a checkpoint. From Python, a Result
    too."""
    strict: bool = True
    """Whether `init_from` must have all of the model's weights and no others, as in torch's `load_state_dict`. false:
    load those that fit by name and size. A line names the others."""

    input_device: str | None = None
    """The device to which inputs go. Default: that of the model's first parameter."""
    device_map: Literal["auto"] | Annotated[list[str], Field(min_length=1)] | None = None
    """Place blocks of the model on the worker's devices, about the same bytes of parameters on each. auto: the
    children of a torch.nn.Sequential. A list names modules, in the order in which they run. null: the model places
    its parts itself."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each worker holds the whole model. fsdp: each worker holds a part of each parameter, of its gradient and
    of its optimizer state (torch's FSDP2, of torch 2.13 or newer)."""
    fsdp: Fsdp = Fsdp()
    """How `strategy: fsdp` shards the model over the workers."""

    outputs: Outputs = Outputs()
    """predict only: what is kept of the outputs, and how it is written."""
    on_lost_worker: Literal["go_on", "restart"] | None = None
    """What the others do where a worker is lost. go_on: they run the step in flight at once, from memory, and another
    worker comes in the place of the lost one. With `loop` or `strategy: fsdp` they read the newest checkpoint. It is
    for CPUs alone. restart: all workers start again from the newest checkpoint. Default: go_on on CPUs, restart on
    GPUs and with `shards: auto`."""
    retries: NonNegativeInt = 3
    """How many times all workers are started again, after a loss, a hang or an error that may pass, before the job
    fails."""
    flops: bool = False
    """train and predict: count the floating-point operations of a row. The first shard runs once more for it,
    without a trace in the result."""
    profile: str | None = None
    """Steps to trace with torch.profiler, and the rank: `10-20:3`, or `10-20:slowest` in a training. Without a rank:
    rank 0. slowest alone: five steps from step 10 on."""
    trackers: list[Literal["tensorboard", "mlflow", "wandb", "trackio"]] | None = None
    """Where a run's history goes besides its directory, like `[tensorboard, mlflow]`. null: tensorboard. The others
    are extras, which their own environment variables configure."""
    storage: Annotated[str, Field(min_length=1)] = "runs"
    """Folder or URL (`s3://...`, `gs://...`) of the run directories. All workers must share it."""

    @property
    def skipped(self) -> list[int]:
        """The samples that the job's task leaves out, by their indices, in order; none unless it is a training."""
        return (self.skip or []) if self.task == "train" else []

    @property
    def may_lose_rows(self) -> bool:
        """Whether shards may have fewer rows than the split says."""
        return bool(self.skipped) or self.on_error is not None
