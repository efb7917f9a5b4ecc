"""A client of the scripted service that keeps what is pushed."""

from collections.abc import Iterator

import pytest

from rollout_client import AsyncRolloutClient, RolloutClient
from tests.clients.scripted_service import ScriptedService
from tests.clients.trainers.scripted_trainer import PushingClient


@pytest.fixture(autouse=True)
def any_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted service does not describe its tokenizer: each one is the same."""

    async def is_same(*_: object) -> None:
        pass

    monkeypatch.setattr(RolloutClient, "check_tokenizer", lambda *_: None)
    monkeypatch.setattr(AsyncRolloutClient, "check_tokenizer", is_same)


@pytest.fixture
def client(service: ScriptedService) -> Iterator[PushingClient]:
    with PushingClient(service.url) as pushing_client:
        yield pushing_client
