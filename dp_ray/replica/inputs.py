"""Which part of a collated batch the model gets: all of it, or the first of a pair (inputs, target)."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dp_ray.errors import DataError
from dp_ray.job import Job
from dp_ray.text import listed

LEAVES_OUT = "inputs: auto gives the model the first of each pair (inputs, target), and leaves the target out"
GIVES_BOTH = (
    "inputs: auto gives the model both of each pair, as its forward may take two; if the second is a target, "
    "set inputs: first"
)
STEP = (
    "write a step; for dict items and a model like Hugging Face's: def step(model, batch): outputs = model(**batch); "
    "return {'loss': (outputs.loss * n, n), 'outputs': outputs.logits, 'target': batch['labels']}, where n is the "
    "number of labels that count, like (batch['labels'] != -100).sum()"
)


def model_inputs(job: Job, batch: Any) -> Any:
    """The model's part of a collated batch, decided by the job alone; raises what `check_pair` raises."""
    check_pair(job, batch)
    return batch[0] if job.gives_first else batch


def check_pair(job: Job, batch: Any) -> None:
    """Raise DataError if the task, or `inputs: first`, needs pairs (inputs, target) and the batch is not one."""
    if job.task != "predict" and not _is_pair(batch):
        raise DataError(
            f"task {job.task} needs items that are (inputs, target), got a batch of {_described(batch)}; "
            f"{_pairs_of(batch)}{STEP}"
        )
    if job.gives_first and not (isinstance(batch, tuple | list) and batch):
        raise DataError(
            f"inputs: 'first' needs items that are (inputs, target), got a batch of {_described(batch)}; leave "
            "inputs out, and for a dict whose keys are the model's arguments set call: kwargs"
        )


class PredictInputs:
    """Picks the model's part of each batch of a prediction; with `inputs: auto`, by the signature of its forward.

    `note` is called once if a target is left out, or if one may reach the model.
    """

    def __init__(self, job: Job, model: nn.Module, note: Callable[[str], None]) -> None:
        self._job = job
        self._arguments = positional_arguments(model)
        self._note = note
        self._told = False

    def __call__(self, batch: Any) -> Any:
        if self._job.inputs != "auto" or not _is_pair(batch):
            return model_inputs(self._job, batch)
        gives_first = takes_first(self._job, *self._arguments, batch[0])
        if not self._told and (gives_first or self._may_take_a_target()):
            self._note(LEAVES_OUT if gives_first else GIVES_BOTH)
        self._told = True
        return batch[0] if gives_first else batch

    def _may_take_a_target(self) -> bool:
        least, most = self._arguments
        return self._job.call in ("auto", "args") and least < 2 <= most


def takes_first(job: Job, least: int, most: float, first: Any) -> bool:
    """Whether the model takes the first of a pair, rather than both.

    `least` and `most` are how many positional arguments its forward takes. `first` is the pair's first item.
    If the job has a loss or metrics, a pair is (inputs, target).
    """
    has_targets = job.loss is not None or bool(job.metrics)
    if job.call == "kwargs":
        return isinstance(first, Mapping)
    if job.call == "one" or least < 2 <= most:
        return has_targets
    return most < 2 or (has_targets and isinstance(first, tuple | list))


def positional_arguments(model: nn.Module) -> tuple[int, float]:
    """How many positional arguments the model's forward takes, at least and at most; 0 and inf if unknown."""
    if isinstance(model, torch.jit.ScriptModule):
        forward: Any = model.forward
        given = [one for one in forward.schema.arguments[1:] if not one.kwarg_only]
        return sum(not one.has_default_value() for one in given), len(given)
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a C function may have no signature
        return 0, float("inf")
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return sum(one.default is one.empty for one in positional), float("inf") if takes_any else len(positional)


def _pairs_of(batch: Any) -> str:
    """How such a batch's items become pairs."""
    if isinstance(batch, Mapping):
        return f"name keys of its items, like inputs: [x] and target: y (it has {listed(batch)}); or "
    if isinstance(batch, tuple | list) and len(batch) > 2:
        return "a model of several inputs takes items like ((a, b), target); or "
    return ""


def _described(batch: Any) -> str:
    return f"a {type(batch).__qualname__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2
