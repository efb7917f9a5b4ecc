"""The versions of this package and of the contract, and whether client and service speak the same contract.

Each response of the service names its version of the contract.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from rollout_client.errors import ContractDiffers

try:
    __version__ = version("rollout-client")
except PackageNotFoundError:
    # A source tree on the path that was never installed has no metadata, and the client works there all the same.
    __version__ = "0+unknown"

CONTRACT_VERSION = "2.0"
"""Version of the types on the wire: the minor number grows with each addition, the major one with what older clients do
not understand."""
CONTRACT_HEADER = "x-rollout-contract"
"""The header of every response of the service that has the service's version of the contract."""


def check_contract(headers: Mapping[str, str]) -> None:
    """Refuses the response of a service with another major version. One without a version is another server's.

    Raises:
        ContractDiffers: the major version is another one.
    """
    version = headers.get(CONTRACT_HEADER)
    if version is not None and version.partition(".")[0] != CONTRACT_VERSION.partition(".")[0]:
        raise ContractDiffers(
            f"The service speaks version {version} of the contract and this client (rollout-client {__version__}) "
            f"version {CONTRACT_VERSION}: install the client that belongs to the service."
        )
