"""Make a Job of a job file, `--set KEY=VALUE`, `--workers` and the keywords of `dp_ray.run`. Begin at `job_from`.

Below: the JSON schema of a job file, for editors and for the reference in the documentation; and the differences of
two descriptions of a job, key by key.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from dp_ray.errors import JobError
from dp_ray.job.args import inner_path
from dp_ray.job.job import Job
from dp_ray.text import a_kind, hide


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """Return the job in a YAML file, with the dotted keys of `overrides` set in it.

    Raises JobError if the file cannot be read, is not YAML or is not a valid job.
    """
    return job_maker(path)(overrides or {})


def job_maker(path: str | Path) -> Callable[[Mapping[str, Any]], Job]:
    """Return a function that makes the job in a YAML file with any dotted keys set in it; the file is read once.

    Both raise JobError, as `load_job`.
    """
    values = _read_yaml(Path(path))

    def make(overrides: Mapping[str, Any]) -> Job:
        try:
            return job_of(dict(values), overrides, default_name=Path(path).stem)
        except JobError as error:
            raise JobError(f"{path}: {error}") from None

    return make


def job_of(values: dict[str, Any], overrides: Mapping[str, Any], default_name: str) -> Job:
    """Return the job of these keys and values, with the dotted keys of `overrides` set in them."""
    for key, value in overrides.items():
        _lay_over(values, key.split("."), value)
    return Job.make(values, default_name)


def job_from(job: Job | str | os.PathLike[str] | None, keys: Mapping[str, Any]) -> Job:
    """Return the job of `dp_ray.run`: a Job, a job file or nothing, with `keys` in place of its own.

    A job without a name is named by the time. Raises JobError for anything else.
    """
    # With microseconds, since a loop of short runs begins several in a second.
    by_time = time.strftime("run-%Y%m%d-%H%M%S-") + f"{time.time_ns() % 10**6:06}"
    if job is None:
        return Job.make(keys, by_time)
    if isinstance(job, Job):
        own = {key: value for key, value in job if key != "task" or key in job.model_fields_set}
        return job if job.name and not keys else Job.make({**own, **keys}, by_time)
    if not isinstance(job, str | os.PathLike):
        raise JobError(
            f"job: must be a Job or the path of a job file, got {a_kind(job)}; the keys of a job are "
            "keywords: dp_ray.run(**keys)"
        )
    return load_job(Path(job), keys)


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the dotted key and the YAML value of a `--set key=value`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise JobError(f"--set {text!r}: must be KEY=VALUE, like --set model.args.width=64")
    try:
        return key, from_yaml(value)
    except yaml.YAMLError as error:
        raise JobError(f"--set {text!r}: the value is not YAML: {error}") from None


def parse_workers(text: str) -> int | dict[str, int]:
    """Return the value of `--workers`: `N`, or `MIN:MAX`."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        return {"min": int(match[1]), "max": int(match[2])}
    raise JobError(f"--workers {text!r}: must be N, like 4 (0: in this process), or MIN:MAX, like 1:8")


def parse_counts(text: str) -> list[int]:
    """Return the value of verify's `--workers`: numbers with commas between them."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise JobError(f"--workers {text!r}: must be numbers of workers, like 1,2,3,8")
    return [int(part) for part in text.split(",")]


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, and a key that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"the key {key.value!r} is given twice, the second time{key.start_mark}")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def from_yaml(text: str) -> Any:
    """Return the value that a text of YAML holds; raise yaml.YAMLError if it is none."""
    return yaml.load(text, _Loader)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = from_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise JobError(f"{path}: is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise JobError(f"{path}: must hold keys and values, like 'batch_size: 30', got {hide(repr(values)):.80}")
    return {str(key): value for key, value in values.items()}


def _lay_over(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set a nested key, or an item of a list; a target given as text becomes a mapping when its args are set."""
    within: Any = values
    for number, key in enumerate(keys):
        at: Any = key
        if isinstance(within, list):
            if not key.isdecimal() or int(key) >= len(within):
                path = ".".join(keys[:number])
                raise JobError(
                    f"{'.'.join(keys)}: {path} is a list of {len(within)}; name an item by its number, from 0, like "
                    f"{path}.0, got {key!r}"
                )
            at = int(key)
        if number == len(keys) - 1:
            within[at] = value
            return
        inner = within[at] if isinstance(within, list) else within.get(at)
        if inner is None or isinstance(inner, str):
            inner = {} if inner is None else {"target": inner}
        if not isinstance(inner, dict | list):
            raise JobError(f"{'.'.join(keys)}: {key} is {inner!r}, which has no keys of its own")
        within[at] = inner.copy()  # it may be the caller's
        within = within[at]


