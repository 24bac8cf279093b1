"""The command line, one file a command; `main` puts them together, the `flags` read values."""
