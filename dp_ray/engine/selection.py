"""What is kept of a prediction's outputs, and of what dtype: begin at `OutputSelector`.

`outputs.after` computes from a shard's outputs, `keep` picks from them, `dtype` converts them: all on the device, so
that outputs that are not kept are never copied.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn

from dp_ray.engine.host_copy import ON_GPU
from dp_ray.engine.random import seed_all
from dp_ray.engine.user_code import describe_input, gradients_hint, locating, location, reraise_as
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.targets import bind, built, resolve
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard
from dp_ray.system.threads import waiting
from dp_ray.tensors.ragged import without_lists, without_texts
from dp_ray.tensors.tree import (
    Keys,
    Leaf,
    Ragged,
    bare_tensors,
    ends,
    flatten,
    leaf_keys,
    quoted,
    subtree,
    unflatten,
    why_no_rows,
)
from dp_ray.text import a_kind, did_you_mean

AFTER = "outputs.after"
WHOLE = "output"  # the path of outputs that are one tensor, as its column is named


class OutputSelector:
    """A function of a shard's outputs, which reduces them to those that the job keeps.

    `after` is the user's function, or None.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self.after = None if job.outputs.after is None else _after_of(job, device)
        self._takes_inputs = self.after is not None and takes_inputs(self.after)
        self._is_ragged = job.outputs.ragged
        self._keep = job.outputs.keep
        self._dtype: torch.dtype | None = job.outputs.dtype and getattr(torch, job.outputs.dtype)
        # What `outputs.dtype` makes infinite, by path and dtype: no GPU is waited for until the lines are taken.
        self._overflows: dict[tuple[str, str], torch.Tensor] = {}

    def __call__(self, outputs: Any, inputs: Any, shard: Shard) -> Any:
        """Return what is kept of a shard's outputs; an error names step and shard.

        With `outputs.ragged`, lists with an entry for each row have become leaves.
        """
        outputs = self.picked(outputs, inputs, shard, shard.rows)
        if self._dtype is None:
            return outputs
        leaves, spec = flatten(outputs)
        converted: list[Any] = []
        for path, leaf in zip(spec.paths, leaves, strict=True):
            if isinstance(leaf, Ragged) and leaf.has_values:
                converted.append(leaf)
                continue
            numbers = leaf.data if isinstance(leaf, Ragged) else leaf
            made = _as_dtype(path or WHOLE, numbers, self._dtype)
            converted.append(replace(leaf, data=made) if isinstance(leaf, Ragged) else made)
            self._look(path or WHOLE, numbers, made)
        return unflatten(spec, converted)

    def _look(self, path: str, leaf: Leaf, converted: Leaf) -> None:
        """Look for numbers of a leaf that became infinite."""
        if leaf is converted:
            return
        here, there = torch.as_tensor(converted), torch.as_tensor(leaf)
        if torch.finfo(here.dtype).max >= torch.finfo(there.dtype).max:
            return
        if not here.is_cuda and not bool(here.isinf().any()):  # mostly one look is enough
            return
        found, of = (here - there).isinf().any(), (path, _name(here.dtype))  # inf - inf is no number
        self._overflows[of] = found | self._overflows[of] if of in self._overflows else found

    def take_notes(self) -> list[str]:
        """Return lines on outputs that `outputs.dtype` made infinite on the shards so far, each path once."""
        with waiting(ON_GPU):
            there = [of for of, found in self._overflows.items() if bool(found)]
        self._overflows.clear()
        return [
            f"outputs.dtype: {path} has numbers too large for {dtype}, which are kept as inf" for path, dtype in there
        ]

    def picked(self, outputs: Any, inputs: Any, shard: Shard, rows: int | None) -> Any:
        """Return what is kept of the outputs of so many rows, in its own dtypes; with None, lists have any length."""
        if self.after is not None:
            where, got = location(shard), describe_input(outputs)
            with reraise_as(f"{where}: {AFTER}", lambda error: gradients_hint(error) + got):
                outputs = self.after(outputs, inputs=inputs) if self._takes_inputs else self.after(outputs)
            if not self._is_ragged and not flatten(without_texts(outputs))[0]:
                raise ModelError(f"{where}: {AFTER} must return tensors, arrays or texts, got {outputs!r:.60}")
        if self._is_ragged:
            with locating(location(shard)):
                outputs = without_lists(outputs, rows)
        if self._keep is not None:
            outputs = subtree(outputs, chosen(ends(flatten(outputs)[1]), self._keep, location(shard)))
        if (tensors := bare_tensors(outputs)) and not any(map(why_no_rows, tensors)):
            return outputs
        leaves, spec = flatten(outputs)
        for number, leaf in enumerate(leaves):
            if (why := why_no_rows(leaf)) is not None:
                path = quoted(leaf_keys(spec)[number])
                raise ModelError(f"{location(shard)}: output{path} is {why}; or leave it out: see outputs.keep")
        return outputs


