"""The job: what to run, as strict frozen models; the only place that parses YAML, `--set` and keywords."""

import difflib
import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from dp_ray.errors import JobError
from dp_ray.key_hints import answer_to
from dp_ray.secrets import hide, hide_in

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# The history's own columns: a metric of a training has a column of its own.
COLUMNS = ("step", "epoch", "loss", "learning_rate", "gradient_norm", "rows", "rows_per_second", "epoch_loss")
TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Strict(BaseModel):
    """Unknown keys and wrong types are errors; a job never changes once made."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


class Target(Strict):
    """Something to call with `args` as keywords: `module:attribute`, or from Python a class or function itself."""

    target: Any
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _opened(cls, values: Any) -> Any:
        """The keywords of a partial are args."""
        given = values.get("target") if isinstance(values, dict) else None
        if not isinstance(given, functools.partial) or (keywords := _keywords(given)) is None:
            return values
        return {**values, "target": given.func, "args": {**keywords, **values.get("args", {})}}

    @model_validator(mode="after")
    def _is_a_target(self) -> "Target":
        if not (TARGET.fullmatch(self.target) if isinstance(self.target, str) else _is_called(self.target)):
            or_object = "" if isinstance(self.target, str) else ", or a class or function"
            raise ValueError(
                f"must be 'module:attribute', like 'jobs.digits:Net'{or_object}, got {self.target!r:.80}"
            )
        return self

    @property
    def is_named(self) -> bool:
        """Whether it is a name, and no class or function from Python."""
        return isinstance(self.target, str)

    @property
    def label(self) -> str:
        """Its name, for reading."""
        return self.target if isinstance(self.target, str) else _qualified(self.target)


def _is_called(value: Any) -> bool:
    """Whether a Python object is there to be called with args, rather than to be taken as it is."""
    return inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, functools.partial)


def _keywords(given: functools.partial[Any]) -> dict[str, Any] | None:
    """The arguments of a partial as keywords; None where they cannot be: a function gets others before them."""
    if not given.args or not inspect.isclass(given.func):
        return None if given.args else given.keywords
    try:
        takes = inspect.signature(given.func)
        found = takes.bind_partial(*given.args, **given.keywords).arguments
    except (TypeError, ValueError):
        return None
    by_name = all(takes.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for name in found)
    return dict(found) if by_name else None


def _qualified(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


class Group(Strict):
    """Parameters whose names the regular expression `match` finds, with optimizer args of their own."""

    match: str
    args: dict[str, Any]

    @model_validator(mode="after")
    def _is_a_pattern(self) -> "Group":
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match must be a regular expression, got {self.match!r}: {error}") from None
        return self


class Optimizer(Target):
    """A target that is called with the trainable parameters and `args`; the first group that matches counts."""

    groups: list[Group] = Field(default_factory=list)


class Scheduler(Target):
    """A target that is called with the optimizer and `args`, and stepped each `per`.

    `metric` is what a ReduceLROnPlateau watches: `loss` (the epoch's mean), or what `eval` measures.
    """

    per: Literal["step", "epoch"] = "step"
    metric: str | None = None


def _parser(cls: type[Target]) -> BeforeValidator:
    def parse(value: Any) -> Any:
        """Text, a mapping, a class or a function becomes a Target; another object stays what it is."""
        if isinstance(value, str) or _is_called(value):
            return cls(target=value)
        if isinstance(value, Mapping):
            return cls.model_validate(dict(value))
        if value is None or isinstance(value, int | float):
            raise ValueError(f"must be a target, like {{target: 'jobs.digits:Net', args: {{}}}}, got {value!r}")
        return value

    return BeforeValidator(parse)


Targeted = Annotated[Any, _parser(Target)]


def _metric(value: Any) -> Any:
    """`best: eval_loss` is the least of it."""
    return {"metric": value} if isinstance(value, str) else value


def _location(value: Any) -> Any:
    """A path, or the run directory of a Result, as text."""
    if hasattr(value, "run_dir"):
        return getattr(value, "location", "") or value.run_dir
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class Best(Strict):
    """The checkpoint to keep beside the newest: the one with the least, or the greatest, of a metric."""

    metric: str
    mode: Literal["min", "max"] = "min"


class Checkpoint(Strict):
    """When the state of a training is kept, beside at its end, and how many of them.

    `every_seconds: auto` without `every_steps`: as often as costs at most 1 % of the time measured, at the latest
    every 300 s, and at each epoch's end; with `every_steps`: every 300 s.
    """

    every_steps: PositiveInt | None = None
    every_seconds: Literal["auto"] | NonNegativeFloat | None = "auto"
    keep: PositiveInt = 2
    best: Annotated[Best, BeforeValidator(_metric)] | None = None


class Timeouts(Strict):
    """Seconds: in one step before it counts as a hang, and for room after workers were lost; null is for ever."""

    step: PositiveFloat | None = 600
    room: PositiveFloat | None = 600


class Eval(Strict):
    """A dataset on which a training's model is evaluated every so often, and at the end."""

    dataset: Targeted
    every_steps: PositiveInt | None = None
    every_epochs: PositiveInt | None = None
    batch_size: PositiveInt | None = None


class Elastic(Strict):
    """As many workers as the cluster has room for, between `min` and `max`."""

    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _in_order(self) -> "Elastic":
        if self.min > self.max:
            raise ValueError(f"min must not be above max, got min {self.min} and max {self.max}")
        return self


class Loader(Strict):
    """The torch DataLoader of each worker."""

    processes: NonNegativeInt = 0
    prefetch: PositiveInt = 2
    pin_memory: Literal["auto"] | bool = "auto"
    persistent: bool = True
    context: Literal["fork", "spawn", "forkserver"] | None = None


class Job(Strict):
    """One job: a model over a dataset, in global batches of `batch_size` rows cut into `shards` shards.

    Targets are `module:attribute` with args, or, from Python, classes, functions, partials and objects; the key
    `model_args` gives those of `model`, and likewise of the others. Keys of other tasks are left aside.
    Raises JobError, naming the key, what was got and what it may be, through `Job.make`.
    """

    name: str | None = None
    task: Literal["predict", "evaluate", "train"] = "predict"
    model: Targeted
    dataset: Targeted
    batch_size: PositiveInt
    shards: PositiveInt | None = None
    workers: NonNegativeInt | Elastic = 1
    gpus_per_worker: Literal["auto"] | NonNegativeFloat = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    shuffle: bool = False
    order: Literal["dataset", "shuffled"] = "dataset"
    drop_last: bool = False
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    inputs: Literal["auto", "all", "first"] = "auto"
    call: Literal["auto", "one", "args", "kwargs"] = "auto"
    collate: Targeted | None = None
    scatter: Literal["samples", "batch"] = "samples"
    batch_dim: NonNegativeInt = 0
    loader: Loader = Loader()
    loss: Targeted | None = None
    step: Targeted | None = None
    metrics: dict[str, Targeted] = Field(default_factory=dict)
    eval: Eval | None = None
    optimizer: Annotated[Any, _parser(Optimizer)] | None = None
    scheduler: Annotated[Any, _parser(Scheduler)] | None = None
    grad_clip: PositiveFloat | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    sync_batchnorm: bool = False
    find_unused_parameters: Literal["auto"] | bool = "auto"
    bitwise: bool = False
    checkpoint: Checkpoint = Checkpoint()
    init_from: Annotated[str, Field(min_length=1), BeforeValidator(_location)] | None = None
    cpus_per_worker: NonNegativeFloat = 1
    resources_per_worker: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    accelerator_type: str | None = None
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    devices: Annotated[list[str], Field(min_length=1)] | None = None
    input_device: str | None = None
    split: Literal["auto"] | None = None
    blocks: Annotated[list[str], Field(min_length=1)] | None = None
    retries: NonNegativeInt = 3
    timeouts: Timeouts = Timeouts()
    storage: Annotated[str, Field(min_length=1)] = "runs"
    env: dict[str, str] = Field(default_factory=dict, repr=False)

    TARGETED: ClassVar = ("model", "dataset", "collate", "loss", "step", "optimizer", "scheduler")

    # A run of a job that differs in one of these only is the same run, carried on.
    CANNOT_CHANGE_THE_RESULT: ClassVar[frozenset[str]] = frozenset(
        {"name", "workers", "gpus_per_worker", "cpus_per_worker", "resources_per_worker", "placement"}
        | {
            "accelerator_type",
            "devices",
            "input_device",
            "split",
            "blocks",
            "loader",
            "checkpoint",
            "retries",
            "timeouts",
            "storage",
            "env",
        }
    )

    # A training that differs in one of these only is the same one, for longer or shorter.
    LENGTHS: ClassVar = ("epochs", "max_steps")

    @model_validator(mode="after")
    def _fits_together(self) -> "Job":
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ValueError(
                f"name: must be one folder's name of letters, digits, '.', '_' and '-', got {self.name!r}"
            )
        if self.max_workers > self.num_shards:
            raise ValueError(
                f"workers: {self.max_workers} workers cannot share {self.num_shards} shards; "
                f"set shards to at least {self.max_workers}, or workers to at most {self.num_shards}"
            )
        for problem in (*self._missing(), *self._contradictions()):
            raise ValueError(problem)
        return self

    def _missing(self) -> Iterator[str]:
        """What the task cannot do without."""
        if self.task == "train" and self.optimizer is None:
            yield "optimizer: is missing; task train needs one, like {target: 'torch.optim:AdamW', args: {lr: 0.001}}"
        if self.task == "train" and self.loss is None and self.step is None:
            yield "loss: is missing; task train needs a loss, like 'torch.nn:CrossEntropyLoss', or a step"
        if self.task == "evaluate" and self.loss is None and self.step is None and not self.metrics:
            yield "loss: is missing; task evaluate needs a loss, metrics or a step"

    def _contradictions(self) -> Iterator[str]:
        """Keys that cannot hold together."""
        gpus = self.gpus_per_worker
        if gpus != "auto" and gpus > 1 and gpus != int(gpus):
            yield f"gpus_per_worker: must be 'auto', at most 1, or a whole number, got {gpus:g}"
        if gpus != "auto" and gpus > 1 and self.devices is not None and len(self.devices) != gpus:
            yield f"devices: {len(self.devices)} are named, and gpus_per_worker is {gpus:g}; leave one of them out"
        if self.blocks is not None and self.split is None:
            yield "blocks: are what split: auto splits; set split: auto, or leave blocks out"
        if self.split is not None and self.num_devices == 1:
            yield "split: a worker has one device; set gpus_per_worker to 2 or more, or devices: [cpu, cpu]"
        if self.sync_batchnorm and self.num_shards > max(1, self.min_workers):
            yield (
                f"sync_batchnorm: needs a worker for each shard, since a worker runs its shards one after another; "
                f"got {self.num_shards} shards on {self.min_workers} workers"
            )
        if self.sync_batchnorm and self.bitwise:
            yield "sync_batchnorm: its sums depend on the workers, so it cannot be bitwise"
        if self.step is not None and self.loss is not None:
            yield "loss: is computed by step where there is one; leave loss or step out"
        for name in self.metrics:
            if not NAME.fullmatch(name) or name == "loss":
                yield f"metrics.{name}: must be a name of letters, digits, '.', '_' and '-' other than 'loss'"
            elif self.task == "train" and (name in COLUMNS or name.startswith("eval_")):
                yield f"metrics.{name}: is a column of the history, like {', '.join(COLUMNS)} and eval_...; rename it"
        for key, name in self.watched.items():
            if name not in self.eval_names and not self.owners(name):
                or_loss = "loss or " * (key == "scheduler.metric")
                yield f"{key}: must be {or_loss}one that eval measures ({_listed(self.eval_names)}), got {name!r}"

    @property
    def eval_names(self) -> tuple[str, ...]:
        """What evaluating while training measures."""
        if self.eval is None:
            return ()
        has_loss = self.loss is not None or self.step is not None
        return tuple(f"eval_{name}" for name in [*["loss"] * has_loss, *self.metrics])

    @property
    def watched(self) -> dict[str, str]:
        """The evaluated metrics that a training looks at, by the keys that name them."""
        best, metric = self.checkpoint.best, getattr(self.scheduler, "metric", None)
        named = {"checkpoint.best.metric": best and best.metric, "scheduler.metric": metric}
        is_train = self.task == "train"
        return {key: name for key, name in named.items() if is_train and name and (key, name) != _EPOCHS_LOSS}

    def owners(self, name: str) -> list[str]:
        """The metrics of which `name` may be an element: `eval_recall_0` of recall, if that gives a vector."""
        if self.eval is None:
            return []
        return [metric for metric in self.metrics if name.startswith(f"eval_{metric}_")]

    @property
    def gives_first(self) -> bool:
        """Whether items must be pairs (inputs, target), of which the model gets the first."""
        return self.inputs == "first" or (self.inputs == "auto" and self.task != "predict")

    @property
    def is_shuffled(self) -> bool:
        """Whether the samples come in a random order: by `shuffle` in a training, else by `order`."""
        return self.shuffle if self.task == "train" else self.order == "shuffled"

    @property
    def dataset_key(self) -> str:
        """The key under which the task's own dataset stands."""
        return "eval.dataset" if self.task == "evaluate" and self.eval is not None else "dataset"

    def for_task(self) -> "Job":
        """The job over the dataset of its task: evaluate takes that of `eval`, where there is one."""
        return self.over_eval() if self.dataset_key == "eval.dataset" else self

    def over_eval(self) -> "Job":
        """The job over all samples of the dataset of `eval`, in their order, in batches of its size."""
        assert self.eval is not None
        size = self.eval.batch_size or self.batch_size
        changed = {"dataset": self.eval.dataset, "batch_size": size, "shuffle": False, "drop_last": False}
        return self.model_copy(update={**changed, "order": "dataset"})

    @property
    def num_devices(self) -> int:
        """Devices of a worker over which its model lies."""
        if self.devices is not None:
            return len(self.devices)
        return 1 if self.gpus_per_worker == "auto" else max(1, int(self.gpus_per_worker))

    @property
    def min_workers(self) -> int:
        return self.workers.min if isinstance(self.workers, Elastic) else self.workers

    @property
    def max_workers(self) -> int:
        return self.workers.max if isinstance(self.workers, Elastic) else self.workers

    @property
    def num_shards(self) -> int:
        """Shards of every global batch: `shards`, or else the largest number of workers."""
        return self.shards or max(1, self.max_workers)

    @property
    def run_name(self) -> str:
        assert self.name is not None, "Job.make names every job"
        return self.name

    @property
    def targets(self) -> dict[str, Any]:
        """All targets and objects, by their dotted keys; None where a key is not set."""
        found = {key: getattr(self, key) for key in self.TARGETED}
        found.update({f"metrics.{name}": metric for name, metric in self.metrics.items()})
        return found if self.eval is None else {**found, "eval.dataset": self.eval.dataset}

    @property
    def is_all_targets(self) -> bool:
        """Whether its keys alone tell the job from any other."""
        given = [value for value in self.targets.values() if value is not None]
        return all(isinstance(value, Target) and value.is_named for value in given)

    @classmethod
    def make(cls, values: Mapping[str, Any], default_name: str) -> "Job":
        """The job that these keys and values describe; JobError lists every one that is wrong."""
        named = {**values, "name": default_name if values.get("name") is None else values["name"]}
        for key in cls.TARGETED:
            if (args := named.pop(f"{key}_args", None)) is not None:
                named[key] = _with_args(named.get(key), args)
        try:
            return cls.model_validate(named)
        except ValidationError as error:
            raise JobError("\n".join(_explain(error))) from None

    def describe(self) -> dict[str, Any]:
        """The job as plain JSON values, without the secrets of URLs; an object from Python is named by its type."""
        values = self.model_dump(exclude={*self.TARGETED, "metrics", "eval"})
        values["eval"] = self.eval and self.eval.model_dump(exclude={"dataset"})
        for key, target in self.targets.items():
            outer, _, inner = key.partition(".")
            _lay_over(values, [outer, inner] if inner else [outer], _describe_target(target))
        described = {**values, "shards": self.num_shards}
        return {key: hide_in(value) for key, value in described.items()}

    def __repr__(self) -> str:
        return hide(super().__repr__())

    def __str__(self) -> str:
        return hide(super().__str__())

    def fingerprint(self, with_lengths: bool = False) -> str:
        """A hash of every key that can change a step's result."""
        left_out = self.CANNOT_CHANGE_THE_RESULT | set(() if with_lengths else self.LENGTHS)
        kept = {key: value for key, value in self.describe().items() if key not in left_out}
        kept |= {"inputs": "first" if self.gives_first else self.inputs, "shuffle": self.is_shuffled}
        del kept["order"]  # which is_shuffled tells
        try:
            return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
        except (TypeError, ValueError, RecursionError) as error:
            raise JobError(f"args: must be plain YAML values with keys of one kind: {error}") from None

    def has_fingerprint(self, given: str | None) -> bool:
        """Whether a run or checkpoint with this fingerprint is of this job.

        Earlier versions hashed the lengths too.
        """
        return given in (self.fingerprint(), self.fingerprint(with_lengths=True))


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """The job in a YAML file, with dotted keys of `overrides` laid over it.

    Raises JobError where the file cannot be read, is not YAML or is no valid job.
    """
    values = _read_yaml(Path(path))
    try:
        return job_of(values, overrides or {}, default_name=Path(path).stem)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def job_of(values: dict[str, Any], overrides: Mapping[str, Any], default_name: str) -> Job:
    """The job of these keys and values, with the dotted keys of `overrides` laid over them."""
    for key, value in overrides.items():
        _lay_over(values, key.split("."), value)
    return Job.make(values, default_name)


def parse_setting(text: str) -> tuple[str, Any]:
    """The dotted key and the YAML value of a `--set key=value`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise JobError(f"--set {text!r}: must be KEY=VALUE, like --set model.args.width=64")
    try:
        return key, _from_yaml(value)
    except yaml.YAMLError as error:
        raise JobError(f"--set {text!r}: the value is not YAML: {error}") from None


def parse_workers(text: str) -> int | dict[str, int]:
    """The value of `--workers`: `N`, or `MIN:MAX`."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        return {"min": int(match[1]), "max": int(match[2])}
    raise JobError(f"--workers {text!r}: must be N, like 4 (0: in this process), or MIN:MAX, like 1:8")


def parse_counts(text: str) -> list[int]:
    """The value of verify's `--workers`: numbers with commas between them."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise JobError(f"--workers {text!r}: must be numbers of workers, like 1,2,3,8")
    return [int(part) for part in text.split(",")]


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-3 is a number, and a key that stands twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"the key {key.value!r} is given twice, the second time{key.start_mark}")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def _from_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = _from_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise JobError(f"{path}: is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise JobError(f"{path}: must hold keys and values, like 'batch_size: 30', got {hide(repr(values)):.80}")
    return {str(key): value for key, value in values.items()}


def _lay_over(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set a nested key; a target given as text becomes a mapping when its args are set."""
    for key in keys[:-1]:
        inner = values.get(key)
        if inner is None or isinstance(inner, str):
            inner = {} if inner is None else {"target": inner}
        if not isinstance(inner, dict):
            raise JobError(f"--set {'.'.join(keys)}: {key} is {inner!r}, which has no keys of its own")
        values[key] = dict(inner)
        values = values[key]
    values[keys[-1]] = value


def _describe_target(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, Target):
        return f"<{_qualified(value)}>"
    return {**value.model_dump(), "target": value.label if value.is_named else f"<{value.label}>"}


def _with_args(given: Any, args: Any) -> Any:
    """A target with these args: those of the keys `model_args`, `dataset_args` ..."""
    if isinstance(given, Target):
        return given.model_copy(update={"args": args})
    return {**given, "args": args} if isinstance(given, Mapping) else {"target": given, "args": args}


_EPOCHS_LOSS = ("scheduler.metric", "loss")  # the epoch's mean, which no evaluation measures


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing: there is no eval"


def _explain(error: ValidationError) -> list[str]:
    """One line for each wrong key; of a union's tries only the one that says most."""
    lines: dict[str, str] = {}
    for detail in error.errors():
        path = _path(detail["loc"])
        if path == "workers" and isinstance(detail["input"], Mapping) and detail["type"] != "value_error":
            continue  # a mapping was meant as {min, max}: what is wrong inside it says more
        lines.setdefault(path, f"{path}: {_message(path, detail)}" if path else _message(path, detail))
    return list(lines.values())


def _path(location: tuple[int | str, ...]) -> str:
    """The dotted key; pydantic's own names of a union's members are left out."""
    members = {"Elastic", "Target", "Optimizer", "Scheduler", "int", "bool", "str", "float", "none"}
    inner = {"literal[", "constrained-", "list[", "function-", "nullable"}
    parts = [
        str(part)
        for part in location
        if str(part) not in members and not any(str(part).startswith(start) for start in inner)
    ]
    return ".".join(parts)


def _message(path: str, detail: Any) -> str:
    kind, got = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return "is no key of a job" + _nearest(path)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    allowed = _ALLOWED.get(path)
    says = f"must be {allowed}" if allowed else detail["msg"].replace("Input should be", "must be")
    secret = path.startswith("env.")  # its values may be secrets, and errors end up in logs
    return f"{says}, got a {type(got).__name__}" if secret else f"{says}, got {hide(repr(got)):.80}"


_ALLOWED = {
    "workers": "a number of workers from 0 up, or {min: N, max: M}",
    "gpus_per_worker": "'auto' or a number from 0 up",
    "checkpoint.every_seconds": "'auto', null or seconds from 0 up",
    "loader.pin_memory": "'auto', true or false",
    "loader.context": "null, 'fork', 'spawn' or 'forkserver'",
    "find_unused_parameters": "'auto', true or false",
    "devices": "null or a list of devices, like [cpu] or ['cuda:0', 'cuda:1']",
    "split": "null or 'auto'",
}


_OWNERS: dict[str, type[BaseModel]] = {
    "workers": Elastic,
    "loader": Loader,
    "checkpoint": Checkpoint,
    "checkpoint.best": Best,
    "eval": Eval,
    "timeouts": Timeouts,
    "optimizer": Optimizer,
    "scheduler": Scheduler,
}


def _nearest(path: str) -> str:
    """A hint at the key that was meant, or all that there are."""
    *parents, key = path.split(".")
    owner = _OWNERS.get(".".join(parents), Target) if parents else Job
    is_of_target = issubclass(owner, Target)
    close = difflib.get_close_matches(key, owner.model_fields, n=1, cutoff=0.8 if is_of_target else 0.5)
    answer = answer_to(path, is_of_target and not close)
    if answer is not None:
        return f"; here it is {answer}"
    if close:
        return f"; did you mean {'.'.join([*parents, close[0]])}?"
    return f"; its keys are {', '.join(owner.model_fields)}"
