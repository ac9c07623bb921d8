"""Pydantic's errors as messages for users: the key, what it may be, what it got, and a hint."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from dp_ray.job_keys import JobKeys
from dp_ray.job_outputs import Outputs
from dp_ray.job_parts import (
    ActivationBudget,
    Best,
    Checkpoint,
    EarlyStopping,
    Elastic,
    Ema,
    Eval,
    Hooks,
    Loader,
    OnError,
    Optimizer,
    Scheduler,
    ShuffleBlocks,
    Timeouts,
)
from dp_ray.job_target import Target
from dp_ray.key_hints import answer_to, shards_of
from dp_ray.secrets import hide
from dp_ray.text import did_you_mean


def explain(error: ValidationError, workers: Any = None) -> list[str]:
    """One line for each wrong key; for a union of types, the line that says most.

    `workers` is what the job says of its workers, if there is a job.
    """
    lines: dict[str, str] = {}
    for detail in error.errors():
        path = _path(detail["loc"])
        if path in _MAPPED and isinstance(detail["input"], Mapping) and detail["type"] != "value_error":
            continue  # a mapping was meant as the key's own: what is wrong inside it says more
        lines.setdefault(path, f"{path}: {_message(path, detail, workers)}" if path else _message(path, detail))
    return list(lines.values())


def _path(location: tuple[int | str, ...]) -> str:
    """The dotted key, without pydantic's names for the members of a union."""
    members = {
        "Elastic",
        "ActivationBudget",
        "ShuffleBlocks",
        "Target",
        "Optimizer",
        "Scheduler",
        "int",
        "bool",
        "str",
        "float",
        "none",
    }
    inner = {"literal[", "constrained-", "list[", "function-", "nullable"}
    parts = [
        str(part)
        for part in location
        if str(part) not in members and not any(str(part).startswith(start) for start in inner)
    ]
    return ".".join(parts)


def _message(path: str, detail: Any, workers: Any = None) -> str:
    kind, got = detail["type"], detail["input"]
    if kind == "extra_forbidden" and (says := shards_of(path, got, workers)):
        return f"is no key of a job; here it is {says}"
    if kind == "extra_forbidden":
        return "is no key of a job" + _nearest(path)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "literal_error" and isinstance(got, str) and path not in _ALLOWED:
        meant = did_you_mean(got, re.findall(r"'([^']+)'", detail["ctx"]["expected"]))
        return f"{detail['msg'].replace('Input should be', 'must be')}, got {got!r:.80}{meant}"
    allowed = _ALLOWED.get(path)
    says = f"must be {allowed}" if allowed else detail["msg"].replace("Input should be", "must be")
    secret = path.startswith("env.")  # its values may be secrets, and errors end up in logs
    return f"{says}, got a {type(got).__name__}" if secret else f"{says}, got {hide(repr(got)):.80}"


_MAPPED = ("workers", "shuffle", "activation_checkpointing")  # keys that are a number or the like, or a mapping

_ALLOWED = {
    "activation_checkpointing": "true, false, a list of classes like [Block], or {budget: 0.5}",
    "shuffle": "true, false, 'blocks' or {window_blocks: N, block_rows: M}",
    "workers": "a number of workers from 0 up, or {min: N, max: M}",
    "gpus_per_worker": "'auto' or a number from 0 up",
    "checkpoint.every_seconds": "'auto', null or seconds from 0 up",
    "loader.pin_memory": "'auto', true or false",
    "loader.context": "null, 'fork', 'spawn' or 'forkserver'",
    "find_unused_parameters": "'auto', true or false",
    "devices": "null or a list of devices, like [cpu] or ['cuda:0', 'cuda:1']",
    "device_map": "null or 'auto'",
    "on_error": "null or a mapping, like {quarantine: 100, timeout: 30, finite: true}",
    "scheduler.warmup": "a share of all updates from 0 up and below 1, like 0.05, or a number of updates from 1 up",
    "skip": "null or a list of samples' indices, like [812, 1007]",
    "outputs.keep": "null or a list of paths, like [logits, hidden_states.0]",
    "outputs.carry": "null or a list of keys of an item, like [id, path]",
    "eval": "null or a mapping, like {dataset: 'jobs.digits:Digits'}",
    "early_stopping": "null or a mapping, like {metric: eval_loss, patience: 3}",
    "ema": "null or a mapping, like {decay: 0.999, evaluate: true}",
    "hooks": "a mapping, like {on_step: 'my_hooks:log'}",
}


_OWNERS: dict[str, type[BaseModel]] = {
    "workers": Elastic,
    "activation_checkpointing": ActivationBudget,
    "shuffle": ShuffleBlocks,
    "loader": Loader,
    "checkpoint": Checkpoint,
    "checkpoint.best": Best,
    "eval": Eval,
    "early_stopping": EarlyStopping,
    "ema": Ema,
    "hooks": Hooks,
    "on_error": OnError,
    "timeouts": Timeouts,
    "outputs": Outputs,
    "optimizer": Optimizer,
    "scheduler": Scheduler,
}


def _nearest(path: str) -> str:
    """A hint: the key that was meant, or all keys."""
    *parents, key = path.split(".")
    owner = _OWNERS.get(".".join(parents), Target) if parents else JobKeys
    is_of_target = issubclass(owner, Target)
    close = difflib.get_close_matches(key, owner.model_fields, n=1, cutoff=0.8 if is_of_target else 0.5)
    answer = answer_to(path, is_of_target and not close)
    if answer is not None:
        return f"; here it is {answer}"
    if close:
        return f"; did you mean {'.'.join([*parents, close[0]])}?"
    return f"; its keys are {', '.join(owner.model_fields)}"
