"""Support for bridges: imports of their optional packages, and whether a server is on this machine."""

import importlib
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine, where the proxy that the process's environment names cannot reach it."""
    return urlsplit(url).hostname in LOOPBACK


class PackageMissing(Exception):
    """The message says how the package is installed."""


def imported(module_name: str, package: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        PackageMissing: the package is not installed.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise PackageMissing(
            f"the package {package} is missing: install the extra `bridges` of the service on each node "
            "(pip install --no-deps --require-hashes -r requirements/bridges.lock)"
        ) from error
