"""What a fresh interpreter does."""

import subprocess
import sys


def modules_of(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `code`."""
    code += "\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    return {line.split(".")[0] for line in modules_of(code)}
