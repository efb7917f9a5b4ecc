"""A service that is started as a user starts it: `python -m service`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.paths import REPOSITORY


@contextmanager
def service_process(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Args: `variables` of its environment, beside those of this process."""
    command = [sys.executable, "-m", "service", *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": os.environ | variables}
    with subprocess.Popen(command, cwd=REPOSITORY, **output) as service:  # type: ignore[call-overload]
        try:
            yield service
        finally:
            # Not killed: it has processes of its own to end.
            service.terminate()


def lines_until(service: subprocess.Popen[str], last: str) -> list[str]:
    """The lines that the service prints, up to and including the first that contains `last`."""
    assert service.stdout is not None
    lines: list[str] = []
    while not lines or last not in lines[-1]:
        line = service.stdout.readline()
        assert line, f"the service ended before it printed {last!r}:\n{''.join(lines)}"
        lines.append(line.rstrip("\n"))
    return lines
