"""Run an example as a script is run, without matplotlib's pictures and with a short sample: in half of the time.

    mpirun -n 2 python -m mpi4py tests/support/lightly.py train_gpt --dp 2

No layout and no flag has a part in either; other tests look at both.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from distributed.run import command_line
from distributed.run import folder as run_folder


def load(name: str, *, sample_tokens: int = 40) -> ModuleType:
    """Import an example; its runs end soon."""
    script = import_module(name)
    if hasattr(script, "SAMPLE_TOKENS"):
        script.SAMPLE_TOKENS = sample_tokens
    run_folder.draw_plots = lambda *_, **__: []
    return script


def main() -> None:
    _, name, *arguments = sys.argv
    sys.argv = [f"{name}.py", *arguments]
    load(name).main()


if __name__ == "__main__":
    command_line.run_script(main)
