"""A scripted service and a client of it that keeps what is pushed."""

from collections.abc import Iterator

import pytest

from tests.clients.scripted_service import ScriptedService, running
from tests.clients.trainers.scripted_trainer import PushingClient


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with running(ScriptedService()) as scripted:
        yield scripted


@pytest.fixture
def client(service: ScriptedService) -> Iterator[PushingClient]:
    with PushingClient(service.url) as pushing_client:
        yield pushing_client
