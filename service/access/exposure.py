"""Whether strangers could reach a service that asks for no key. No I/O.

Guarantee: a service that listens off loopback asks for keys, or its config says what guards it.
"""

from ipaddress import ip_address

from service.access.settings import AccessSettings

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class ServiceExposed(Exception):
    """Strangers could use the service; the message says what to change."""


def is_loopback(host: str | None) -> bool:
    """Whether only programs of the same machine reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def exposure(settings: AccessSettings, host: str | None) -> str | None:
    """What is wrong with listening on `host`; `None` if nothing is."""
    if settings.keys_file is not None or settings.guarded_by is not None or is_loopback(host):
        return None
    return (
        f"http_options.host: {host} can be reached from other machines, and the service asks for no key. Name a file "
        "of keys in args.access.keys_file (python -m service.access.new_key makes one), or listen on 127.0.0.1, or say "
        "in args.access.guarded_by what stands in front and lets only known callers through."
    )


def allowed_hosts(settings: AccessSettings, host: str | None) -> tuple[str, ...]:
    """The names that `Host` may have, in lower case; empty for any."""
    given = tuple(name.lower() for name in settings.allowed_hosts)
    if given or settings.keys_file is not None or settings.guarded_by is not None or not is_loopback(host):
        return given
    return LOOPBACK_NAMES
