"""TCP ports of this machine."""

import socket

from service.startup.failures import ServiceNotStarted


def refuse_taken_port(host: str, port: int) -> None:
    """Raises `ServiceNotStarted` if the service cannot listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceNotStarted(f"Port {port} on {host} is taken: stop what uses it or choose another.") from error


def free_port() -> int:
    """A port of loopback that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
