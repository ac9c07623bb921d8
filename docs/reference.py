"""Write the table of all keys of a job into docs/job-file.md; `make docs` runs this."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dp_ray.job.files import json_schema
from dp_ray.job.job import Job

PAGE = Path(__file__).with_name("job-file.md")
BEGIN = "<!-- The keys: `make docs` writes this table from dp_ray/job/keys.py and dp_ray/job/keys.py. -->\n"
END = "<!-- The end of the keys. -->\n"
OF_TARGETS = ("target", "args")  # the page describes them once, above the table


class Row(NamedTuple):
    """One key: its dotted name, the values that it takes, its default and its meaning, as Markdown."""

    key: str
    values: str
    default: str
    meaning: str


def updated(page: str) -> str:
    """The page with the table of today's keys between its two markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"the page has no markers: {BEGIN}{END}"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    """All keys, in the order of the model; the keys of a part follow it with dotted names."""
    schema = json_schema()
    keys = {name: key for name, key in schema["properties"].items() if name in Job.model_fields}
    rows = [Row("key", "values", "default", "meaning"), Row("---", "---", "---", "---")]
    rows += _rows(keys, schema["required"], schema["$defs"], "")
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows(keys: dict[str, Any], required: list[str], parts: dict[str, Any], before: str) -> Iterator[Row]:
    """A row for each key, followed by those of the part that it holds; `before` stands before their names."""
    for name, key in keys.items():
        default = "required" if name in required else _default(key)
        yield Row(f"`{before}{name}`", ", ".join(_values(key)), default, key["description"])
        inside = f"{before}{name}[]." if "items" in key else f"{before}{name}."
        for part in (parts[ref] for ref in _references(key)):
            yield from _rows(_own_keys(part), part.get("required", []), parts, inside)


def _own_keys(part: dict[str, Any]) -> dict[str, Any]:
    """The keys of a part, without those that every target has."""
    keys: dict[str, Any] = part["properties"]
    return {name: key for name, key in keys.items() if "target" not in keys or name not in OF_TARGETS}


def _references(key: dict[str, Any]) -> list[str]:
    """The names of the parts that a key may hold."""
    tried = [key, key.get("items", {}), *key.get("anyOf", [])]
    return [one["$ref"].rpartition("/")[2] for one in tried if "$ref" in one]


def _default(key: dict[str, Any]) -> str:
    """The default as YAML; nothing for a part, whose keys have defaults of their own."""
    if "$ref" in key:
        return ""
    default = key.get("default", [] if key.get("type") == "array" else {})
    if isinstance(default, float):
        default = f"{default:g}"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _values(key: dict[str, Any]) -> Iterator[str]:
    """The values that a key takes, in words or as YAML."""
    match key:
        case {"anyOf": [{"type": "string", "pattern": _}, {"$ref": _}, *others]}:
            yield "a target"
            for other in others:
                yield from _values(other)
        case {"anyOf": several}:
            for one in several:
                yield from _values(one)
        case {"enum": names}:
            yield from (f"`{name}`" for name in names)
        case {"const": name}:
            yield f"`{name}`"
        case {"$ref": _}:
            yield "a mapping"
        case {"type": "array", "items": {"enum": names}}:
            yield f"a list of {', '.join(f'`{name}`' for name in names)}"
        case {"type": "array", "items": {"type": "string"}}:
            yield "a list of text"
        case {"type": "array"}:
            yield "a list of mappings"
        case {"type": "object", "additionalProperties": {"anyOf": _}}:
            yield "targets by name"
        case {"type": "object", "additionalProperties": {"$ref": _}}:
            yield "mappings by name"
        case {"type": "object"}:
            yield "a mapping"
        case {"type": "boolean"}:
            yield "`true`, `false`"
        case {"type": "integer" | "number" as kind}:
            what = "a whole number" if kind == "integer" else "a number"
            least = 1 if kind == "integer" and "exclusiveMinimum" in key else 0
            yield f"{what} above 0" if kind == "number" and "exclusiveMinimum" in key else f"{what} from {least} up"
        case {"type": "null"}:
            yield "`null`"
        case _:
            yield "text"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
