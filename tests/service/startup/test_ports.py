"""Ports that are free and ports that are not."""

import socket
from pathlib import Path

import pytest

from service.startup import ports
from service.startup.commands import ServiceNotStarted
from service.startup.ports import (
    AFTER_RAYS_WORKERS,
    FIRST_GIVEN_BY_DEFAULT,
    first_given_port,
    free_port,
    refuse_taken_port,
)


def test_a_port_that_something_listens_on_is_refused_and_is_accepted_afterwards() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServiceNotStarted) as raised:
            refuse_taken_port("127.0.0.1", port)
        assert str(raised.value) == f"Port {port} on 127.0.0.1 is taken: stop what uses it or choose another."
    refuse_taken_port("127.0.0.1", port)


def test_a_free_port_is_accepted_and_none_that_the_system_gives_to_others() -> None:
    for _ in range(50):
        port = free_port()
        refuse_taken_port("127.0.0.1", port)
        assert AFTER_RAYS_WORKERS <= port < first_given_port()


@pytest.mark.parametrize(
    ("said", "first"),
    [("32768\t60999\n", 32768), ("49152 65535", 49152), ("1024 65535", FIRST_GIVEN_BY_DEFAULT)],
)
def test_the_first_port_that_the_system_gives_is_what_it_says_unless_it_gives_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, first: int
) -> None:
    monkeypatch.setattr(ports, "GIVEN_PORTS", tmp_path / "range")
    assert first_given_port() == FIRST_GIVEN_BY_DEFAULT
    (tmp_path / "range").write_text(said)
    assert first_given_port() == first


def test_where_all_ports_are_taken_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "AFTER_RAYS_WORKERS", port)
        monkeypatch.setattr(ports, "first_given_port", lambda: port + 1)
        with pytest.raises(ServiceNotStarted, match=f"No port of loopback from {port} to {port} is free"):
            free_port()
