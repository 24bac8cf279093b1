"""The command line, `python -m pipeline`: a file a command."""
