"""Checks whether strangers could reach a service without keys, or read what is meant to be encrypted. No I/O.

Guarantees: a service that listens off loopback asks for keys, or its config says what guards it; one that is given a
certificate speaks TLS. Each way of starting checks this: `python -m service` before it starts Ray, `serve run` when
Serve builds the application, and every ingress replica when it starts.
"""

import os
from collections.abc import Mapping
from ipaddress import ip_address

from deployments.upstream.ray_serve.direct_ingress import HttpOptions
from service.settings import AccessSettings

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"


class ServiceExposed(Exception):
    """Strangers could use the service, or read what it sends; the message says what to change."""


def refuse_exposed(settings: AccessSettings, options: HttpOptions) -> None:
    """Raises `ServiceExposed` with all that is wrong."""
    if problems := list(filter(None, (exposure(settings, options.host), tls_problem(options.ssl_certfile)))):
        raise ServiceExposed("\n".join(problems))


def tls_problem(certificate: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why the certificate would not be used; `None` if it would be.

    Args:
        environ: the environment variables with which Ray was started; its processes have them too.
    """
    if certificate is None or environ.get(HAPROXY) != "1":
        return None
    return (
        f"http_options.ssl_certfile: {certificate} is not used with {HAPROXY}=1, because HAProxy serves without TLS. "
        "Unset one of them, and with HAProxy end TLS at a gateway in front."
    )


def _is_loopback(host: str | None) -> bool:
    """Whether only programs of the same machine reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def exposure(settings: AccessSettings, host: str | None) -> str | None:
    """The problem with listening on `host`; `None` if there is none."""
    if settings.keys_file is not None or settings.guarded_by is not None or _is_loopback(host):
        return None
    return (
        f"http_options.host: {host} can be reached from other machines, and the service asks for no key. Name a file "
        "of keys in args.access.keys_file (python -m service.access.new_key makes one), or listen on 127.0.0.1, or say "
        "in args.access.guarded_by what stands in front and lets only known callers through."
    )
