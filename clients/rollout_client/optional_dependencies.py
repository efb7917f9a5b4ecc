"""Imports of optional dependencies, with an error that says how to install them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(what: str, extra: str) -> Iterator[None]:
    """Around an import. Raises `ModuleNotFoundError` with the extra that installs the missing package."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(f'{what} needs {package}: pip install "rollout-client[{extra}]"') from error
