"""The site's menu: docs/index.md lists all pages in groups, each with a sentence; it makes menu and llms.txt."""

import posixpath
import re
from typing import NamedTuple

_GROUP = re.compile(r"^## (.*)$", re.M)
_ENTRY = re.compile(r"^( *)- \[([^\]]+)\]\(([^)#]+\.md)\): (.*)$", re.M)

# Pages that have become part of another one, both as paths from docs/: the site leads on from the old addresses.
MOVED = {
    "carry-on.md": "faults.md",
    "comparison.md": "coming-from.md",
    "contributing/glossary.md": "glossary.md",
    "contributing/memory.md": "contributing/sharding.md",
    "files.md": "data.md",
    "predictions.md": "outputs.md",
    "python.md": "api.md",
    "where-time-goes.md": "seeing-a-run.md",
}


class Entry(NamedTuple):
    """A page of the menu: its title, its path as docs/index.md links to it, its sentence, and the pages below it."""

    title: str
    path: str
    sentence: str
    below: tuple["Entry", ...] = ()


def groups(index: str) -> dict[str, list[Entry]]:
    """Return the entries of each group; a heading without entries is none."""
    _, *parts = _GROUP.split(index)
    found = {heading: _entries(text) for heading, text in zip(parts[::2], parts[1::2], strict=True)}
    return {heading: entries for heading, entries in found.items() if entries}


def _entries(text: str) -> list[Entry]:
    entries: list[Entry] = []
    for indent, title, path, sentence in _ENTRY.findall(text):
        entry = Entry(title, path, sentence)
        if indent:
            entries[-1] = entries[-1]._replace(below=(*entries[-1].below, entry))
        else:
            entries.append(entry)
    return entries


def menu(index: str) -> str:
    """Return MyST's hidden tables of contents for the end of docs/index.md: one for each group."""
    return "".join(_toctree(entries, heading) for heading, entries in groups(index).items())


def menus_below(index: str) -> dict[str, str]:
    """Return the same for the end of each page that has pages below it, by its path."""
    parents = [entry for entries in groups(index).values() for entry in entries if entry.below]
    folders = {entry.path: posixpath.dirname(entry.path) for entry in parents}
    return {entry.path: _toctree(entry.below, "", folders[entry.path]) for entry in parents}


def _toctree(entries: "list[Entry] | tuple[Entry, ...]", caption: str, folder: str = ".") -> str:
    titled = [f":caption: {caption}"] if caption else []
    pages = [f"{entry.title} <{posixpath.relpath(entry.path, folder)}>" for entry in entries]
    return "\n".join(["", "```{toctree}", ":hidden:", *titled, "", *pages, "```", ""])


def llms_txt(index: str, title: str, summary: str) -> str:
    """Return llms.txt (llmstxt.org): each page's Markdown, as the site serves it, with its sentence."""
    lines = [f"# {title}", "", f"> {summary}"]
    for heading, entries in groups(index).items():
        lines += ["", f"## {heading}", ""]
        for page in [page for entry in entries for page in (entry, *entry.below)]:
            address = posixpath.normpath(posixpath.join("_sources/docs", page.path))
            lines.append(f"- [{page.title}]({address}): {_plain(page.sentence)}")
    return "\n".join(lines) + "\n"


def _plain(sentence: str) -> str:
    """Return a sentence without its links."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
