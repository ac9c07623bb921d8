"""Where modules that a job names are looked for."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_from_here() -> Iterator[None]:
    """Within the block, modules are found in the current folder too, also in an installed script or a worker."""
    here = os.getcwd()
    known = here in sys.path or "" in sys.path
    if not known:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if not known:
            sys.path.remove(here)
