"""`make load`: what it asks of the service and of locust."""

from examples.load import prepared
from service.startup.config import read_config
from tests.paths import REPOSITORY


def test_the_service_has_sessions_for_agents_and_its_weights_are_pushed() -> None:
    config = read_config(REPOSITORY / "serve_config.cpu.yaml")
    [application] = config.applications
    assert prepared(config, "interactive") == []
    assert "sessions" not in application.args
    model = str(REPOSITORY / "models" / "tiny")
    assert prepared(config, "agent,pusher=2") == ["--push-weights", model]
    assert application.args["sessions"] == {}
