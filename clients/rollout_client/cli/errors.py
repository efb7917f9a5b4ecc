"""Failures of a command as one sentence on stderr, and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from rollout_client.errors import RolloutError

FAILED = 1
TOO_MANY_ERRORS = 3
"""More rollouts failed than `--max-error-rate` allows. 2 is what typer ends with for wrong arguments."""


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # Of `| head`: who reads has enough. Typer ends the command without a word.
        raise
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error), error)
    except (RolloutError, ValueError, ModuleNotFoundError) as error:
        refuse(str(error), error)


def refuse(sentence: str, error: Exception | None = None) -> NoReturn:
    typer.secho(sentence, err=True, fg=typer.colors.RED)
    raise typer.Exit(FAILED) from error
