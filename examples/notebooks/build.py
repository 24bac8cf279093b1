# python examples/notebooks/build.py [4_schedules_and_the_bubble.py ...]
"""Makes each notebook from its text: cells from the .py file, outputs from running them; `make notebooks` runs it.

The text is the source, to be read, changed and reviewed. The .ipynb is committed too, so that the pictures show where
no Python runs. It holds no date, no path and no count of runs, so it changes only where a cell or an output does. Times
that a notebook measures (5 and 6 do) are another output at every build: build those on a calm machine.
"""

from __future__ import annotations

import os
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from minigrad.extras import needs

try:
    import jupytext
    import nbformat
    from nbclient import NotebookClient
    from nbformat import NotebookNode
    from PIL import Image
    from traitlets.config import Config
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    package = {"PIL": "pillow"}.get(str(error.name), str(error.name))
    print(needs("a notebook, to be built,", package, "notebooks"), file=sys.stderr)
    sys.exit(2)

FOLDER = Path(__file__).parent
LIMIT_SECONDS = 120  # for a cell
LIMIT_BYTES = 300_000  # for a notebook, which stays in the project's history for ever
ENVIRON = os.environ | {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # pictures become outputs, whatever the shell says
    "OPENBLAS_NUM_THREADS": "1",
}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def sources() -> list[Path]:
    """Return the text of all notebooks, in reading order."""
    return sorted(FOLDER.glob("[0-9]*.py"))


def build(source: Path) -> str:
    """Run the cells of a text file, and return them with their outputs as a notebook.

    Raises:
        CellExecutionError: a cell failed.
        ValueError: an output is not fit to be shown, see `check_output`, or the outputs are too large.
    """
    if source.suffix != ".py":
        raise ValueError(f"a notebook is made from its .py file, got {source}")
    notebook = jupytext.read(source, fmt="py:percent")
    with TemporaryDirectory() as folder:  # for what cells write
        NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=LIMIT_SECONDS,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
            config=Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"}),  # sockets that are ours alone
        ).execute(env=ENVIRON)
    notebook.metadata = METADATA
    for index, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{index}", {}
        for output in cell.get("outputs", []):
            check_output(output, f"{source.name}, cell {index}")
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _with_palette(output.data["image/png"])
        for counted in _counted(cell):
            counted.execution_count = None
    text: str = nbformat.writes(notebook) + "\n"
    if len(text) > LIMIT_BYTES:
        raise ValueError(f"{source.name}: a notebook has at most {LIMIT_BYTES} bytes, got {len(text)}")
    return text


def check_output(output: NotebookNode, where: str) -> None:
    """Refuse what a reader should not see.

    Raises:
        ValueError: the output was written to stderr, as warnings are, shows a memory address, or is a picture
            without a PNG, and GitHub may not show other kinds.
    """
    if output.get("name") == "stderr":
        raise ValueError(f"{where}: a cell writes nothing to stderr, got {output.text!r}")
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    if " at 0x" in text:
        raise ValueError(f"{where}: an output must be the same at every run, got an address: {text!r}")
    pictures = sorted(kind for kind in output.get("data", {}) if kind.startswith("image/"))
    if pictures and "image/png" not in pictures:
        raise ValueError(f"{where}: a picture is shown as image/png, got {', '.join(pictures)}")


def _with_palette(png: str) -> str:
    """Return a picture, PNG in base64, with at most 256 colours: it looks the same and has a third of the bytes."""
    file = BytesIO()
    Image.open(BytesIO(b64decode(png))).convert("RGB").quantize(256).save(file, "PNG", optimize=True)
    return b64encode(file.getvalue()).decode()


def _counted(cell: NotebookNode) -> Iterator[NotebookNode]:
    """Yield what says how many cells the kernel had run: a code cell, and its value among the outputs."""
    return (node for node in [cell, *cell.get("outputs", [])] if "execution_count" in node)


if __name__ == "__main__":
    for source in [Path(argument) for argument in sys.argv[1:]] or sources():
        text = build(source)
        source.with_suffix(".ipynb").write_text(text, encoding="utf-8")
        print(f"{source.with_suffix('.ipynb').name}: {len(text) / 1000:.0f} kB")
