"""The site's own part of `make docs`: README is its first page, links out of docs/ name the files they mean, and the
page of ops begins with a table of them.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from minigrad import ops

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add README.md as the first page."""
    files.append(File.generated(config, "index.md", content=as_page((ROOT / "README.md").read_text())))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put a table of all ops where a page asks for one."""
    return markdown.replace("<!-- ops -->", ops_table()) if "<!-- ops -->" in markdown else markdown


def ops_table() -> str:
    """Return all ops with their signatures and first lines."""
    rows = ["| op | what it does |", "|---|---|"]
    for name in ops.__all__:
        function = getattr(ops, name)
        given = inspect.signature(function).parameters.values()
        signature = str(inspect.Signature([p.replace(annotation=p.empty) for p in given]))
        first_line = (inspect.getdoc(function) or "").splitlines()[0].replace("|", "\\|")
        rows.append(f"| [`{name}{signature}`][{function.__module__}.{name}] | {first_line} |")
    return "\n".join(rows)


def as_page(readme: str) -> str:
    """Return README's text as a page of docs/: links into docs/ lose that folder, links to other files their target.

    `[tutorial](docs/tutorial.md)` -> `[tutorial](tutorial.md)`; a link to a script becomes its name in code type, since
    a site of pages has no such file.
    """
    readme = re.sub(r"\]\(docs/", "](", readme)
    return re.sub(r"\[([^\]]+)\]\((?:examples|benchmarks)/[^)]*\)", r"`\1`", readme)
