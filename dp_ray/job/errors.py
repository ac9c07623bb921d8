"""Pydantic's errors as messages for users: the key, what it may be, what it got, and a hint. Begin at `explain`.

`other_names.txt` has keys of other libraries and of 0.2, each with the key that does the same here.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator, ValidationError

from dp_ray.job.keys import TARGET as TARGET_TEXT
from dp_ray.job.keys import Eval, JobKeys, Target, WorkerKeys
from dp_ray.text import did_you_mean, hide

# A line for each answer, which begins with dp_ray's key, and after "=" the names for it elsewhere.
_TABLE = Path(__file__).with_name("other_names.txt").read_text()
_LINES = [line.partition(" = ") for line in _TABLE.replace("\n    ", " ").strip().split("\n")]
OTHER_NAMES = {name: answer for answer, _, names in _LINES for name in names.split()}
SAMPLER = OTHER_NAMES["sampler"]
# Inside a target: other names of `target` and `args`; any other key is taken for one of its args.
TARGET = {
    **dict.fromkeys(("class", "cls", "class_path", "type", "path", "function"), "target"),
    **dict.fromkeys(("params", "parameters", "init_args", "config", "options"), "args"),
}


def shards_of(path: str, value: Any, workers: Any) -> str:
    """Return what to write in place of a number of batches to accumulate; "" for any other key or value.

    `workers` is the job's number of workers, a range of them, or None.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not is_number or not OTHER_NAMES.get(path.lower().replace("-", "_"), "").startswith("shards:"):
        return ""
    most = workers.get("max") if isinstance(workers, Mapping) else getattr(workers, "max", workers)
    count = max(1, most) if isinstance(most, int) else 1
    each = f"{value} for each of {count} workers" if count > 1 else f"{value} for one worker"
    return (
        f"shards: {value * count}, {each}, which runs them one after another and adds up their gradients; "
        "batch_size is that of the whole batch, over all of its shards"
    )


def explain(error: ValidationError, workers: Any = None) -> list[str]:
    """Return a line for each wrong key; for a union of types, the line that says most.

    `workers` is what the job says of its workers, if there is a job.
    """
    lines: dict[str, str] = {}
    for detail in error.errors():
        path = _path(detail["loc"])
        if path in _MAPPED and isinstance(detail["input"], Mapping) and detail["type"] != "value_error":
            continue  # a mapping was meant as the key's own: what is wrong inside it says more
        lines.setdefault(path, f"{path}: {_message(path, detail, workers)}" if path else _message(path, detail))
    return list(lines.values())


_MEMBERS = {
    *("Elastic", "ActivationBudget", "ShuffleBlocks", "Target", "Optimizer", "Scheduler", "Eval"),
    *("int", "bool", "str", "float", "none"),
}
_INNER = ("literal[", "constrained-", "list[", "dict[", "function-", "nullable")


def _path(location: tuple[int | str, ...]) -> str:
    """Return the dotted key, without pydantic's names for the members of a union."""
    parts = [str(part) for part in location if str(part) not in _MEMBERS and not str(part).startswith(_INNER)]
    return ".".join(parts)


def _message(path: str, detail: Any, workers: Any = None) -> str:
    kind, got = detail["type"], detail["input"]
    if kind == "extra_forbidden" and (says := shards_of(path, got, workers)):
        return f"is no key of a job; here it is {says}"
    if kind == "extra_forbidden" and path in JobKeys.model_fields:
        return f"is a key of a job, not of workers alone; theirs are {', '.join(WorkerKeys.model_fields)}"
    if kind == "extra_forbidden":
        return "is no key of a job" + _nearest(path, got)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "literal_error" and (instead := OTHER_NAMES.get(f"{path}={got}")):
        return f"{got!r} is no value of it; here it is {instead}"
    if kind == "literal_error" and isinstance(got, str) and path not in _ALLOWED:
        meant = did_you_mean(got, re.findall(r"'([^']+)'", detail["ctx"]["expected"]))
        return f"{detail['msg'].replace('Input should be', 'must be')}, got {got!r:.80}{meant}"
    allowed = _ALLOWED.get(path)
    says = f"must be {allowed}" if allowed else detail["msg"].replace("Input should be", "must be")
    secret = path.startswith("env.")  # its values may be secrets, and errors end up in logs
    return f"{says}, got a {type(got).__name__}" if secret else f"{says}, got {hide(repr(got)):.80}"