def chosen(there: Sequence[Keys], patterns: Sequence[str], where: str) -> set[Keys]:
    """Return the keys whose path, or whose container's path, fits one of the patterns.

    Raises JobError, which lists all paths, if a pattern fits none.
    """
    by_pattern = {pattern: {keys for keys in there if _fits(keys, pattern)} for pattern in patterns}
    for pattern, matches in by_pattern.items():
        if not matches:
            paths = [_path(keys) for keys in there]
            lacks = f"the outputs of {where} have no {pattern!r}{did_you_mean(pattern, paths)}"
            raise JobError(f"outputs.keep: {lacks}; they have {', '.join(paths)}")
    return set[Keys]().union(*by_pattern.values())


def _fits(keys: Keys, pattern: str) -> bool:
    paths = [_path(keys[:length]) for length in range(1, len(keys) + 1)] or [WHOLE]
    return any(path == pattern or fnmatchcase(path, pattern) for path in paths)


def _path(keys: Keys) -> str:
    return ".".join(map(str, keys)) or WHOLE


def check_after(target: Any) -> None:
    """Raise JobError if what `outputs.after` names cannot be imported, called, or called with its args."""
    after = resolve(AFTER, target) if isinstance(target, Target) else target
    if not callable(after):
        raise JobError(f"{AFTER}: must be a function of the outputs, got {a_kind(after)}")
    if not isinstance(target, Target):  # an object of the user's is called as it is
        return
    if isinstance(after, type):  # it gets its args alone, and its object the outputs
        bind(AFTER, target)
    else:
        more = {"inputs": None} if takes_inputs(after) else {}
        bind(AFTER, target.model_copy(update={"args": {**more, **target.args}}), leading=1)


def takes_inputs(after: Any) -> bool:
    """Return whether a function has a parameter `inputs` beside its first one, which is for the outputs."""
    try:
        parameters = inspect.signature(after.forward if isinstance(after, nn.Module) else after).parameters
    except (TypeError, ValueError):  # a C function may have no signature
        return False
    return "inputs" in list(parameters)[1:]


def _after_of(job: Job, device: torch.device) -> Any:
    """Build the function, or the object of the class, that `after` names; a module is copied to the device."""
    target = job.outputs.after
    seed_all(derive_seed(job.seed, "after"))  # the weights of a module are the same on all workers
    made = built(AFTER, target)
    if not callable(made):
        raise JobError(f"{AFTER}: must be a function of the outputs, got {a_kind(made)}")
    return copy.deepcopy(made).to(device).eval() if isinstance(made, nn.Module) else made


def _as_dtype(path: str, leaf: Leaf, dtype: torch.dtype) -> Leaf:
    """Convert a floating leaf to the dtype, where it is; return any other leaf unchanged."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if leaf.dtype.kind != "f":
        return leaf
    if dtype == torch.bfloat16:
        raise JobError(f"outputs.dtype: {path} is a numpy array, which cannot be bfloat16; return a tensor")
    with np.errstate(over="ignore"):
        return leaf.astype(_name(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
