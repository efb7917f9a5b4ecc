"""TCP ports of this machine."""

import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

from service.startup.commands import ServiceNotStarted

GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_GIVEN_BY_DEFAULT = 32768
AFTER_RAYS_WORKERS = 20_000
TRIES = 100


def refuse_taken_port(host: str, port: int) -> None:
    """Raises `ServiceNotStarted` if the service cannot listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceNotStarted(f"Port {port} on {host} is taken: stop what uses it or choose another.") from error


def free_port() -> int:
    """A port of loopback that is free at this moment.

    It is none of those that the system gives to connections and to programs that ask for any port: a service binds its
    port seconds later, when Ray has opened hundreds of connections. Nor is it one of those that Ray's workers take.
    """
    draw = SystemRandom()
    for _ in range(TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", draw.randrange(AFTER_RAYS_WORKERS, first_given_port())))
            port: int = probe.getsockname()[1]
            return port
    raise ServiceNotStarted(f"No port of loopback from {AFTER_RAYS_WORKERS} to {first_given_port() - 1} is free.")


def first_given_port() -> int:
    """The first of the ports that the system gives out; as Linux does by default where it does not say."""
    try:
        first = int(GIVEN_PORTS.read_text().split()[0])
    except OSError:
        return FIRST_GIVEN_BY_DEFAULT
    return first if first > AFTER_RAYS_WORKERS + TRIES else FIRST_GIVEN_BY_DEFAULT