class _KeysOnly(GenerateJsonSchema):
    """Pydantic's schema with descriptions of keys alone: an editor would show those of parts in their place."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would repeat the key

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return {key: value for key, value in super().model_schema(schema).items() if key != "description"}


def json_schema() -> dict[str, Any]:
    """Return the keys of a job file with their values, defaults and meanings, as JSON Schema.

    It checks each key by itself. `dp-ray plan` also checks what must hold among several keys.
    """
    schema = Job.model_json_schema(schema_generator=_KeysOnly)
    schema = json.loads(json.dumps(schema).replace(r"\n", " "))  # the line breaks of the descriptions in their source
    about = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "A job of dp_ray",
        "description": "What to run: a model over a dataset.",
    }
    of_targets = {  # model_args, dataset_args and so on
        f"{key}_args": {"type": ["object", "null"], "description": f"The args of `{key}`, in a key of their own."}
        for key in Job.TARGETED
    }
    return {**about, **schema, **about, "properties": {**schema["properties"], **of_targets}}


NOT_SET = object()
SHOWN = 80  # characters of a value


def dotted(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, and of lists of targets, with their dotted keys.

    >>> list(dotted({"optimizer": {"args": {"lr": 0.1}}, "batch_size": 32}))
    [('optimizer.args.lr', 0.1), ('batch_size', 32)]
    """
    for key, value in values.items():
        if (
            isinstance(value, list)
            and value
            and all(isinstance(each, Mapping) and "target" in each for each in value)
        ):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from dotted(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def differences(there: Any, here: Any, path: str = "") -> Iterator[str]:
    """Yield a text for each value that differs: `optimizer.args.lr: 0.003 there, 0.01 here`.

    A mapping on one side only is named by its target, or called "set"; its values are not listed.

    >>> list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}}))
    ['a.c: 2 there, not set here', 'a.d: not set there, 3 here']
    """
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys([*there, *here]):
            yield from differences(there.get(key, NOT_SET), here.get(key, NOT_SET), inner_path(path, key))
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, (theirs, ours) in enumerate(zip(there, here, strict=True)):
            yield from differences(theirs, ours, inner_path(path, number))
    elif not same(there, here):
        yield f"{path}: {_shown(there, here)} there, {_shown(here, there)} here"


def same(there: Any, here: Any) -> bool:
    """Return whether two JSON values are written alike: nan is itself, and 1 is not 1.0: a model may count by it."""
    if NOT_SET in (there, here):
        return there is here
    return json.dumps(there, sort_keys=True) == json.dumps(here, sort_keys=True)


def _shown(value: Any, other: Any) -> str:
    """Return a value in a few words: a mapping by its target, a long text from where `other` differs."""
    if value is NOT_SET:
        return "not set"
    if isinstance(value, dict):
        return repr(value["target"]) if "target" in value else "set"
    if isinstance(value, list):
        return f"{len(value)} items" if len(repr(value)) > SHOWN else repr(value)
    if isinstance(value, str) and isinstance(other, str) and value[:SHOWN] == other[:SHOWN]:
        alike = next(at for at, (char, others) in enumerate(zip_longest(value, other)) if char != others)
        return "..." + repr(value[max(0, alike - SHOWN // 4) : alike + SHOWN // 2])
    return f"{value!r:.{SHOWN}}"
