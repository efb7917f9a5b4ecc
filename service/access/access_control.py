"""Authenticates a request by its key, and checks whether strangers could reach a service without keys.

The keys are those of the keys file, which is read again after it has changed.

Guarantees: a service that listens off loopback asks for keys, or its config says what guards it; one that is given a
certificate speaks TLS. Each way of starting checks this: `python -m service` before it starts Ray, `serve run` when
Serve builds the application, and every ingress replica when it starts.
"""

import asyncio
import logging
import os
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from deployments.upstream.ray_serve.direct_ingress import HttpOptions
from rollout_client.contract.base import FieldProblem
from service.access.keys import ANYBODY, Caller, KeyRing, KeysInvalid, Scope, parsed_keys
from service.problems import NOT_ALLOWED, NOT_AUTHENTICATED, RequestProblem
from service.settings import AccessSettings

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"


class ServiceExposed(Exception):
    """Strangers could use the service, or read what it sends; the message says what to change."""


def refuse_exposed(settings: AccessSettings, options: HttpOptions) -> None:
    """Raises `ServiceExposed` with all that is wrong."""
    if problems := list(filter(None, (_exposure(settings, options.host), _tls_problem(options.ssl_certfile)))):
        raise ServiceExposed("\n".join(problems))


def _tls_problem(certificate: str | None) -> str | None:
    """Why the certificate would not be used; `None` if it would be."""
    # Ray's processes have the environment variables with which it was started.
    if certificate is None or os.environ.get(HAPROXY) != "1":
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


def _exposure(settings: AccessSettings, host: str | None) -> str | None:
    """The problem with listening on `host`; `None` if there is none."""
    if settings.keys_file is not None or settings.guarded_by is not None or _is_loopback(host):
        return None
    return (
        f"http_options.host: {host} can be reached from other machines, and the service asks for no key. Name a file "
        "of keys in args.access.keys_file (python -m service.access.new_key makes one), or listen on 127.0.0.1, or say "
        "in args.access.guarded_by what stands in front and lets only known callers through."
    )


CHECK_PERIOD_S = 1.0
logger = logging.getLogger("rollout_service.access")


class KeysNotReadable(Exception):
    """The keys file cannot be read at the start."""


