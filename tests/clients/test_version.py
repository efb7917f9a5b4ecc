"""What becomes of a service with another version of the contract."""

from importlib.metadata import version

import pytest
from fastapi.responses import JSONResponse

from rollout_client import RolloutError
from rollout_client.errors import ContractDiffers
from rollout_client.version import CONTRACT_HEADER, CONTRACT_VERSION, check_contract
from tests.clients.client_calls import play
from tests.clients.scripted_service import SUMMARY, ScriptedService, results_of, sample

MAJOR, MINOR = map(int, CONTRACT_VERSION.split("."))


@pytest.mark.parametrize(
    "headers", [{}, {CONTRACT_HEADER: CONTRACT_VERSION}, {CONTRACT_HEADER: f"{MAJOR}.{MINOR + 1}"}]
)
def test_no_version_and_those_of_this_major_one_pass(headers: dict[str, str]) -> None:
    check_contract(headers)


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
