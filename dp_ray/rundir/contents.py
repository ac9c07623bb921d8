"""Names the work in a run directory, so that each advice to use `--overwrite` says what it deletes."""

from dp_ray.storage import Storage

COUNTED = {"checkpoints": "checkpoint", "parts": "part of the outputs"}  # folder: what one file in it is
NAMED = {
    "history": "history",
    "metrics.parquet": "history",
    "weights.safetensors": "weights",
    "model.safetensors.index.json": "weights",
    "outputs": "outputs",
    "outputs.parquet": "outputs",
}


def replacing(run: Storage) -> str:
    """The flag that replaces a run, and what it deletes: `... which deletes its 3 checkpoints and history`."""
    return f"(--overwrite, overwrite=True), which deletes {holdings(run)}"


def holdings(run: Storage) -> str:
    """What a run directory holds, in words: `its 3 checkpoints and history`."""
    counts = {noun: len(run.child(folder).names()) for folder, noun in COUNTED.items()}
    counted = [f"{count} {_plural(noun, count)}" for noun, count in counts.items() if count]
    named = [noun for name, noun in NAMED.items() if run.exists(name) or run.child(name).names()]
    found = [*counted, *dict.fromkeys(named)]
    if not found:
        return "its files (it has kept no step)"
    return "its " + " and ".join(part for part in (", ".join(found[:-1]), found[-1]) if part)


def _plural(noun: str, count: int) -> str:
    first, *rest = noun.split(" ")
    return " ".join([first + "s" * (count != 1), *rest])
