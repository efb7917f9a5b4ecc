"""The running service behind keys and TLS, and how it refuses to be reached by strangers."""

import time
from unittest.mock import patch

import httpx
import pytest
from rich.console import Console

import service.startup.local_service
from rollout_client import RequestRejected
from service.access.access_control import CHECK_PERIOD_S
from service.startup.config import ServiceNotStarted
from service.startup.local_service import local_service
from tests.live.services import RUNNING, SimulatedService, simulated_config


def status_with(service: SimulatedService, name: str) -> int:
    with service.http(name) as client:
        return client.get("/info").status_code


def test_a_key_plays_over_tls_and_another_one_only_reads(simulated: SimulatedService) -> None:
    assert simulated.url.startswith("https://127.0.0.1:")
    with simulated.client("trainer") as trainer:
        samples = trainer.example_samples("following", count=2)
        played = trainer.rollout(samples, max_rollout_turns=1, sampling={"max_new_tokens": 4}).samples
        assert [sample.status for sample in played] == ["completed"] * 2
    with simulated.client("reader") as reader:
        assert "following" in reader.info().tasks
        with pytest.raises(RequestRejected) as rejected:
            reader.rollout(samples)
    assert (rejected.value.status, rejected.value.problem.type) == (403, "urn:rollout:problem:not-allowed")


def test_without_a_key_the_service_tells_only_that_it_lives(simulated: SimulatedService) -> None:
    with httpx.Client(base_url=simulated.url, verify=simulated.trusted) as stranger:
        statuses = {
            path: stranger.get(path).status_code for path in ("/info", "/tasks", "/policy", "/healthz", "/readyz")
        }
        assert statuses == {"/info": 401, "/tasks": 401, "/policy": 401, "/healthz": 200, "/readyz": 200}
        assert stranger.post("/rollout", json={}).headers["www-authenticate"] == 'Bearer realm="rollout"'
    with pytest.raises(httpx.HTTPError):
        httpx.get(simulated.url.replace("https://", "http://") + "/healthz")


def test_a_key_is_rotated_while_the_service_runs(simulated: SimulatedService) -> None:
    simulated.add_key("trainer", "rollout", "read", known_as="new")
    # Each replica of the ingress looks at the file anew after this time.
    time.sleep(CHECK_PERIOD_S)
    assert [status_with(simulated, name) for name in ("new", "trainer", "reader")] == [200, 200, 200]
    simulated.remove_key("trainer")
    time.sleep(CHECK_PERIOD_S)
    assert [status_with(simulated, name) for name in ("new", "trainer", "reader")] == [200, 401, 200]


@pytest.mark.long
def test_strangers_are_not_served_whoever_deploys_the_service() -> None:
    """`serve run` deploys a config without the checks of `python -m service`."""
    RUNNING.stop()
    config = simulated_config({"math": {"import_path": "deployments.tasks.math:MathEnvironment"}})
    config.http_options.host = "0.0.0.0"
    with (
        patch.object(service.startup.local_service, "check_config"),
        pytest.raises(ServiceNotStarted, match=r"can be reached from other machines, and the service asks for no key"),
        local_service(config, Console(stderr=True)),
    ):
        pass
