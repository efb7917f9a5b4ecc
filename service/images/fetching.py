"""Fetches images that a request names by their address, from hosts that the config lists alone.

Guarantees: no other host is asked, whatever redirects and names say; the address that was checked is the one that is
connected to; what is read is bounded in bytes and in time.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import httpx

from deployments.images.failures import ImageRefused
from deployments.images.settings import ImagesSettings

DEFAULT_PORTS = {"http": 80, "https": 443}
MOST_REDIRECTS = 3
FETCHES_AT_ONCE = 16
MOST_FETCHED_BYTES = 2**28
"""Images behind the addresses of one request. All are in memory at once, for none is kept before all are checked."""
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host. Raises `OSError` if it is not known."""


async def addresses_of(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class FetchRoom:
    """Bounds what one request fetches. Fetches that have begun when it is full come on top."""

    def __init__(self) -> None:
        self._fetched_bytes = 0

    def refuse_full(self) -> None:
        """Raises `ImageRefused`."""
        if self._fetched_bytes >= MOST_FETCHED_BYTES:
            raise ImageRefused(
                f"the addresses before it lead to {self._fetched_bytes} bytes, and those of a request may lead to "
                f"{MOST_FETCHED_BYTES}; split the request, or upload the images"
            )

    def take(self, content: bytes) -> bytes:
        self._fetched_bytes += len(content)
        return content


class ImageFetcher:
    """Fetches for one process, at most `FETCHES_AT_ONCE` at once.

    Args:
        transport: sends the requests; by default over the network.
    """

    def __init__(
        self,
        settings: ImagesSettings,
        resolve: Resolve = addresses_of,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._listed = frozenset(host.lower() for host in settings.allowed_hosts)
        self._resolve = resolve
        self._transport = transport
        self._slots = asyncio.Semaphore(FETCHES_AT_ONCE)

    async def fetch(self, url: str, room: FetchRoom) -> bytes:
        """The body behind an `http` or `https` address.

        Raises:
            ImageRefused: its host is not listed, it gives no body within the bounds, or there is no room.
        """
        async with self._slots:
            room.refuse_full()
            try:
                async with asyncio.timeout(self._settings.fetch_timeout_s):
                    return room.take(await self._fetch(httpx.URL(url)))
            except TimeoutError as error:
                raise ImageRefused(
                    f"its host has not given it within images.fetch_timeout_s ({self._settings.fetch_timeout_s:g} s); "
                    "upload the image"
                ) from error
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                raise ImageRefused(f"it cannot be fetched ({type(error).__name__}); upload the image") from error

    async def _fetch(self, url: httpx.URL) -> bytes:
        # Without proxies and credentials of the environment: what is asked follows from the address alone.
        async with httpx.AsyncClient(transport=self._transport, trust_env=False, timeout=None) as http:
            for _ in range(1 + MOST_REDIRECTS):
                self._refuse_unlisted(url)
                async with http.stream("GET", await self._pinned(url), **_request_of(url)) as response:
                    if not response.has_redirect_location:
                        return await self._body(response)
                    target = url.join(response.headers["location"])
                if target.host != url.host:
                    raise ImageRefused(f"it is redirected to {target.host}; upload the image, or send that address")
                url = target
        raise ImageRefused(f"it is redirected more than {MOST_REDIRECTS} times; upload the image")

    def _refuse_unlisted(self, url: httpx.URL) -> None:
        """Raises `ImageRefused` unless the config lists the host and port."""
        if url.scheme not in DEFAULT_PORTS or not url.host:
            raise ImageRefused("it is not an http or https address; upload the image")
        if url.userinfo:
            raise ImageRefused("it holds a user name or a password; upload the image")
        if (host := url.netloc.decode().lower()) not in self._listed:
            raise ImageRefused(f"images.allowed_hosts of the service's config does not list {host}; upload the image")

    async def _pinned(self, url: httpx.URL) -> httpx.URL:
        """The URL with the host's address in place of its name, which could lead elsewhere a moment later.

        Raises:
            ImageRefused: it leads to a private address.
        """
        addresses = [
            ip_address(found) for found in await self._resolve(url.host, url.port or DEFAULT_PORTS[url.scheme])
        ]
        for address in addresses:
            named = url.copy_with(host=str(address)).netloc.decode()
            if not is_public(address) and named not in self._listed:
                message = f"{url.host} leads to the private address {address}, which images.allowed_hosts does not list"
                raise ImageRefused(f"{message}; upload the image")
        return url.copy_with(host=str(addresses[0]))

    async def _body(self, response: httpx.Response) -> bytes:
        if response.status_code != httpx.codes.OK:
            raise ImageRefused(f"its host answers {response.status_code}; upload the image")
        most = self._settings.max_image_bytes
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > most:
                raise ImageRefused(f"it has more than {most} bytes, which images.max_image_bytes allows; scale it down")
        return bytes(body)


def _request_of(url: httpx.URL) -> dict[str, Any]:
    """Options that name the host in a request to its address: the header, and the name in its certificate."""
    headers = {"host": url.netloc.decode(), "accept": "image/*", "accept-encoding": "identity"}
    return {"headers": headers, "extensions": {"sni_hostname": url.host}}


def is_public(address: IPv4Address | IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_global) and not mapped.is_multicast
