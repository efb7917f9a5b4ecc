"""What becomes of a service with another version of the contract."""

from collections.abc import Iterator
from importlib.metadata import version

import pytest
from fastapi.responses import JSONResponse

from rollout_client import ContractDiffers, RolloutError
from rollout_client.version import CONTRACT_HEADER, CONTRACT_VERSION, check_contract, warn_of
from tests.clients.client_calls import play
from tests.clients.scripted_service import SUMMARY, ScriptedService, results_of, sample

MAJOR, MINOR = map(int, CONTRACT_VERSION.split("."))


@pytest.fixture(autouse=True)
def not_warned_yet() -> Iterator[None]:
    warn_of.cache_clear()
    yield
    warn_of.cache_clear()


def test_the_same_version_and_none_pass_silently(caplog: pytest.LogCaptureFixture) -> None:
    check_contract({})
    check_contract({CONTRACT_HEADER: CONTRACT_VERSION})
    assert caplog.messages == []


def test_another_minor_version_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    other = f"{MAJOR}.{MINOR + 1}"
    check_contract({CONTRACT_HEADER: other})
    check_contract({CONTRACT_HEADER: other})
    assert caplog.messages == [
        f"The service speaks version {other} of the contract and this client version {CONTRACT_VERSION}: what one of "
        "them added, the other does not know."
    ]


def test_another_major_version_ends_the_first_call(service: ScriptedService, waits: list[float]) -> None:
    headers = {CONTRACT_HEADER: f"{MAJOR + 1}.0"}
    service.rollouts.append(lambda body: JSONResponse({**SUMMARY, "samples": results_of(body)}, headers=headers))
    with pytest.raises(ContractDiffers) as raised:
        play(service.url, sample())
    assert isinstance(raised.value, RolloutError)
    assert str(raised.value) == (
        f"The service speaks version {MAJOR + 1}.0 of the contract and this client (rollout-client "
        f"{version('rollout-client')}) version {CONTRACT_VERSION}: install the client that belongs to the service."
    )
    assert waits == []
