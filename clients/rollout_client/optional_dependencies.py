"""What the package needs only for some things, and the sentence that says how to get it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(what: str, extra: str) -> Iterator[None]:
    """Around an import: raises `ModuleNotFoundError` that names the extra which brings what is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(f'{what} needs {package}: pip install "rollout-client[{extra}]"') from error
