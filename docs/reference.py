"""Write what the code knows into pages; `make docs` runs this.

docs/job-file.md gets the tables of all keys from dp_ray/job/keys.py, docs/errors.md the errors from dp_ray/errors.py.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dp_ray import errors
from dp_ray.job.files import json_schema
from dp_ray.job.job import Job

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from groups_of_keys import GROUPS, LINKS  # noqa: E402  (it stands beside this file)

BEGIN = "<!-- `make docs` writes what follows, from {source}. -->\n"
END = "<!-- The end of what `make docs` writes. -->\n"
OF_TARGETS = ("target", "args")  # the page describes them once, above the tables


class Row(NamedTuple):
    """One key: its dotted name; the values that it takes, its default and its meaning, as Markdown."""

    key: str
    values: str
    default: str
    meaning: str


def updated(page: str, source: str, write: Callable[[], str]) -> str:
    """The page with what the code says today between its two markers."""
    before, begin, rest = page.partition(BEGIN.format(source=source))
    _, end, after = rest.partition(END)
    assert begin and end, f"the page has no markers: {BEGIN.format(source=source)}{END}"
    return f"{before}{begin}\n{write()}\n{END}{after}"


def keys() -> str:
    """The tables of all keys, in groups by task; the keys of a part follow it with dotted names."""
    rows = _all_rows()
    named = [key for _, _, keys in GROUPS for key in keys]
    assert sorted(named) == sorted(Job.model_fields), "docs/groups_of_keys.py: each key stands in one group"
    assert LINKS.keys() <= rows.keys(), f"docs/groups_of_keys.py: no keys: {LINKS.keys() - rows.keys()}"
    return "\n".join(_group(heading, says, keys, rows) for heading, says, keys in GROUPS)


def _group(heading: str, says: str, keys: tuple[str, ...], rows: "dict[str, Row]") -> str:
    """A group's table, with the parts of each key below it; those of the first group have a table of their own."""
    parts = {key: [row for row in rows.values() if re.match(rf"{key}[.\[]", row.key)] for key in keys}
    if heading != GROUPS[0][0]:
        return _table(heading, says, [row for key in keys for row in (rows[key], *parts[key])])
    first = _table(heading, says, [rows[key] for key in keys])
    below = _table(
        "Parts of these", "Keys within the mappings of some of them.", [row for key in keys for row in parts[key]]
    )
    return f"{first}\n{below}"


def _table(heading: str, says: str, rows: "list[Row]") -> str:
    lines = [f"### {heading}\n\n{says}\n\n| key | values | default | meaning |\n| --- | --- | --- | --- |\n"]
    for row in rows:
        meaning = f"{row.meaning} {LINKS[row.key]}" if row.key in LINKS else row.meaning
        anchor = row.key.replace("[]", "")
        lines.append(f'| <a id="{anchor}"></a>`{row.key}` | {row.values} | {row.default} | {meaning} |\n')
    return "".join(lines)


def _all_rows() -> "dict[str, Row]":
    schema = json_schema()
    keys = {name: key for name, key in schema["properties"].items() if name in Job.model_fields}
    return {row.key: row for row in _rows(keys, schema["required"], schema["$defs"], "")}


def all_errors() -> str:
    """A part for each error: what it means, an example, the exit status, and what to do."""
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and kind.__module__ == errors.__name__]
    public = [kind for kind in kinds if issubclass(kind, errors.Error | errors.RunInterrupted)]
    return "\n".join(map(_error, public))


def _error(kind: type[BaseException]) -> str:
    means, *paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    lines = [f"## {kind.__name__}", "", means, ""]
    for paragraph in paragraphs:
        if paragraph.startswith(">>>"):
            message = paragraph.rpartition("\n")[2].removeprefix(f"{errors.__name__}.")
            lines += ["```text", message, "```", ""]
        else:
            lines += [" ".join(paragraph.split()), ""]
    base = kind.__bases__[0]
    status = getattr(kind, "exit_status", errors.FAILED)
    either = " or 75" if kind is errors.RunInterrupted else ""
    above = "" if base is errors.Error else f" A kind of `{base.__name__}`."
    return "\n".join([*lines, f"Exit status {status}{either}.{above}", ""])


def _rows(keys: dict[str, Any], required: list[str], parts: dict[str, Any], before: str) -> Iterator[Row]:
    """A row for each key, followed by those of the part that it holds; `before` stands before their names."""
    for name, key in keys.items():
        default = "required" if name in required else _default(key)
        yield Row(f"{before}{name}", ", ".join(_values(key)), default, key["description"])
        inside = f"{before}{name}[]." if "items" in key else f"{before}{name}."
        for part in (parts[ref] for ref in _references(key)):
            yield from _rows(_own_keys(part), part.get("required", []), parts, inside)
        # What the items of a list have more that may stand in its place.
        told = {own for ref in _references(key) for own in parts[ref]["properties"]}
        lists = [one["items"] for one in key.get("anyOf", []) if "items" in one]
        for part in (parts[ref] for items in lists for ref in _references(items)):
            for own, about in part["properties"].items():
                if own not in told:
                    values = ", ".join(_values(about))
                    yield Row(f"{before}{name}[].{own}", values, _default(about), about["description"])


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
        case {"type": "array", "items": {"type": "integer"}}:
            yield "a list of whole numbers"
        case {"type": "array", "items": {"anyOf": [{"type": "string", "pattern": _}, *_]}}:
            yield "a list of targets"
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
        case {"type": "number"} if not key.keys() & {"minimum", "exclusiveMinimum"}:
            yield "a number"
        case {"type": "integer" | "number" as kind}:
            what = "a whole number" if kind == "integer" else "a number"
            least = 1 if kind == "integer" and "exclusiveMinimum" in key else key.get("minimum", 0)
            yield f"{what} above 0" if kind == "number" and "exclusiveMinimum" in key else f"{what} from {least:g} up"
        case {"type": "null"}:
            yield "`null`"
        case _:
            yield "text"


PAGES: dict[str, tuple[str, Callable[[], str]]] = {
    "job-file.md": ("dp_ray/job/keys.py", keys),
    "errors.md": ("dp_ray/errors.py", all_errors),
}

if __name__ == "__main__":
    for name, (source, write) in PAGES.items():
        (HERE / name).write_text(updated((HERE / name).read_text(), source, write))
