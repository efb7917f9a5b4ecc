"""Whether client and service speak the same version of the contract; each response of the service names its version."""

import logging
from collections.abc import Mapping
from functools import cache

from rollout_client.errors import ContractDiffers
from rollout_client.version import CONTRACT_HEADER, CONTRACT_VERSION, __version__

logger = logging.getLogger("rollout_client")


def check_contract(headers: Mapping[str, str]) -> None:
    """Warns once of another minor version. A response without a version is another server's, or an older service's.

    Raises:
        ContractDiffers: the major version is another one.
    """
    version = headers.get(CONTRACT_HEADER)
    if version is None or version == CONTRACT_VERSION:
        return
    if version.partition(".")[0] != CONTRACT_VERSION.partition(".")[0]:
        raise ContractDiffers(
            f"The service speaks version {version} of the contract and this client (rollout-client {__version__}) "
            f"version {CONTRACT_VERSION}: install the client that belongs to the service."
        )
    warn_of(version)


@cache
def warn_of(version: str) -> None:
    logger.warning(
        "The service speaks version %s of the contract and this client version %s: what one of them added, the other "
        "does not know.",
        version,
        CONTRACT_VERSION,
    )
