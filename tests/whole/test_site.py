"""The pages as a site: it builds, its links lead somewhere, and its reference leaves out no module."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from jobs import ROOT

from minigrad import ops

PACKAGES = ("minigrad", "distributed", "pipeline")
FOLDERS = (*PACKAGES, "examples", "benchmarks", "tests", "docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]  # strict: see mkdocs.yml
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as most
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.long
def test_it_builds_with_every_link_leading_somewhere(site: Path) -> None:
    assert {page.stem for page in site.glob("*.html")} >= {"index", "tutorial", "how-to", "schedules", "design"}


@pytest.mark.long
def test_what_builds_the_pages_is_no_part_of_them(site: Path) -> None:
    """Python's own folder once was, beside the hook that it had compiled."""
    assert (ROOT / "docs" / "__pycache__").is_dir()
    assert [path.name for path in site.rglob("*") if path.suffix in (".py", ".pyc") or path.name == "__pycache__"] == []


@pytest.mark.long
def test_it_fetches_nothing(site: Path) -> None:
    """A link may lead out; a script, a style or a picture comes with the page."""
    fetched = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="?(?:https?:)?//')
    assert [page.name for page in site.rglob("*.html") if fetched.search(page.read_text())] == []


@pytest.mark.long
def test_the_page_of_ops_begins_with_all_of_them(site: Path) -> None:
    page = (site / "api" / "ops.html").read_text()
    table = page[: page.index("</table>")]
    assert re.findall(r"<code>(\w+)\(.*?\)</code></a>", table) == ops.__all__


def test_a_file_that_a_page_or_a_docstring_names_is_there() -> None:
    tracked = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    known = {"/".join(path.parts[i:]) for path in tracked for i in range(len(path.parts))}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in pages + sources
        for name in re.findall(r"`([\w./-]+\.(?:py|cu))`", path.read_text())
    }
    assert len(named) > 100
    assert {(page, name) for page, name in named if name not in known} == {
        ("docs/how-to.md", "case.py"),  # a reader's own
        ("docs/tutorial.md", "mine.py"),
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_module_once(package: str) -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    listed = Counter(re.findall(rf"^::: ({package}\.\S+)$", pages, flags=re.MULTILINE))
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / package).rglob("*.py")
        if not path.name.startswith("__") and "cli" not in path.parts  # commands are no interface of Python
    }
    assert listed == Counter(modules)
