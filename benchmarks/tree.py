"""Which tree a figure was measured on."""

import subprocess
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


@cache
def commit() -> str:
    """The short name of the commit, with a `+` at its end if tracked files differ from it."""
    described = ("git", "describe", "--always", "--exclude=*", "--dirty=+")
    return subprocess.run(described, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
