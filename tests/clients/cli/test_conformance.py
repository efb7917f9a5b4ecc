"""`rollout conformance`: a server that does what it should passes, and each planted fault is found by its check."""

import json

import httpx
import pytest
from typer.testing import CliRunner

from rollout_client.cli import conformance_checks
from rollout_client.cli.app import app
from tests.clients.cli.conforming_server import ConformingServer
from tests.clients.scripted_service import served
from tests.virtual_time import synchronous

FAULTS = {
    "tokenizes again": "tokens in, tokens out",
    "drops a token": "tokens in, tokens out",
    "greedy is certain": "log-probabilities, greedy",
    "raw at a temperature": "log-probabilities, sampled",
    "ignores stops": "stop reasons",
    "calls a stop length": "stop reasons",
    "leaves tokens without version": "versions at start and end",
    "older for newer": "minimum version",
    "refuses for good": "minimum version",
    "other for exact": "exact version",
    "says the first version": "no mixture unsaid",
    "answers too long": "failure is no answer",
    "plays again": "idempotency",
    "runs on": "cancellation frees the engine",
    "mixes up answers": "order and completeness",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations that take a fraction of a second are long for the stand-in."""
    monkeypatch.setattr(conformance_checks, "CLEARLY_LONG_S", 0.0)
    monkeypatch.setattr(conformance_checks, "BEGUN_AFTER_S", 0.02)


@synchronous
async def found_at(server: ConformingServer, only: str | None = None) -> dict[str, str]:
    """The result of each check, by its name."""
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as http:
        return {found.check: found.result for found in await conformance_checks.findings(http, "/step-4", only)}


@pytest.mark.parametrize("is_sglang", [False, True])
def test_a_server_that_does_what_it_should_passes(is_sglang: bool) -> None:
    results = found_at(ConformingServer(is_sglang=is_sglang))
    assert {*results.values()} == {"pass"}
    assert {*FAULTS.values()} == {*results}, "each check has a fault that it finds"


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found(fault: str) -> None:
    assert found_at(ConformingServer(fault), FAULTS[fault]) == {FAULTS[fault]: "fail"}


def test_a_server_without_versions_does_not_offer_them() -> None:
    results = found_at(ConformingServer("says no version"))
    missing = {name for name, result in results.items() if result == "not offered"}
    assert missing >= {"versions at start and end", "minimum version", "exact version", "no mixture unsaid"}


def test_a_checkpoint_that_the_server_refuses_is_not_offered() -> None:
    found = found_at(ConformingServer("takes no checkpoint"), "no mixture unsaid")
    assert found == {"no mixture unsaid": "not offered"}


@pytest.mark.parametrize(("fault", "code"), [("", 0), ("ignores stops", 1)])
def test_the_command_shows_what_it_saw_and_fails_with_a_fault(fault: str, code: int) -> None:
    with served(ConformingServer(fault).app) as url:
        asked = CliRunner().invoke(app, ["conformance", url.replace("//", "//name:secret@"), "--json"])
    findings = json.loads(asked.stdout)
    assert (asked.exit_code, len(findings)) == (code, 12)
    assert {*findings[0]} == {"check", "result", "saw", "demanded_by"}
    assert "secret" not in asked.output


def test_what_is_no_rollout_server_is_said_in_a_sentence() -> None:
    refused = CliRunner().invoke(app, ["conformance", "http://name:secret@127.0.0.1:9"])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("http://127.0.0.1:9 does not answer: ")
