"""What the peers' rows need: their packages beside this project's torch, and their scripts by commit."""

import os
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
import venv
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(os.environ.get("DP_RAY_PEERS", "~/.cache/dp_ray-peers")).expanduser()


class NotHere(Exception):
    """A package or a script that a row needs cannot be had."""


def environment(name: str, *requirements: str) -> Path:
    """The python of an environment with these requirements, pinned, beside all that this process's environment has.

    Raises:
        NotHere: they cannot be installed beside this project's torch, or not at all.
    """
    asked = "\n".join([*requirements, f"torch=={version('torch')}", sys.prefix])
    folder = FOLDER / "environments" / name
    python, made_of = folder / "bin" / "python", folder / "made-of.txt"
    if made_of.exists() and made_of.read_text() == asked:
        return python
    venv.create(folder, clear=True, with_pip=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(packages, "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={version('torch')}\n")
    command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHere(f"pip install {' '.join(requirements)}: {done.stderr.strip().splitlines()[-1]}")
    made_of.write_text(asked)
    return python


def script(repository: str, commit: str, path: str) -> Path:
    """A file of a repository on GitHub, "owner/name", as it stands at a commit of 40 digits.

    Raises:
        NotHere: it was never brought here, and cannot be.
    """
    file = FOLDER / "scripts" / repository / commit / path
    if not file.exists():
        url = f"https://raw.githubusercontent.com/{repository}/{commit}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text = answer.read()
        except (urllib.error.URLError, TimeoutError) as error:
            raise NotHere(f"{url} ({error}); put it at {file}") from error
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
    return file
