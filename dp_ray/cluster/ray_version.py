"""Checks, before Ray is imported, that the installed Ray is a version that dp_ray works with.

dp_ray uses interfaces of Ray that change between versions (`ray_internals/`), so it supports one series at a time.
docs/contributing/ray.md says how to try another one.
"""

import os
import re
from importlib import metadata

from dp_ray.errors import ClusterError

AT_LEAST, BELOW = (2, 60), (2, 61)
RANGE = ">={}.{},<{}.{}".format(*AT_LEAST, *BELOW)
TRIED = "DP_RAY_TRY_RAY"  # allows one version outside the range, to try it


def installed() -> str | None:
    """The version of the installed Ray; None if there is none."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return None


def check_ray() -> None:
    """Raise ClusterError if Ray is not installed, or not of the range that dp_ray works with."""
    found = installed()
    if found is not None and (_is_in_range(found) or found == os.environ.get(TRIED)):
        return
    there = "Ray is not installed" if found is None else f"Ray {found} is installed"
    raise ClusterError(
        f"{there}, and dp_ray works with Ray {RANGE}: run `python -m pip install 'ray[default,train]{RANGE}'`, "
        "or set workers to 0, which needs no Ray"
    )


def _is_in_range(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and AT_LEAST <= (int(numbers[1]), int(numbers[2])) < BELOW
