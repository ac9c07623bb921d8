"""README, CONTRIBUTING and the pages of docs/: their blocks of code, their links, the anchors of their headings."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, at the line of its fence."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The name in its first line, as `# train.py`, if it is a file that the reader is to write."""
        found = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return found[1] if found else None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = _FENCED.finditer(text)
    return [Block(page, text.count("\n", 0, one.start()) + 1, one[1], one[2]) for one in found]


def prose_of(page: Path) -> str:
    """The page without its blocks."""
    return _FENCED.sub("", page.read_text())


def inline_of(page: Path) -> list[str]:
    """The code within the page's sentences and tables."""
    return re.findall(r"`([^`\n]+)`", prose_of(page))


def links_of(page: Path) -> list[str]:
    return [one[1] or one[2] for one in _LINK.finditer(prose_of(page))]


def anchors_of(page: Path) -> list[str]:
    """The anchors of the headings, as GitHub makes them, and those that the page has itself."""
    prose = prose_of(page)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    made = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return made + re.findall(r'<a id="([^"]+)">', prose)


def num_words(page: Path) -> int:
    """The words of its sentences and tables, without blocks of code."""
    return len(prose_of(page).split())