# Keys that are a number or the like, or a mapping.
_MAPPED = ("workers", "shuffle", "activation_checkpointing", "audit")

_ALLOWED = {
    "activation_checkpointing": "true, false, a list of classes like [Block], or {budget: 0.5}",
    "audit": "null, a share of the steps above 0 and up to 1, like 0.01, or {share: 0.01, rewind: false}",
    "shuffle": "true, false, 'blocks' or {window_blocks: N, block_rows: M}",
    "workers": "a number of workers from 0 up, or {min: N, max: M}",
    "gpus_per_worker": "'auto' or a number from 0 up",
    "checkpoint.every_seconds": "'auto', null or seconds from 0 up",
    "loader.pin_memory": "'auto', true or false",
    "find_unused_parameters": "'auto', true or false",
    "devices": "null or a list of devices, like [cpu] or ['cuda:0', 'cuda:1']",
    "device_map": "null, 'auto' or a list of modules' names, like [encoder.0, encoder.1]",
    "on_error": "null or a mapping, like {quarantine: 100, finite: true}",
    "scheduler.warmup": "a share of all updates from 0 up and below 1, like 0.05, or a number of updates from 1 up",
    "pack": "null or a mapping, like {length: 2048, how: cut}",
    "skip": "null or a list of samples' indices, like [812, 1007]",
    "outputs.keep": "null or a list of paths, like [logits, hidden_states.0]",
    "outputs.carry": "null or a list of keys of an item, like [id, path]",
    "eval": "null or a mapping, like {dataset: 'jobs.digits:Digits'}",
    "early_stopping": "null or a mapping, like {metric: eval_loss, patience: 3}",
    "ema": "null or a mapping, like {decay: 0.999, evaluate: true}",
    "hooks": "a mapping, like {on_step: 'my_hooks:log'}",
}


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in the type of a key, also those that its validator takes."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    inner = (kind.json_schema_input_type,) if isinstance(kind, BeforeValidator) else get_args(kind)
    for member in inner:
        yield from _models(member)


def _nearest(path: str, got: Any = None) -> str:
    """Return a hint on an unknown key with this value: dp_ray's key for it, the one that was meant, or all keys."""
    *parents, key = path.split(".")
    owner: type[BaseModel] = JobKeys
    models: list[type[BaseModel]] = []
    for parent in parents:
        field = owner.model_fields.get(parent)
        if field is None and owner is Eval:
            continue  # its name
        if models and parent.isdecimal():  # an item of a list
            owner = next((model for model in reversed(models) if issubclass(model, Target)), Target)
            continue
        kinds = (field.annotation, *field.metadata) if field else ()
        models = [model for kind in kinds for model in _models(kind)]
        owner = next(iter(models), Target)
    is_of_target = issubclass(owner, Target)
    close = difflib.get_close_matches(key, owner.model_fields, n=1, cutoff=0.8 if is_of_target else 0.5)
    word = key.lower().replace("-", "_")
    answer = OTHER_NAMES.get(path if parents else word)
    if answer is None and is_of_target and not close:
        # Inside a target, any other key is taken for one of its args.
        is_own = word in TARGET and (
            word != "path" or TARGET_TEXT.fullmatch(str(got)) is not None
        )  # a path of a file is an arg
        answer = ".".join([*parents, *([TARGET[word]] if is_own else ["args", key])])
    if answer is not None:
        return f"; here it is {answer}"
    if close:
        return f"; did you mean {'.'.join([*parents, close[0]])}?"
    return f"; its keys are {', '.join(owner.model_fields)}"
