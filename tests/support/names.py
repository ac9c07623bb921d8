"""Names of files, drawn at random, with ways to name them; and which files these take, by Python's fnmatch."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from dp_ray.data.files import find_files
from dp_ray.errors import DataError

WILDCARDS = {"*", "?", "[a-z]", "[!_]", "[.]", "**"}
SUFFIXES = (".csv", ".tsv")
PIECES = ["a", "b", ".csv", ".CSV", ".Tsv", ".txt", "%20", "%", "%4", "ü", "u\u0308", "日", " ", "[", "]", "[ab]"]
PIECES += [
    "*",
    "?",
    "#",
    "!",
    "+",
    "&",
    "=",
    "~",
    "_",
    ".",
    "-",
    "\\",
    "{a,b}",
    "@",
    ":",
    ";",
    "'",
    '"',
    "^",
    "<",
    "|",
    "$",
]


def parts(more: Sequence[str] = ()) -> st.SearchStrategy[str]:
    """Names of files and folders, without a slash."""
    pieces = st.lists(st.sampled_from([*PIECES, *more]), min_size=1, max_size=4).map("".join)
    found = st.one_of(pieces.map(lambda one: f"{one}.csv"), pieces, st.sampled_from(["a", "_a", ".a", "a.csv"]))
    return found.filter(lambda one: one not in (".", ".."))


def trees(more: Sequence[str] = ()) -> st.SearchStrategy[list[str]]:
    """Files by their path in a folder; no path is a folder of another one."""

    def are_apart(names: list[str]) -> bool:
        return not any(name.startswith(f"{other}/") for name in names for other in names)

    paths = st.lists(parts(more), min_size=1, max_size=3).map("/".join)
    return st.lists(paths, min_size=1, max_size=6, unique=True).map(sorted).filter(are_apart)


@dataclass(frozen=True)
class Way:
    """A way to name files below a folder: parts, each of texts as they are and of wildcards."""

    parts: list[list[tuple[str, bool]]]

    @property
    def pattern(self) -> str:
        """As a glob on a disk; what is no wildcard is escaped where there is a wildcard at all."""
        if not self.is_glob:
            return self.plain
        return "/".join(
            "".join(text if is_wild else glob.escape(text) for text, is_wild in part) for part in self.parts
        )

    @property
    def is_glob(self) -> bool:
        return any(is_wild for part in self.parts for _, is_wild in part)

    def url(self, plain: bool) -> str:
        """As a URL, with as little encoded as must be, or with all."""

        def encoded(text: str) -> str:
            if plain:
                return re.sub(r"[?#*\[\]]|%(?=[0-9A-Fa-f]{2})", lambda found: quote(found[0]), text)
            return quote(text, safe="")

        return "/".join("".join(text if is_wild else encoded(text) for text, is_wild in part) for part in self.parts)

    @property
    def plain(self) -> str:
        """All texts as they are: what a URL's path is when it is decoded."""
        return "/".join("".join(text for text, _ in part) for part in self.parts)

    def takes(self, names: Sequence[str], given: str) -> list[str]:
        """The files among these that are named so, in order; a `given` path that looks like a glob may exist."""
        if given in names:
            return [given]
        if inside := [name for name in names if name.startswith(f"{given}/")]:
            visible = [name for name in inside if not any(map(_is_hidden, name[len(given) + 1 :].split("/")))]
            return sorted(name for name in visible if name.lower().endswith(SUFFIXES))
        assert self.is_glob
        patterns = _without_deep(self.pattern.split("/"), max(name.count("/") + 1 for name in names))
        return sorted(name for name in names if any(_matches(name.split("/"), pattern) for pattern in patterns))


def _without_deep(pattern: list[str], deepest: int) -> list[list[str]]:
    """The patterns that have any number of `*` for a `**`; at the end it stands for one or more."""
    if "**" not in pattern:
        return [pattern]
    at = pattern.index("**")
    least = 1 if at == len(pattern) - 1 else 0
    rests = _without_deep(pattern[at + 1 :], deepest)
    return [[*pattern[:at], *["*"] * number, *rest] for number in range(least, deepest + 1) for rest in rests]


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(
        fnmatchcase(part, like) and (not _is_hidden(part) or like[:1] == part[0])
        for part, like in zip(name, pattern, strict=True)
    )


def _is_hidden(part: str) -> bool:
    return part[0] in "._"


@st.composite
def ways(draw: st.DrawFn, names: list[str]) -> Way:
    """A way that is like one of the names: whole or a part of it, with wildcards in some places."""
    found: list[list[tuple[str, bool]]] = []
    name = draw(st.sampled_from(names)).split("/")
    for part in name[: draw(st.integers(1, len(name)))]:
        kind = draw(st.sampled_from(["as it is", "as it is", "one", "some", "all", "deep"]))
        if kind == "as it is":
            found.append([(part, False)])
        elif kind == "some":
            begin = draw(st.integers(0, len(part)))
            stop = draw(st.integers(begin, len(part)))
            wild = draw(st.sampled_from(sorted(WILDCARDS - {"**"})))
            found.append([(part[:begin], False), (wild, True), (part[stop:], False)])
        elif kind == "one":
            at = draw(st.integers(0, len(part) - 1))
            found.append([(part[:at], False), ("?", True), (part[at + 1 :], False)])
        else:
            found.append([("*" if kind == "all" else "**", True)])
    return Way(found)


def found_at(paths: Any) -> list[str]:
    """The paths of the files in their storage; none if there are none, or if a name is no UTF-8."""
    try:
        return [file.folder.file(file.name) for file in find_files(paths, SUFFIXES)]
    except DataError as error:
        return [] if "no UTF-8" not in str(error) else [os.fsdecode(b"\xff")]
