"""Where a training step's time goes, beside the least that it needs: `python -m minigrad.profiling train.py`."""
