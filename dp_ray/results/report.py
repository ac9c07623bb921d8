"""What `dp-ray report` shows of one run."""

from dp_ray.results.result import Result
from dp_ray.results.shown import key_lines, shown


def lines(result: Result) -> list[str]:
    """One run as text: a line for each value that its result has, and for each metric."""
    found = shown({**result.to_json(), "metrics": result.metrics})
    return key_lines({key: value for key, value in found.items() if value != "-"}).splitlines()
