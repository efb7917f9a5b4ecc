"""Whoever reaches a port of the service's machine gets nothing without the cluster's token or a key.

docs/security.md names the ports, and the firewall rule for what Ray cannot close.
"""

import os
import stat
from pathlib import Path

import pytest
import ray

from deployments.logs import session_folder
from rollout_client import RolloutClient
from tests.live.listeners import Answers, Listener, answers_of, listeners

METRICS = 1
"""Listeners that give numbers for Prometheus to everybody: of Ray's agent."""


@pytest.fixture(scope="module")
def open_to_others(client: RolloutClient) -> dict[Listener, Answers]:
    """The listeners of the running service on other interfaces than loopback, and what they answer."""
    client.info()
    return {listener: answers_of(listener) for listener in listeners() if not listener.is_on_loopback}


def test_a_listener_off_loopback_refuses_strangers_or_has_metrics_only(open_to_others: dict[Listener, Answers]) -> None:
    assert len(open_to_others) > 5
    open_ = {
        listener: answers
        for listener, answers in open_to_others.items()
        if not answers.refuses and not answers.has_only_metrics
    }
    assert open_ == {}
    assert sum(answers.has_only_metrics for answers in open_to_others.values()) <= METRICS


def test_the_ports_that_run_code_are_among_those_that_refuse(open_to_others: dict[Listener, Answers]) -> None:
    refused = {
        method
        for answers in open_to_others.values()
        for method, status in answers.grpc.items()
        if status == "UNAUTHENTICATED"
    }
    assert {
        "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
        "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
        "/ray.rpc.NodeManagerService/GetNodeStats",
        "/ray.serve.ASGIService/HandleRequestWithRejection",
    } <= refused


def test_the_service_itself_listens_on_loopback_alone(service_url: str) -> None:
    port = int(service_url.rpartition(":")[2])
    assert [listener.address for listener in listeners() if listener.port == port] == ["127.0.0.1"]


def test_the_cluster_uses_a_token_that_its_owner_alone_can_read(service_url: str) -> None:  # noqa: ARG001
    assert ray.is_initialized()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_rays_agent_does_not_look_for_a_dashboard_that_was_not_started(client: RolloutClient) -> None:
    client.info()
    assert "dashboard http address" not in (session_folder() / "logs" / "dashboard_agent.log").read_text()
