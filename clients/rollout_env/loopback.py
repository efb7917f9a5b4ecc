"""Whether a URL names a server on this machine."""

from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine, where the proxy that the process's environment names cannot reach it."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
