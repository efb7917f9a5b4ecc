"""Which trainers may send weights: those at an address and a port that the config lists.

vLLM's rendezvous unpickles what the trainer's address sends, so that whoever answers there runs code in the replicas.
Guarantees: no replica is told of an address outside of the list; replicas connect to the IP address that was compared
with the list, never to a name, whose meaning could have changed since.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Self

from deployments.policy.failures import TrainerNotTrusted

Address = IPv4Address | IPv6Address
Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The IP addresses of a host name; raises `OSError` if it has none."""
ENTRY = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})(?:-(\d{1,5}))?")
NUMERIC = re.compile(r"[\d.]+")
HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
LARGEST_PORT = 65_535
FORM = "write host:port or host:first-last, as in 10.1.0.0/16:29500-29600, trainer.example:29500 or [fd00::1]:29500"
NOT_CONFIGURED = (
    "transfers are off: list the addresses of trusted trainers as policy.transfer.trainers in the service's config, "
    "as in [10.0.0.4:29500], and set weight_transfer_config under engine"
)
HIDDEN_ADDRESS = "it hides the trainer's address, which has to be checked; send master_address and master_port instead"


async def _resolve_host(name: str) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]


@dataclass(frozen=True, slots=True)
class TrustedTrainer:
    """One entry of the list."""

    host: str | IPv4Network | IPv6Network
    """A network holds a single address, too."""
    first_port: int
    last_port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError` with advice."""
        matched = ENTRY.fullmatch(text)
        if matched is None:
            raise ValueError(f"{text!r} is not an address with a port: {FORM}")
        host, first, last = matched[1] or matched[2], int(matched[3]), int(matched[4] or matched[3])
        if not 1 <= first <= last <= LARGEST_PORT:
            raise ValueError(f"the ports of {text!r} are not a range within 1-{LARGEST_PORT}: {FORM}")
        if matched[1] or "/" in host or NUMERIC.fullmatch(host):
            return cls(ip_network(host), first, last)
        if not HOST_NAME.fullmatch(host):
            raise ValueError(f"{host!r} is neither a host name nor an address: {FORM}")
        return cls(host, first, last)

    async def trusts(self, address: Address, port: int, resolve: Resolve) -> bool:
        if not self.first_port <= port <= self.last_port:
            return False
        if isinstance(self.host, str):
            return address in await _addresses_of(self.host, resolve)
        return address in self.host


class TrustedTrainers:
    """The trainers that the config lists.

    Args:
        trainers: as `TransferSettings.trainers`; without any, transfers are off.
    """

    def __init__(self, trainers: Sequence[str], resolve: Resolve = _resolve_host) -> None:
        self._listed = ", ".join(trainers)
        self._trainers = [TrustedTrainer.parse(trainer) for trainer in trainers]
        self._resolve = resolve

    async def checked(self, init_info: Mapping[str, Any]) -> dict[str, Any]:
        """`init_info` with the trainer's IP address, which the config lists, in place of its name.

        Raises:
            TrainerNotTrusted: it does not list this one, or `init_info` does not say where the trainer is.
        """
        if not self._trainers:
            raise TrainerNotTrusted.of("policy.transfer.trainers", NOT_CONFIGURED)
        if init_info.get("nccl_unique_id_b64") is not None:
            raise _not_trusted("nccl_unique_id_b64", HIDDEN_ADDRESS)
        host, port = init_info.get("master_address"), init_info.get("master_port")
        if not isinstance(host, str) or not host:
            raise _not_trusted("master_address", "the trainer's host name or IP address has to be given", host)
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= LARGEST_PORT:
            raise _not_trusted("master_port", f"the trainer's port, 1 to {LARGEST_PORT}, has to be given", port)
        addresses = await _addresses_of(host, self._resolve)
        if not addresses:
            raise _not_trusted("master_address", "the service cannot resolve this host name", host)
        for address in addresses:
            for trainer in self._trainers:
                if await trainer.trusts(address, port, self._resolve):
                    return {**init_info, "master_address": str(address)}
        message = f"{host}:{port} is not listed in policy.transfer.trainers of the service's config ({self._listed})"
        raise _not_trusted("master_address", message, host)


async def _addresses_of(host: str, resolve: Resolve) -> list[Address]:
    """The host's IP addresses, those of IPv4 first, since vLLM's rendezvous listens on these; none if unknown."""
    with suppress(ValueError):
        return [plain(ip_address(host))]
    try:
        found = {plain(ip_address(address)) for address in await resolve(host)}
    except (OSError, UnicodeError):
        return []
    return sorted(found, key=lambda address: (address.version, int(address)))


def plain(address: Address) -> Address:
    """An IPv4 address that is written as one of IPv6 is the IPv4 address."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _not_trusted(field: str, message: str, value: Any = None) -> TrainerNotTrusted:
    return TrainerNotTrusted.of(f"init_info.{field}", message, value)
