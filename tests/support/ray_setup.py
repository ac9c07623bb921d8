"""Runs in place of Ray's `setup_worker.py`, which imports Ray: enters a runtime environment, and becomes the worker.

The worker's program is the first argument that is not for Ray's `setup_worker.py`. This imports little, since it runs
once for each worker.
"""

import json
import os
import runpy
import sys
from typing import Any

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    """Enter the runtime environment that the arguments hold, and run the program with the others."""
    for one in sys.argv:
        if one.startswith(CONTEXT):
            enter(json.loads(one.removeprefix(CONTEXT)))
    sys.argv = [one for one in sys.argv[1:] if not one.startswith((CONTEXT, LANGUAGE))]
    runpy.run_path(sys.argv[0], run_name="__main__")


def enter(context: dict[str, Any]) -> None:
    """Set the environment variables of a runtime_env, and go to its working directory."""
    for name, value in context.get("env_vars", {}).items():
        os.environ[name] = os.path.expandvars(value)
    if context.get("command_prefix"):
        _, folder, _ = context["command_prefix"]  # cd FOLDER &&
        os.chdir(folder)


if __name__ == "__main__":
    main()
