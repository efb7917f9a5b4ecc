"""Addresses of the servers that bridges call."""

from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine, where the proxy that the process's environment names cannot reach it."""
    return urlsplit(url).hostname in LOOPBACK