class _KeyFile:
    """The keys file, followed.

    Guarantee: no request that comes more than `CHECK_PERIOD_S` after a change is let in by a key that the file does not
    hold any longer. A file that cannot be read, or is wrong, changes nothing: the keys that it held last stay valid,
    and the log says so once.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        """Raises `KeysNotReadable`: the file is not there, or its content is wrong."""
        self._path = path
        self._now_s = now_s
        self._checked_at = now_s()
        self._lock = asyncio.Lock()
        self._complaint = ""
        try:
            self._content = path.read_bytes()
            self._keys = parsed_keys(self._content)
        except (OSError, KeysInvalid) as error:
            raise KeysNotReadable(f"access.keys_file: {_reason_of(error)} ({path})") from error

    async def keys(self) -> KeyRing:
        """The keys that are valid now."""
        if self._is_due():
            async with self._lock:
                # Another request may have checked it meanwhile.
                if self._is_due():
                    began_at = self._now_s()
                    await asyncio.to_thread(self._read_again)
                    self._checked_at = began_at
        return self._keys

    def _is_due(self) -> bool:
        return self._now_s() - self._checked_at >= CHECK_PERIOD_S

    def _read_again(self) -> None:
        # Its content is compared, not its time: a file system may write two versions in one tick of its clock.
        try:
            content = self._path.read_bytes()
            if content != self._content:
                self._keys = parsed_keys(content)
                self._content = content
                logger.info("The keys file has changed: %d keys are valid now.", len(self._keys))
            self._complaint = ""
        except (OSError, KeysInvalid) as error:
            complaint = _reason_of(error)
            if complaint != self._complaint:
                logger.error("The keys file cannot be used, its last keys stay valid: %s", complaint)
            self._complaint = complaint


def _reason_of(error: OSError | KeysInvalid) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


FIELD = "header.Authorization"
SCHEME = "bearer"
_PASSWORD_SCHEME = "basic"
CHALLENGE = 'Bearer realm="rollout"'


class AccessControl:
    """The callers that one ingress replica lets in."""

    def __init__(self, key_file: _KeyFile | None, is_open_on_loopback: bool = False) -> None:
        """Open to all callers without a `key_file`.

        Args:
            is_open_on_loopback: whether every program of the machine may use the service, and nothing guards it.
        """
        self._key_file = key_file
        self.is_open_on_loopback = is_open_on_loopback

    @classmethod
    def of(cls, settings: AccessSettings, now_s: Callable[[], float] = time.monotonic) -> Self:
        """Access control by the keys of the settings.

        Raises:
            KeysNotReadable: the keys file is not there, or its content is wrong.
        """
        path = settings.keys_file
        if path is None:
            return cls(None, is_open_on_loopback=settings.guarded_by is None)
        return cls(_KeyFile(Path(path).expanduser(), now_s))

    async def caller_of(self, authorization: Sequence[str], scope: Scope) -> Caller:
        """Who sent a request that needs `scope`.

        Args:
            authorization: the values of its `Authorization` headers.

        Raises:
            RequestProblem: 401, it carries no valid key; 403, its key does not allow `scope`.
        """
        if self._key_file is None:
            return ANYBODY
        key = key_in(authorization)
        caller = (await self._key_file.keys()).caller_with(key)
        if caller is None:
            raise not_authenticated("the key is not valid (any longer); ask for one that is", 'error="invalid_token"')
        return _with_scope(caller, scope)

    async def caller_named(self, name: str | None, scope: Scope) -> Caller:
        """Who sent an earlier request, which goes on now, as the keys file has it now.

        Args:
            name: of its key; `None` if it needed none.

        Raises:
            RequestProblem: 401, no key of this name is valid any longer; 403, none of them allows `scope`.
        """
        if self._key_file is None:
            return ANYBODY
        caller = None if name is None else (await self._key_file.keys()).caller_named(name)
        if caller is None:
            raise not_authenticated("the key with which this was sent is not valid any longer; send it again with one")
        return _with_scope(caller, scope)


OPEN_TO_ALL = AccessControl(None)
"""Asks for no key."""


def key_in(authorization: Sequence[str]) -> str:
    """The key of a bearer, or the password that clients make of an address such as `http://trainer:KEY@host`.

    Raises:
        RequestProblem: 401 unless there is exactly one header, and it holds a key.
    """
    if not authorization:
        raise not_authenticated("this service asks for a key; send it as Authorization: Bearer KEY")
    if len(authorization) > 1:
        # What stands in front may have looked at the other one.
        raise not_authenticated("it is there more than once; send it once", 'error="invalid_request"')
    scheme, _, key = authorization[0].partition(" ")
    if scheme.lower() == _PASSWORD_SCHEME:
        scheme, key = SCHEME, _password_in(key)
    if scheme.lower() != SCHEME or not key.strip():
        raise not_authenticated("it is not of the form Bearer KEY", 'error="invalid_request"')
    return key.strip()


def _password_in(credentials: str) -> str:
    """That of RFC 7617; empty if it holds none."""
    try:
        return b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def not_authenticated(message: str, reason: str = "") -> RequestProblem:
    """Never says what the header held."""
    challenge = ", ".join(filter(None, [CHALLENGE, reason]))
    return RequestProblem(
        NOT_AUTHENTICATED, [FieldProblem(field=FIELD, message=message)], {"WWW-Authenticate": challenge}
    )


def _with_scope(caller: Caller, scope: Scope) -> Caller:
    """Raises `RequestProblem` (403) if the key of the caller does not allow `scope`."""
    if caller.may(scope):
        return caller
    has = ", ".join(sorted(caller.scopes))
    message = f"the key {caller.name} allows {has}; this needs {scope}"
    challenge = f'{CHALLENGE}, error="insufficient_scope", scope="{scope}"'
    raise RequestProblem(NOT_ALLOWED, [FieldProblem(field=FIELD, message=message)], {"WWW-Authenticate": challenge})
