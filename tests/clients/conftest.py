"""Fixtures of the tests of the client."""

from collections.abc import Iterator

import pytest

from tests.clients.scripted_service import ScriptedService, running


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with running(ScriptedService()) as scripted:
        yield scripted


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client has waited between attempts; none of them really pass, and the backoff is longest."""
    waited: list[float] = []

    async def async_sleep(seconds: float) -> None:
        waited.append(seconds)

    for module in ("connection", "client", "policy"):
        monkeypatch.setattr(f"rollout_client.calls.async_client.{module}.async_sleep", async_sleep)
        monkeypatch.setattr(f"rollout_client.calls.sync_client.{module}.sleep", waited.append)
    monkeypatch.setattr("random.uniform", lambda _low, high: high)
    return waited
