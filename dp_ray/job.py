"""The job: what to run, as strict frozen models; the only place that parses YAML, `--set` and keywords."""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
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
    PositiveInt,
    ValidationError,
    model_validator,
)

from dp_ray.errors import JobError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Strict(BaseModel):
    """Unknown keys and wrong types are errors; a job never changes once made."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


class Target(Strict):
    """Something to import and call: `module:attribute` with `args` as keywords."""

    target: str
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_a_target(self) -> "Target":
        if not TARGET.fullmatch(self.target):
            raise ValueError(f"must be 'module:attribute', like 'jobs.digits:Net', got {self.target!r}")
        return self


def _target_or_object(value: Any) -> Any:
    """A target as text or mapping becomes a Target; a Python object stays what it is."""
    if isinstance(value, str):
        return Target(target=value)
    if isinstance(value, Mapping):
        return Target.model_validate(dict(value))
    if value is None or isinstance(value, int | float):
        raise ValueError(f"must be a target, like {{target: 'jobs.digits:Net', args: {{}}}}, got {value!r}")
    return value


Targeted = Annotated[Any, BeforeValidator(_target_or_object)]


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

    `model`, `dataset` and `collate` are targets (`module:attribute` with args), or, from Python, objects.
    Raises JobError, naming the key, what was got and what it may be, through `Job.make`.
    """

    name: str | None = None
    task: Literal["predict"] = "predict"
    model: Targeted
    dataset: Targeted
    batch_size: PositiveInt
    shards: PositiveInt | None = None
    workers: NonNegativeInt | Elastic = 1
    gpus_per_worker: Literal["auto"] | NonNegativeFloat = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    shuffle: bool = False
    drop_last: bool = False
    inputs: Literal["all", "first"] = "all"
    call: Literal["auto", "one", "args", "kwargs"] = "auto"
    collate: Targeted | None = None
    scatter: Literal["samples", "batch"] = "samples"
    batch_dim: NonNegativeInt = 0
    loader: Loader = Loader()
    cpus_per_worker: NonNegativeFloat = 1
    resources_per_worker: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    accelerator_type: str | None = None
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    devices: Annotated[list[str], Field(min_length=1, max_length=1)] | None = None
    retries: NonNegativeInt = 3
    storage: Annotated[str, Field(min_length=1)] = "runs"
    env: dict[str, str] = Field(default_factory=dict)

    # A run of a job that differs in one of these only is the same run, carried on.
    CANNOT_CHANGE_THE_RESULT: ClassVar[frozenset[str]] = frozenset(
        {"name", "workers", "gpus_per_worker", "cpus_per_worker", "resources_per_worker", "placement"}
        | {"accelerator_type", "devices", "loader", "retries", "storage", "env"}
    )

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
        return self

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
    def is_all_targets(self) -> bool:
        """Whether its keys alone tell the job from any other: objects from Python cannot be compared."""
        return all(value is None or isinstance(value, Target) for value in (self.model, self.dataset, self.collate))

    @classmethod
    def make(cls, values: Mapping[str, Any], default_name: str) -> "Job":
        """The job that these keys and values describe; JobError lists every one that is wrong."""
        named = {"name": default_name, **values}
        try:
            return cls.model_validate(named)
        except ValidationError as error:
            raise JobError("\n".join(_explain(error))) from None

    def describe(self) -> dict[str, Any]:
        """The job as plain JSON values; an object from Python is named by its type."""
        targets = {key: _describe_target(getattr(self, key)) for key in ("model", "dataset", "collate")}
        return {**self.model_dump(exclude=set(targets)), **targets, "shards": self.num_shards}

    def fingerprint(self) -> str:
        """A hash of every key that can change the result."""
        kept = {key: value for key, value in self.describe().items() if key not in self.CANNOT_CHANGE_THE_RESULT}
        try:
            return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
        except (TypeError, ValueError, RecursionError) as error:
            raise JobError(f"args: must be plain YAML values with keys of one kind: {error}") from None


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """The job in a YAML file, with dotted keys of `overrides` laid over it.

    Raises JobError where the file cannot be read, is not YAML or is no valid job.
    """
    values = _read_yaml(Path(path))
    for key, value in (overrides or {}).items():
        _lay_over(values, key.split("."), value)
    try:
        return Job.make(values, default_name=Path(path).stem)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """The dotted key and the YAML value of a `--set key=value`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise JobError(f"--set {text!r}: must be KEY=VALUE, like --set model.args.width=64")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise JobError(f"--set {text!r}: the value is not YAML: {error}") from None


def parse_workers(text: str) -> int | dict[str, int]:
    """The value of `--workers`: `N`, or `MIN:MAX`."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        return {"min": int(match[1]), "max": int(match[2])}
    raise JobError(f"--workers {text!r}: must be N, like 4 (0: in this process), or MIN:MAX, like 1:8")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise JobError(f"{path}: is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise JobError(f"{path}: must hold keys and values, like 'batch_size: 30', got {values!r:.80}")
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
    if value is None or isinstance(value, Target):
        return value and value.model_dump()
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"<{kind.__module__}:{kind.__qualname__}>"


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
    members = {"Elastic", "Target", "int", "bool", "str", "float", "none"}
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
    return f"{says}, got a {type(got).__name__}" if secret else f"{says}, got {got!r:.80}"


_ALLOWED = {
    "workers": "a number of workers from 0 up, or {min: N, max: M}",
    "gpus_per_worker": "'auto' or a number from 0 up",
    "loader.pin_memory": "'auto', true or false",
    "loader.context": "null, 'fork', 'spawn' or 'forkserver'",
    "devices": "null or a list of one device, like [cpu] or ['cuda:0']",
}


def _nearest(path: str) -> str:
    """A hint at the key that was meant, or all that there are."""
    *parents, key = path.split(".")
    owners: dict[str, type[BaseModel]] = {"workers": Elastic, "loader": Loader}
    owner = owners.get(parents[0], Target) if parents else Job
    close = difflib.get_close_matches(key, owner.model_fields, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {'.'.join([*parents, close[0]])}?"
    return f"; its keys are {', '.join(owner.model_fields)}"
