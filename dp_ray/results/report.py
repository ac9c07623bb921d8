"""What `dp-ray report` shows: one run, or several side by side."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dp_ray.job import Job
from dp_ray.key_hints import renamed
from dp_ray.results.result import Result
from dp_ray.results.shown import aligned, key_lines, measured, relative, shown
from dp_ray.rundir.files import RUN
from dp_ray.tensors.digest import is_inner

NO_DIFFERENCE = ("name", "storage")  # not compared: each run has its own


def lines(result: Result) -> list[str]:
    """One run as text: a line for each value that its result has, and for each metric."""
    found = shown({**result.to_json(), "metrics": result.metrics})
    return key_lines({key: value for key, value in found.items() if value != "-"}).splitlines()


def differing_keys(results: Sequence[Result]) -> dict[str, list[Any]]:
    """The keys in which the jobs of runs differ, as dotted paths, with each job's value."""
    jobs = [dict(_dotted(_job_of(result))) for result in results]
    keys = dict.fromkeys(key for job in jobs for key in job)
    found = {key: [job.get(key) for job in jobs] for key in keys if key not in NO_DIFFERENCE}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def compared_values(results: Sequence[Result]) -> dict[str, Any]:
    """Several runs as JSON values: their results, the job keys that differ, their metrics and their seconds."""
    runs = [result.to_json() for result in results]
    names = dict.fromkeys(name for run in runs for name in run["metrics"] if not is_inner(name))
    return {
        "runs": runs,
        "job": differing_keys(results),
        "metrics": {name: [run["metrics"].get(name) for run in runs] for name in names},
        "seconds": [run["seconds"] for run in runs],
    }


def compared(results: Sequence[Result]) -> str:
    """Several runs side by side as a table: the job keys that differ, status, steps, metrics and seconds."""
    differing = differing_keys(results)
    metrics = [measured(result.metrics) for result in results]
    names = dict.fromkeys(name for one in metrics for name in one)
    rows = [
        ("", [relative(result.run_dir) for result in results]),
        *((key, [_as_text(value) for value in values]) for key, values in differing.items()),
        ("status", [result.status for result in results]),
        ("steps", [str(result.total_steps or result.steps * result.epochs) for result in results]),
        *((f"metrics.{name}", [one.get(name, "-") for one in metrics]) for name in names),
        ("seconds", [f"{result.seconds:.1f}" for result in results]),
    ]
    table = [[name, *cells] for name, cells in rows]
    return "\n".join([aligned(table), ", ".join(_verdict(results, differing))])


def _verdict(results: Sequence[Result], differing: Mapping[str, Any]) -> Iterator[str]:
    """Whether the runs have the same job, weights and outputs."""
    counting = {key for key in differing if not {key, key.partition(".")[0]} & Job.CANNOT_CHANGE_THE_RESULT}
    yield "different jobs" if counting else "the same job"
    hashes: list[tuple[str, Callable[[Result], str | None]]] = [
        ("weights", lambda result: result.weights_sha256),
        ("outputs", lambda result: result.outputs_sha256),
    ]
    for what, hash_of in hashes:
        found = [hash_of(result) for result in results]
        if all(found):
            yield f"{'the same' if len(set(found)) == 1 else 'different'} {what}"


def _job_of(result: Result) -> dict[str, Any]:
    """A run's job, as its run.json holds it; empty if there is none."""
    run = result.storage()
    return renamed(json.loads(run.read_text(RUN)).get("job", {})) if run.exists(RUN) else {}


def _dotted(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings with their dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _as_text(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
