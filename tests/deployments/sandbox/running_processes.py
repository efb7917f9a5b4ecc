"""Whether a process of a run is there, by a token among its arguments."""

import psutil


def is_running(token: str) -> bool:
    """Whether a process of this machine has the token among its arguments."""
    return any(token in word for each in psutil.process_iter(["cmdline"]) for word in each.info["cmdline"] or ())
