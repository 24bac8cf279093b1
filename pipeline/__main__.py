"""The command line: `python -m pipeline draw 1f1b --stages 4 --microbatches 8`."""

import sys

from pipeline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
