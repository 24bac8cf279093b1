"""Run a script whose ranks may die, and hold it at a step until a file is there: then no kill comes after its end.

    python -m distributed.recovery -n 2 tests/support/held.py STEP FILE examples/gpt_recovery.py --steps 80

Whoever kills does so at any moment before, however late it sees that it is time, and makes the file.
"""

import runpy
import sys
import time
from pathlib import Path

from distributed.recovery.attempts import Attempt


def main() -> None:
    _, step, released, script, *arguments = sys.argv
    enter = Attempt.__enter__

    def hold_and_enter(attempt: Attempt) -> object:
        while attempt.step >= int(step) and not Path(released).exists():
            time.sleep(1e-3)
        return enter(attempt)

    Attempt.__enter__ = hold_and_enter
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
