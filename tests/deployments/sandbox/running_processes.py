"""Whether a process of a run is there, by a token among its arguments."""

import psutil


def is_running(token: str) -> bool:
    """Whether a process of this machine has the token among its arguments."""
    return any(
        token in argument for each in psutil.process_iter(["cmdline"]) for argument in each.info["cmdline"] or ()
    )
