"""The site's own part of `make docs`: README is its first page, and links out of docs/ name the files they mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add README.md as the first page."""
    files.append(File.generated(config, "index.md", content=as_page((ROOT / "README.md").read_text())))
    return files


def as_page(readme: str) -> str:
    """Return README's text as a page of docs/: links into docs/ lose that folder, links to other files their target.

    `[tutorial](docs/tutorial.md)` -> `[tutorial](tutorial.md)`; a link to a script becomes its name in code type, since
    a site of pages has no such file.
    """
    readme = re.sub(r"\]\(docs/", "](", readme)
    return re.sub(r"\[([^\]]+)\]\((?:examples|benchmarks)/[^)]*\)", r"`\1`", readme)
