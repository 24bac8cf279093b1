"""The notebooks: their text runs, the built ones are of that text, and the tool that builds them."""

import re
from base64 import b64decode
from pathlib import Path

import pytest
from jobs import MPIRUN, ROOT, run_job

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")

from nbformat import NotebookNode  # noqa: E402  # after the check that it is there

from notebooks.build import build, check_output, sources  # noqa: E402

every_notebook = pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem)


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def write(folder: Path, *cells: str) -> Path:
    source = folder / "0_small.py"
    source.write_text("".join(f"# %%\n{cell}\n\n" for cell in cells))
    return source


@every_notebook
def test_the_built_notebook_has_the_cells_of_its_text(source: Path) -> None:
    text, built = (jupytext.read(path) for path in (source, source.with_suffix(".ipynb")))
    assert [(c.cell_type, c.source) for c in built.cells] == [(c.cell_type, c.source) for c in text.cells], (
        "run `make notebooks`"
    )
    for output in outputs(built):
        assert output.output_type != "error"
        check_output(output, source.name)


@every_notebook
def test_it_asks_a_question_shows_a_picture_and_checks_itself(source: Path) -> None:
    built = jupytext.read(source.with_suffix(".ipynb"))
    first = built.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {source.name[0]}. ")
    assert "?" in first.source
    assert "image/png" in {kind for output in outputs(built) for kind in output.get("data", {})}
    assert any(re.search(r"^ *assert ", cell.source, re.MULTILINE) for cell in built.cells if cell.cell_type == "code")
    assert "hings to try" in built.cells[-1].source


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=source.stem, marks=[pytest.mark.long] if source.name[0] in "25678" else [])
        for source in sources()
    ],
)
def test_its_text_runs_as_a_script(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if MPIRUN is None and "mpirun" in source.read_text(encoding="utf-8"):
        pytest.skip("no mpirun beside this Python or on the PATH")
    monkeypatch.setenv("MPLBACKEND", "agg")
    result = run_job(["-W", "error", str(source)], ranks=None, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == [], "a notebook leaves nothing where it is run"


@pytest.mark.long
def test_memory_is_counted_where_no_kernel_was_compiled_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fresh clone notebook 5 counted numba at work, on kernels that only the second backward wanted."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    pytest.importorskip("numba")
    monkeypatch.setenv("MINIGRAD_KERNELS", "numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    result = run_job([str(source) for source in sources() if source.name[0] == "5"], ranks=None, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_all_notebooks_are_found() -> None:
    folder = ROOT / "examples" / "notebooks"
    assert [source.name[0] for source in sources()] == [*"12345678"]
    assert {path.stem for path in folder.glob("*.ipynb")} == {source.stem for source in sources()}


def test_build_gives_the_same_notebook_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(
        tmp_path,
        "import matplotlib.pyplot as plt\nfrom pathlib import Path\n",
        "Path('left.txt').write_text('behind'), plt.plot([1, 2]), plt.show()\nprint('one', flush=True)\nprint('two')\n",
        "[path.name for path in Path('.').glob('*.txt')]",
    )
    first = build(source)
    assert first == build(source)
    assert [path.name for path in tmp_path.iterdir()] == ["0_small.py"], "cells run elsewhere"
    built = jupytext.reads(first, fmt="ipynb")
    assert [cell.id for cell in built.cells] == ["cell-0", "cell-1", "cell-2"]
    assert {cell.execution_count for cell in built.cells} == {None}
    assert [output.output_type for output in outputs(built)] == ["display_data", "stream", "execute_result"]
    palette = 3  # PNG's colour type, behind signature, chunk head, width, height and depth
    assert b64decode(outputs(built)[0].data["image/png"])[25] == palette, "few colours, few bytes"
    assert outputs(built)[1].text == "one\ntwo\n"
    assert outputs(built)[2].data["text/plain"] == "['left.txt']"


def test_build_refuses_a_cell_that_fails(tmp_path: Path) -> None:
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=r"AssertionError\S*: the sum is not 3"):
        build(write(tmp_path, "assert 1 + 1 == 3, 'the sum is not 3'"))


def test_build_refuses_large_outputs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^0_small\.py: a notebook has at most 300000 bytes, got 3\d{5}$"):
        build(write(tmp_path, "print(('x' * 99 + chr(10)) * 3000)"))  # one long line takes nbclient a minute


def test_build_refuses_anything_but_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"made from its \.py file, got 1_it\.ipynb"):
        build(Path("1_it.ipynb"))


@pytest.mark.parametrize(
    ("output", "rule"),
    [
        ({"output_type": "stream", "name": "stderr", "text": "Warning"}, "nothing to stderr, got 'Warning'"),
        ({"output_type": "stream", "name": "stdout", "text": "<f at 0x7f12>"}, "the same at every run"),
        ({"output_type": "execute_result", "data": {"text/plain": "[<Line2D at 0x7f>]"}}, "the same at every run"),
        ({"output_type": "display_data", "data": {"image/svg+xml": "<svg/>"}}, r"as image/png, got image/svg\+xml$"),
    ],
)
def test_build_refuses_what_a_reader_should_not_see(output: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^it, cell 3: .*{rule}"):
        check_output(NotebookNode(output), "it, cell 3")
