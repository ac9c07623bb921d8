"""What is sent to a cluster before a job runs there: which files, and how large they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dp_ray.cluster.ray_internals.packages import packed_files
from dp_ray.text import counted

LARGE = 100e6  # bytes
LARGEST = 5


def told_uploads(code: dict[str, Any]) -> Iterator[str]:
    """Lines on what the runtime_env `code` sends: files, bytes, and of a large one the largest files."""
    folder = Path(code["working_dir"])
    sizes = sizes_of(packed_files(str(folder), code["excludes"]))
    modules = [size for module in code["py_modules"] for size in sizes_of(packed_files(module, ())).values()]
    whole = sum(sizes.values()) + sum(modules)
    yield (
        f"sends {counted(len(sizes), 'file')} of {folder} ({text_of_bytes(sum(sizes.values()))}) and dp_ray "
        f"({text_of_bytes(sum(modules))}), unless the cluster has them"
    )
    if whole > LARGE:
        largest = sorted(sizes, key=lambda path: (-sizes[path], path))[:LARGEST]
        named = ", ".join(f"{path.relative_to(folder)} {text_of_bytes(sizes[path])}" for path in largest)
        yield (
            f"warning: that is {text_of_bytes(whole)}; the largest: {named}; what a .gitignore or .rayignore names "
            "is not sent"
        )


def sizes_of(paths: list[Path]) -> dict[Path, int]:
    """The bytes of each file."""
    return {path: path.stat().st_size for path in paths}


def text_of_bytes(size: float) -> str:
    """`812 B`, `3.2 MB`."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
