"""What a prediction keeps of a shard's outputs: `after` computes it, `keep` picks from it, `dtype` converts it.

All of this happens on the device. What is left out is never copied from there.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn

from dp_ray.errors import JobError, ModelError
from dp_ray.job import Job
from dp_ray.job_target import Target
from dp_ray.plan.seeds import derive_seed
from dp_ray.plan.split import Shard
from dp_ray.replica.rng import seed_all
from dp_ray.replica.targets import bound, build, resolve
from dp_ray.replica.user_code import it_got, place, raising
from dp_ray.tensors.nested import Keys, Leaf, flatten, unflatten
from dp_ray.tensors.subtree import ends, subtree
from dp_ray.text import did_you_mean

AFTER = "outputs.after"
WHOLE = "output"  # the path of outputs that are one tensor, as its column is named


class Kept:
    """Reduces the outputs of each shard to what the job keeps of them.

    `after` is the user's function, or None. `tell` is called once for each output that `dtype` makes infinite.
    """

    def __init__(self, job: Job, device: torch.device, tell: Callable[[str], None]) -> None:
        self.after = None if job.outputs.after is None else _built(job, device)
        self._takes_inputs = self.after is not None and takes_inputs(self.after)
        self._keep = job.outputs.keep
        self._dtype: torch.dtype | None = job.outputs.dtype and getattr(torch, job.outputs.dtype)
        self._tell = tell
        self._told: set[str] = set()

    def __call__(self, outputs: Any, inputs: Any, shard: Shard) -> Any:
        """What is kept of the outputs of a shard; an error names step and shard."""
        if self.after is not None:
            with raising(f"{place(shard)}: {AFTER}", lambda _, got=outputs: it_got(got)):  # type: ignore[misc]
                outputs = self.after(outputs, inputs=inputs) if self._takes_inputs else self.after(outputs)
            _check_holds_tensors(outputs, shard)
        if self._keep is not None:
            wanted = chosen(ends(flatten(outputs)[1]), self._keep, place(shard))
            outputs = subtree(outputs, wanted)
        return outputs if self._dtype is None else self._converted(outputs, self._dtype, shard)

    def _converted(self, outputs: Any, dtype: torch.dtype, shard: Shard) -> Any:
        leaves, spec = flatten(outputs)
        made = []
        for path, leaf in zip(spec.paths, leaves, strict=True):
            made.append(_as_dtype(path or WHOLE, leaf, dtype))
            if path not in self._told and _overflows(leaf, made[-1]):
                self._told.add(path)
                what = f"{path or WHOLE} has numbers too large for {_name(dtype)}, which are kept as inf"
                self._tell(f"outputs.dtype: {what} (first in {place(shard)})")
        return unflatten(spec, made)


def chosen(there: Sequence[Keys], patterns: Sequence[str], where: str) -> set[Keys]:
    """The keys of which the path, or that of a container around them, fits one of the patterns.

    Raises JobError, which lists all paths, if a pattern fits none.
    """
    found = {pattern: {keys for keys in there if _fits(keys, pattern)} for pattern in patterns}
    for pattern, keys in found.items():
        if not keys:
            paths = [_path(keys) for keys in there]
            lacks = f"the outputs of {where} have no {pattern!r}{did_you_mean(pattern, paths)}"
            raise JobError(f"outputs.keep: {lacks}; they have {', '.join(paths)}")
    return set[Keys]().union(*found.values())


def _fits(keys: Keys, pattern: str) -> bool:
    paths = [_path(keys[:length]) for length in range(1, len(keys) + 1)] or [WHOLE]
    return any(path == pattern or fnmatchcase(path, pattern) for path in paths)


def _path(keys: Keys) -> str:
    return ".".join(map(str, keys)) or WHOLE


def check_after(given: Any) -> None:
    """Raise JobError if what `outputs.after` names cannot be imported, called, or called with its args."""
    found = resolve(AFTER, given) if isinstance(given, Target) else given
    if not callable(found):
        raise JobError(f"{AFTER}: must be a function of the outputs, got a {type(found).__qualname__}")
    args = given.args if isinstance(given, Target) else {}
    leading = [] if isinstance(found, type) else [None]
    more = {"inputs": None} if takes_inputs(found) and leading else {}
    try:
        inspect.signature(found).bind(*leading, **{**more, **args})
    except TypeError as error:
        label = given.label if isinstance(given, Target) else type(given).__qualname__
        raise JobError(f"{AFTER}: {label} {error}") from None
    except ValueError:
        pass  # some built-in callables have no signature


def takes_inputs(after: Any) -> bool:
    """Whether a function has a parameter `inputs` beside its first one, which is for the outputs."""
    try:
        parameters = inspect.signature(after.forward if isinstance(after, nn.Module) else after).parameters
    except (TypeError, ValueError):  # a C function may have no signature
        return False
    return "inputs" in list(parameters)[1:]


def _built(job: Job, device: torch.device) -> Any:
    """The function, or the object of the class, that `after` names; a copy of a module, on the device."""
    given = job.outputs.after
    seed_all(derive_seed(job.seed, "after"))  # the weights of a module are the same on all workers
    is_class = isinstance(given, Target) and isinstance(resolve(AFTER, given), type)
    made = build(AFTER, given) if is_class else bound(AFTER, given)
    if not callable(made):
        raise JobError(f"{AFTER}: must be a function of the outputs, got a {type(made).__qualname__}")
    return copy.deepcopy(made).to(device).eval() if isinstance(made, nn.Module) else made


def _check_holds_tensors(outputs: Any, shard: Shard) -> None:
    if not flatten(outputs)[0]:
        raise ModelError(f"{place(shard)}: {AFTER} must return tensors or arrays, got {outputs!r:.60}")


def _as_dtype(path: str, leaf: Leaf, dtype: torch.dtype) -> Leaf:
    """A floating leaf in the dtype, where it is; any other leaf unchanged."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if leaf.dtype.kind != "f":
        return leaf
    if dtype == torch.bfloat16:
        raise JobError(f"outputs.dtype: {path} is a numpy array, which cannot be bfloat16; return a tensor")
    with np.errstate(over="ignore"):
        return leaf.astype(_name(dtype))


def _overflows(leaf: Leaf, converted: Leaf) -> bool:
    """Whether a number became infinite. The second look is taken only if there is an infinite number at all."""
    if leaf is converted:
        return False
    here, there = torch.as_tensor(converted), torch.as_tensor(leaf)
    is_narrower = torch.finfo(here.dtype).max < torch.finfo(there.dtype).max
    return is_narrower and bool(here.isinf().any()) and bool((here.isinf() & ~there.isinf()).any())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
