"""The version of this package, and the `User-Agent` that names it to the service."""

import platform
from importlib.metadata import PackageNotFoundError, version

import httpx

try:
    __version__ = version("rollout-client")
except PackageNotFoundError:
    # A source tree on the path that was never installed has no metadata, and the client works there all the same.
    __version__ = "0+unknown"

CONTRACT_VERSION = "1.2"
"""Of the types on the wire: the minor number grows with each addition, the major one with what older clients do not
understand."""
CONTRACT_HEADER = "x-rollout-contract"
"""The header of every response of the service that has the service's version of the contract."""
PYTHON_VERSION = ".".join(platform.python_version_tuple()[:2])
USER_AGENT = f"rollout-client/{__version__} python/{PYTHON_VERSION} httpx/{httpx.__version__}"
