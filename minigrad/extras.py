"""What to say where a package is missing that only some things need: one line, the same everywhere."""


def needs(what: str, package: str, extra: str) -> str:
    """Return what to install for something that is missing.

    Args:
        what: needs it.
        package: that is missing, as pip calls it.
        extra: of this project, that has it among others.
    """
    return f"{what} needs {package}: pip install {package}, or pip install '.[{extra}]' in the project's folder"
