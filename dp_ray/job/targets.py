"""Import what a target names, and call it; an error names the job's key.

Begin at `build` and `bound`: an object that a job names, and a function. `build_dataset` also checks what it built.
"""

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from dp_ray.errors import DataError, Error, JobError
from dp_ray.job.errors import SAMPLER
from dp_ray.job.job import Job
from dp_ray.job.keys import TARGET, Target, is_over_batch
from dp_ray.system.process import importing_from_here
from dp_ray.text import a_kind, did_you_mean, listed

PATTERN = re.compile(r"[*?\[{]")  # where the fixed part of a path ends


def target_of(key: str, given: str | Mapping[str, Any]) -> Target:
    """Return the target in a name, or in a mapping with `target` and `args`. Raises JobError for what is none."""
    try:
        return Target.model_validate({"target": given} if isinstance(given, str) else dict(given))
    except ValidationError as error:
        says = error.errors()[0]
        where = ".".join([key, *map(str, says["loc"])])
        raise JobError(f"{where}: {says['msg'].removeprefix('Value error, ')}") from None


def build(key: str, target: Any) -> Any:
    """Return the object of the job's `key`: its target called with its args, or the object given from Python.

    Raises what `bind` raises, and JobError if the call raises.
    """
    if not isinstance(target, Target):
        return target
    return bind(key, target)()


def bound(key: str, target: Any) -> Any:
    """Return the function that the job's `key` names, its args bound as keywords, or the object given from Python.

    A class whose objects can be called is built. Raises JobError if it cannot be imported or called, or rejects args.
    """
    if not isinstance(target, Target):
        if not _makes_functions(target):
            return target
        target = Target(target=target)
    function = check_args(key, target)
    if _makes_functions(function):
        return bind(key, target)()
    return functools.partial(function, **target.args) if target.args else function


def built(key: str, target: Any) -> Any:
    """Return what the job's `key` names: of any class an object, of a function itself with its args bound."""
    is_class = isinstance(target, Target) and inspect.isclass(resolve(key, target))
    return build(key, target) if is_class else bound(key, target)


def check_args(key: str, target: Target, leading: int | None = None) -> Any:
    """Return the function or class that the job's `key` names, whose args are right as far as is known uncalled.

    A call adds `leading` positional arguments before them; None of a function that gets any. Raises JobError if it
    cannot be imported or called, or rejects args.
    """
    function = resolve(key, target)
    if not callable(function):
        says = "not a class or function that can be called with args"
        raise JobError(f"{key}: {target.label} is {function!r:.60}, {says}")
    if leading is None and _makes_functions(function):
        leading = 0
    with suppress(ValueError):  # some built-in callables have no signature
        takes = inspect.signature(function)
        try:
            takes.bind_partial(**target.args) if leading is None else takes.bind(*[None] * leading, **target.args)
        except TypeError as error:
            says = _rejection(list(takes.parameters.values())[leading or 0 :], target.args, error)
            raise JobError(f"{key}.args: {target.label} {says}") from None
    return function


def _makes_functions(value: Any) -> bool:
    """Return whether it is a class whose objects can be called, as a collator's, unlike `list`."""
    return inspect.isclass(value) and any("__call__" in vars(kind) for kind in value.__mro__)


def build_dataset(job: Job, key: str = "dataset") -> Any:
    """Return the job's dataset. Raises what `check_dataset` raises, and JobError if it cannot be shuffled."""
    dataset = build(key, job.dataset)
    check_dataset(key, dataset)
    if job.is_shuffled and getattr(dataset, "reads_forward", False):
        shuffles = "shuffle" if job.task == "train" else "order"
        raise JobError(f"{shuffles}: {a_kind(dataset)} is read in its own order; leave {shuffles} out")
    return dataset


def check_dataset(key: str, dataset: Any) -> None:
    """Raise JobError unless a dataset is map-style, and DataError if it is empty or has no length."""
    if isinstance(dataset, list | tuple) and dataset and all(map(_is_dataset, dataset)):
        raise JobError(
            f"{key}: is {a_kind(dataset)} of {len(dataset)} datasets, and a job has one; give a "
            "function that joins them by torch's ConcatDataset, or mix them by weights (dp_ray.data.Mix)"
        )
    lacking = [name for name in ("__len__", "__getitem__") if not _has(dataset, name)]
    if lacking:
        kind = type(dataset).__qualname__
        advice = ""
        if kind == "DataLoader":
            advice = f"; give the dataset that it loads. In place of its sampler: {SAMPLER}"
        elif hasattr(dataset, "__iter__"):
            advice = (
                "; for what can only be read forward there is a Stream: {target: 'dp_ray.data:Stream', args: "
                "{iterable: 'module:function', rows: N}} (docs/data.md)"
            )
        raise JobError(
            f"{key}: must be map-style, with __len__ and __getitem__; {kind} lacks {' and '.join(lacking)}{advice}"
        )
    try:
        rows = len(dataset)
    except Exception as error:
        raise DataError(f"{key}: its length raised {type(error).__name__}: {error}") from error
    if rows == 0:
        raise DataError(f"{key}: {type(dataset).__qualname__} is empty, there is nothing to run")
    for name in ("sampler", "batch_sampler"):
        if _is_torchs("Sampler", getattr(dataset, name, None)):
            raise JobError(f"{key}: its {name} would not be used; {SAMPLER.removeprefix('dataset: ')}")
    if isinstance(dataset, dict) and all(isinstance(name, str) for name in dataset):
        names, kind = listed(list(dataset)), type(dataset).__qualname__
        advice = f": for load_from_disk, the folder FOLDER/{next(iter(dataset))}" if kind == "DatasetDict" else ""
        raise JobError(f"{key}: must be indexed by numbers; {kind} has {names}; give one of them{advice}")


