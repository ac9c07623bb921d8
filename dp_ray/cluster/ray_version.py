"""Look, before Ray is imported, whether the installed Ray is a version that dp_ray was tested with.

dp_ray uses interfaces of Ray that change between versions (`internals/`). Versions below the range lack what it
needs. A newer one is not known: dp_ray tries it with one line, and without the quick start, whose private names are
the likeliest to have changed. docs/contributing/ray.md says how to test another one.
"""

import os
import re
from importlib import metadata

from dp_ray.errors import ClusterError

AT_LEAST, BELOW = (2, 56), (2, 61)
RANGE = ">={}.{},<{}.{}".format(*AT_LEAST, *BELOW)
TRIED = "DP_RAY_TRY_RAY"  # takes one version for one of the range, to test it


def installed() -> str | None:
    """Return the version of the installed Ray; None if there is none."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return None


def check_ray() -> None:
    """Raise ClusterError if Ray is not installed, or is older than dp_ray can work with."""
    version = installed()
    if version is not None and (_minor(version) >= AT_LEAST or version == os.environ.get(TRIED)):
        return
    there = "Ray is not installed" if version is None else f"Ray {version} is installed"
    raise ClusterError(
        f"{there}, and dp_ray works with Ray {RANGE}: run `python -m pip install 'ray[default,train]{RANGE}'`, "
        "or set workers to 0, which needs no Ray"
    )


def unknown_ray() -> str | None:
    """Return the line to show if nobody has tested dp_ray with the installed Ray; None if it is of the range."""
    version = installed() or ""
    if AT_LEAST <= _minor(version) < BELOW or version == os.environ.get(TRIED):
        return None
    return f"Ray {version} is installed, and dp_ray was tested with {RANGE}: it is used without the quick start"


def _minor(version: str) -> tuple[int, int]:
    """Return the major and minor number; those of no release, after all others, if it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (10**9, 0)
