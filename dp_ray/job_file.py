"""A job file, `--set KEY=VALUE`, `--workers` and the keywords of `dp_ray.run` become a Job."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.secrets import hide


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """The job in a YAML file, with the dotted keys of `overrides` set in it.

    Raises JobError if the file cannot be read, is not YAML or is not a valid job.
    """
    return job_maker(path)(overrides or {})


def job_maker(path: str | Path) -> Callable[[Mapping[str, Any]], Job]:
    """A function that makes the job in a YAML file with any dotted keys set in it; the file is read once.

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
    """The job of these keys and values, with the dotted keys of `overrides` set in them."""
    for key, value in overrides.items():
        _lay_over(values, key.split("."), value)
    return Job.make(values, default_name)


def job_from(job: Job | str | os.PathLike[str] | None, keys: Mapping[str, Any]) -> Job:
    """The job of `dp_ray.run`: a Job, a job file or nothing, with `keys` in place of its own.

    A job without a name is named by the time. Raises JobError for anything else.
    """
    by_time = time.strftime("run-%Y%m%d-%H%M%S-") + f"{time.time_ns() % 10**6:06}"
    if job is None:
        return Job.make(keys, by_time)
    if isinstance(job, Job):
        return job if job.name and not keys else Job.make({**dict(job), **keys}, by_time)
    if not isinstance(job, str | os.PathLike):
        raise JobError(
            f"job: must be a Job or the path of a job file, got a {type(job).__qualname__}; the keys of a job are "
            "keywords: dp_ray.run(**keys)"
        )
    return load_job(Path(job), keys)


def parse_setting(text: str) -> tuple[str, Any]:
    """The dotted key and the YAML value of a `--set key=value`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise JobError(f"--set {text!r}: must be KEY=VALUE, like --set model.args.width=64")
    try:
        return key, from_yaml(value)
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
    """The value that a text of YAML holds; raises yaml.YAMLError if it is none."""
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
    """Set a nested key; a target given as text becomes a mapping when its args are set."""
    for key in keys[:-1]:
        inner = values.get(key)
        if inner is None or isinstance(inner, str):
            inner = {} if inner is None else {"target": inner}
        if not isinstance(inner, dict):
            raise JobError(f"{'.'.join(keys)}: {key} is {inner!r}, which has no keys of its own")
        values[key] = dict(inner)
        values = values[key]
    values[keys[-1]] = value
