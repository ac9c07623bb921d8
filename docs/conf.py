"""The site, by Sphinx; `make site` builds it. The pages are those that GitHub shows, where they stand.

What GitHub would show as code is made here, so that no page holds it: the menu and llms.txt (`menu.py`), tabs from
blocks that stand one after the other, tables of files, what autodoc is to show, and targets of links from
`<a id="..."></a>`.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import menu  # noqa: E402  (it stands beside this file)

import dp_ray  # noqa: E402

INDEX = (HERE / "index.md").read_text()
SUMMARY = "Data-parallel PyTorch on Ray: the batches, gradients and outputs of one GPU, on any number of workers."
# `<!-- tabs: YAML, Python -->`, a block for each, and `<!-- end of tabs -->`.
_TABS = re.compile(r"^<!-- tabs: (.*) -->\n(.*?)^<!-- end of tabs -->$", re.M | re.S)
# `<!-- autodoc: class dp_ray.Loop: steps, stop -->`: a name, and of a class the members that are shown. An `object`
# is of a class that the reader does not call.
_AUTODOC = re.compile(r"^<!-- autodoc: (class|object|function) ([\w.]+)(?:: (.*))? -->$", re.M)
# `<!-- table: benchmarks.csv -->`: a table of a file beside the page, whose first row is the head.
_TABLE = re.compile(r"^<!-- table: (\S+) -->$", re.M)
_BLOCK = re.compile(r"^```\w+\n.*?^```$", re.M | re.S)
_not_called: set[str] = set()
_ANCHOR = re.compile(r'<a id="([^"]+)">')

project = "dp_ray"
author = copyright = "the dp_ray developers"
version = release = dp_ray.__version__
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
source_suffix = {".md": "markdown"}
include_patterns = ["docs/**.md", "*.md"]
exclude_patterns = ["README.md", ".*", "build", "dist", "dp_ray", "jobs", "runs", "tests", "**/__pycache__"]

myst_heading_anchors = 6  # GitHub's, for links
myst_enable_extensions = ["colon_fence", "html_image"]
suppress_warnings = ["myst.header"]  # a page may begin with what GitHub shows above its title

default_role = "code"  # docstrings are written with single backticks
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "dp_ray"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_sourcelink_suffix = ""
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"
pygments_style, pygments_dark_style = "friendly", "monokai"


def add_what_github_lacks(app: Any, docname: str, source: list[str]) -> None:
    """Add the menu to a page's text, make tabs of its blocks, and have autodoc show what it names."""
    if docname == root_doc:
        source[0] += menu.menu(INDEX)
    source[0] += menu.menus_below(INDEX).get(f"{docname.removeprefix('docs/')}.md", "")
    source[0] = _TABLE.sub(r"```{csv-table}\n:file: \1\n:header-rows: 1\n```", source[0])
    source[0] = _AUTODOC.sub(_autodoc, _TABS.sub(_tabs, source[0]))


def _tabs(found: re.Match[str]) -> str:
    names, blocks = found[1].split(", "), _BLOCK.findall(found[2])
    assert len(names) == len(blocks), f"as many blocks as tabs: {found[1]}"
    items = [f":::{{tab-item}} {name}\n{block}\n:::\n" for name, block in zip(names, blocks, strict=True)]
    return f"::::{{tab-set}}\n{''.join(items)}::::"


def _autodoc(found: re.Match[str]) -> str:
    kind, name, members = found.groups()
    shown = [f"   :members: {members}"] if members else []
    directive = "function" if kind == "function" else "class"
    if kind == "object":
        _not_called.add(name)
    return "\n".join(["```{eval-rst}", f".. auto{directive}:: {name}", *shown, "```"])


def leave_out_signatures(app: Any, what: str, name: str, *_: Any) -> tuple[str, None] | None:
    """Show a class that the reader does not call without the arguments of its `__init__`."""
    return ("", None) if name in _not_called else None


def note_anchors(app: Any, doctree: Any) -> None:
    """Have links find each `<a id="...">`, as they find headings."""
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for node in doctree.findall(lambda node: node.tagname == "raw"):
        for name in _ANCHOR.findall(node.astext()):
            slugs.setdefault(name, (node.line or 1, name, name))


def write_beside_the_pages(app: Any, error: Exception | None) -> None:
    """Write llms.txt, and the pages that lead on: from the site's root to its front page, and from old addresses."""
    if error is None:
        out = Path(app.outdir)
        (out / "llms.txt").write_text(menu.llms_txt(INDEX, project, SUMMARY))
        moved = {f"docs/{old}": f"docs/{new}" for old, new in menu.MOVED.items()}
        for old, new in {"index.md": "docs/index.md", **moved}.items():
            page = (out / old).with_suffix(".html")
            page.parent.mkdir(parents=True, exist_ok=True)
            to = posixpath.relpath(new, posixpath.dirname(old)).removesuffix(".md") + ".html"
            page.write_text(
                f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={to}">'
                f'<a href="{to}">{project}</a>\n'
            )


def setup(app: Any) -> None:
    app.connect("source-read", add_what_github_lacks)
    app.connect("doctree-read", note_anchors)
    app.connect("autodoc-process-signature", leave_out_signatures)
    app.connect("build-finished", write_beside_the_pages)
