"""Ports that are free and ports that are not."""

import socket

import pytest

from service.startup.failures import ServiceNotStarted
from service.startup.ports import free_port, refuse_taken_port


def test_a_port_that_something_listens_on_is_refused_and_is_accepted_afterwards() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServiceNotStarted) as raised:
            refuse_taken_port("127.0.0.1", port)
        assert str(raised.value) == f"Port {port} on 127.0.0.1 is taken: stop what uses it or choose another."
    refuse_taken_port("127.0.0.1", port)


def test_a_free_port_is_accepted() -> None:
    refuse_taken_port("127.0.0.1", free_port())
