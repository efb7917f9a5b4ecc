"""Images behind addresses: only hosts that are listed are asked, and only at public addresses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from ipaddress import ip_address
from typing import Any

import httpx
import pytest

from deployments.images.failures import ImageRefused
from deployments.images.settings import ImagesSettings
from service.images.fetching import FetchRoom, ImageFetcher, addresses_of, is_public
from tests import virtual_time

PUBLIC = "93.184.216.34"
Answer = Callable[[httpx.Request], httpx.Response]


def answered(body: bytes) -> httpx.Response:
    return httpx.Response(200, stream=httpx.ByteStream(body))


class Network:
    """Hosts whose names lead to these addresses, and what they answer."""

    def __init__(self, answer: Answer = lambda _: answered(b"image"), **addresses: str) -> None:
        self.answer = answer
        self.addresses = addresses
        self.requests: list[httpx.Request] = []

    def fetch(self, url: str, *allowed: str, **settings: Any) -> bytes:
        listed = ["pictures.example.org", *allowed]
        fetcher = ImageFetcher(
            ImagesSettings(allowed_hosts=listed, **settings), self._resolve, httpx.MockTransport(self._answer)
        )
        return virtual_time.run(fetcher.fetch(url, FetchRoom()))

    def refusal(self, url: str, *allowed: str, **settings: Any) -> str:
        with pytest.raises(ImageRefused) as refused:
            self.fetch(url, *allowed, **settings)
        return str(refused.value)

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        return self.addresses.get(host.partition(".")[0], PUBLIC).split()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.answer(request)


def test_the_address_that_was_checked_is_asked_under_the_name_of_the_host() -> None:
    network = Network()
    assert network.fetch("https://Pictures.example.org/a%20b.png?size=2") == b"image"
    [request] = network.requests
    assert str(request.url) == f"https://{PUBLIC}/a%20b.png?size=2"
    assert request.headers["host"] == "pictures.example.org"
    assert request.extensions["sni_hostname"] == "pictures.example.org"
    assert "authorization" not in request.headers
    assert "cookie" not in request.headers


@pytest.mark.parametrize(
    ("url", "listed"),
    [
        ("http://other.example.org/", "other.example.org"),
        ("http://sub.pictures.example.org/", "sub.pictures.example.org"),
        ("http://pictures.example.org.evil.org/", "pictures.example.org.evil.org"),
        ("http://pictures.example.org:8080/", "pictures.example.org:8080"),
        ("https://pictures.example.org:80/", "pictures.example.org:80"),
        ("http://127.0.0.1/", "127.0.0.1"),
        ("http://[::1]/", "[::1]"),
        ("http://169.254.169.254/latest/meta-data/", "169.254.169.254"),
    ],
)
def test_a_host_that_is_not_listed_is_not_asked(url: str, listed: str) -> None:
    network = Network()
    assert network.refusal(url) == (
        f"images.allowed_hosts of the service's config does not list {listed}; upload the image"
    )
    assert network.requests == []


def test_credentials_in_an_address_are_refused() -> None:
    assert Network().refusal("http://me:secret@pictures.example.org/") == (
        "it holds a user name or a password; upload the image"
    )


@pytest.mark.parametrize(
    "addresses", ["10.0.0.1", "127.0.0.1", f"{PUBLIC} 192.168.0.1", "::1", "::ffff:a00:1", "169.254.169.254"]
)
def test_a_name_that_leads_to_a_private_address_is_refused(addresses: str) -> None:
    network = Network(pictures=addresses)
    assert network.refusal("http://pictures.example.org/").endswith(
        f"leads to the private address {addresses.split()[-1]}, which images.allowed_hosts does not list; "
        "upload the image"
    )
    assert network.requests == []


def test_a_private_address_that_is_listed_is_asked() -> None:
    assert Network(pictures="10.0.0.1").fetch("http://pictures.example.org/", "10.0.0.1") == b"image"
    network = Network()
    network.addresses["10"] = "10.0.0.1"
    assert network.fetch("http://10.0.0.1:9000/a", "10.0.0.1:9000") == b"image"
    assert str(network.requests[0].url) == "http://10.0.0.1:9000/a"


def redirecting(*targets: str) -> Answer:
    left = list(targets)

    def answer(request: httpx.Request) -> httpx.Response:
        if left:
            return httpx.Response(302, headers={"location": left.pop(0)})
        return answered(request.url.path.encode())

    return answer


def test_redirects_within_a_host_are_followed() -> None:
    network = Network(redirecting("https://pictures.example.org/b", "c"))
    assert network.fetch("http://pictures.example.org/a") == b"/c"
    assert [request.url.scheme for request in network.requests] == ["http", "https", "https"]


@pytest.mark.parametrize("target", ["http://10.0.0.1/", "http://listed.example.org/", "//evil.example.org/a"])
def test_redirects_to_other_hosts_are_not_followed(target: str) -> None:
    network = Network(redirecting(target))
    assert network.refusal("http://pictures.example.org/a", "listed.example.org").startswith("it is redirected to ")
    assert len(network.requests) == 1


def test_redirects_to_other_ports_and_endless_ones_are_refused() -> None:
    network = Network(redirecting("http://pictures.example.org:22/"))
    assert "does not list pictures.example.org:22" in network.refusal("http://pictures.example.org/a")
    network = Network(redirecting(*["/a"] * 9))
    assert network.refusal("http://pictures.example.org/a") == ("it is redirected more than 3 times; upload the image")
    assert len(network.requests) == 4


class Endless(httpx.AsyncByteStream):
    """A body that never ends, and how much of it was read."""

    def __init__(self, chunk: bytes, pause_s: float = 0) -> None:
        self.chunk = chunk
        self.pause_s = pause_s
        self.read_bytes = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(self.pause_s)
            self.read_bytes += len(self.chunk)
            yield self.chunk


def test_a_body_is_bounded_while_it_is_read() -> None:
    body = Endless(bytes(100))
    network = Network(lambda _: httpx.Response(200, stream=body))
    assert network.refusal("http://pictures.example.org/", max_image_bytes=1000) == (
        "it has more than 1000 bytes, which images.max_image_bytes allows; scale it down"
    )
    assert body.read_bytes == 1100


def test_a_slow_host_is_given_up() -> None:
    network = Network(lambda _: httpx.Response(200, stream=Endless(b"a", 1)))
    assert network.refusal("http://pictures.example.org/", fetch_timeout_s=5) == (
        "its host has not given it within images.fetch_timeout_s (5 s); upload the image"
    )


def test_a_host_that_does_not_answer_or_is_not_known_is_named_by_the_kind_of_error() -> None:
    def refuse(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("10.1.2.3 refused")

    assert Network(refuse).refusal("http://pictures.example.org/") == (
        "it cannot be fetched (ConnectError); upload the image"
    )
    fetcher = ImageFetcher(ImagesSettings(allowed_hosts=["nowhere.invalid"]))
    with pytest.raises(ImageRefused, match=r"^it cannot be fetched \(gaierror\)"):
        asyncio.run(fetcher.fetch("http://nowhere.invalid/", FetchRoom()))


def test_an_address_leads_to_itself() -> None:
    assert asyncio.run(addresses_of("127.0.0.1", 80)) == ["127.0.0.1"]


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "100.64.0.1", "172.16.0.1", "224.0.0.1", "fe80::1", "fc00::1", "ff02::1"]
)
def test_addresses_of_networks_that_are_not_public_are_known(address: str) -> None:
    assert not is_public(ip_address(address))
    assert is_public(ip_address(PUBLIC))