def _is_dataset(value: Any) -> bool:
    """Return whether an item of a list is no sample but a dataset, or what names one."""
    named = value.get("target") if isinstance(value, Mapping) else value
    if isinstance(named, str):
        return TARGET.fullmatch(named) is not None
    return _is_torchs("Dataset", value) or type(value).__module__.startswith("datasets.")


def _is_torchs(name: str, value: Any) -> bool:
    """Return whether an object is of a class of torch.utils.data; an import of it would take seconds."""
    cls = getattr(sys.modules.get("torch.utils.data"), name, None)
    return cls is not None and isinstance(value, cls)


def _has(dataset: Any, name: str) -> bool:
    """Return whether a dataset has a method; torch's base class has a __getitem__ that only raises."""
    base = getattr(sys.modules.get("torch.utils.data"), "Dataset", None)  # an import would take seconds
    method = getattr(type(dataset), name, None)
    return hasattr(dataset, name) and (method is None or method is not getattr(base, name, None))


def bind(key: str, target: Target, leading: int = 0) -> Callable[..., Any]:
    """Return the target's callable with its args bound; a call adds `leading` positional arguments before them.

    Raises what `check_args` raises; the call raises JobError for an error of the target's.
    """
    function = check_args(key, target, leading)

    def call(*positional: Any) -> Any:
        try:
            return function(*positional, **target.args)
        except Error:
            raise
        except (Exception, SystemExit) as error:
            raise JobError(f"{key}: {target.label} raised {type(error).__name__}: {error}") from error

    return call


def _rejection(takes: Sequence[inspect.Parameter], args: Mapping[str, Any], error: TypeError) -> str:
    """Return how a callable with these parameters rejects args: the first that it does not know, or Python's text."""
    names = [param.name for param in takes if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)]
    unknown = next((name for name in args if name not in names), None)
    if unknown is None or any(param.kind is param.VAR_KEYWORD for param in takes):
        return f"rejects {dict(args)}: {error}; it takes {listed(names) or 'nothing'}"
    return f"takes no {unknown!r}, but {listed(names) or 'nothing'}{did_you_mean(unknown, names)}"


def check_gives(key: str, value: Any, kind: type, name: str) -> None:
    """Raise JobError if `value` is a class whose instances are no `kind`; what a function returns is not known."""
    if not inspect.isclass(value) or issubclass(value, kind):
        return
    if value.__new__ is object.__new__ and type(value).__call__ is type.__call__:
        raise JobError(f"{key}: must give a {name}, and {value.__qualname__} is no subclass of it")


def resolve(key: str, target: Target) -> Any:
    """Import the attribute that `module:attribute` names, or return the class or function given from Python.

    Raises JobError, with a close match as a hint, if there is no such module or attribute.
    """
    if not target.is_named:
        return target.target
    module_name, _, attribute = target.target.partition(":")
    value: Any = _import(key, module_name)
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise JobError(f"{key}: {module_name} has no attribute {name!r}{did_you_mean(name, dir(value))}")
        value = getattr(value, name)
    return value


def _import(key: str, module_name: str) -> Any:
    try:
        with importing_from_here():
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        raise JobError(
            f"{key}: cannot import {module_name!r}: there is no module {missing!r} "
            f"(looked from {os.getcwd()} and in what is installed)"
        ) from None
    except (Exception, SystemExit) as error:
        raise JobError(f"{key}: importing {module_name!r} raised {type(error).__name__}: {error}") from error


def keeps_state(made: Any) -> bool:
    """Return whether a metric, or its class, has the interface of a torchmetrics metric."""
    return all(hasattr(made, name) for name in ("update", "compute", "merge_state", "reset"))


def unmeasured(job: Job) -> Iterator[str]:
    """Yield a line for each metric of a training without evaluations that only these measure."""
    if job.task != "train" or job.eval is not None:
        return
    for name, metric in job.metrics.items():
        measure = resolve(f"metrics.{name}", metric) if isinstance(metric, Target) else metric
        if is_over_batch(metric) or keeps_state(measure):
            of = "whole batches" if is_over_batch(metric) else "a whole dataset"
            only = f"is measured over {of}, so by evaluations only"
            yield f"metrics.{name}: {only}, and there are none: set eval"


def paths_of(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the paths and URLs that a job's targets read as far as their args tell, each with its key."""
    for key, given in job.targets.items():
        if key.startswith("hooks."):  # they write
            continue
        if isinstance(given, Target):
            values: Any = given.args
        else:  # of an object from Python: its own values, and the files that a source of dp_ray has found
            own = getattr(given, "__dict__", {}).values()
            pins = getattr(given, "pins", None)
            values = [value for value in own if isinstance(value, str | os.PathLike)]
            values += pins if isinstance(pins, dict) else ()
        yield from ((key, location) for location in _locations(values))


def _locations(values: Any) -> Iterator[str]:
    """Yield the URLs among some values, and the paths of what exists; of a pattern, the folder in which it looks."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _locations(value)
    elif isinstance(values, str | os.PathLike) and (text := os.fspath(values)) and isinstance(text, str):
        fixed = PATTERN.split(text)[0]
        if fixed != text:
            fixed = fixed.rpartition("/")[0] or ("/" if text.startswith("/") else "")
        if "://" in fixed or (fixed and os.path.lexists(os.path.expanduser(fixed))):
            yield fixed
