"""`make load`: what it asks of the service and of locust."""

from pathlib import Path

from examples.load import arguments, prepared, workers_options
from service.startup.config import read_config
from tests.paths import REPOSITORY


def test_options_of_locust_follow_the_config_which_may_be_missing() -> None:
    assert arguments(["my.yaml", "--html", "report.html"]) == (Path("my.yaml"), ["--html", "report.html"])
    assert arguments(["--html", "report.html"]) == (Path("serve_config.cpu.yaml"), ["--html", "report.html"])


def test_the_service_has_sessions_where_agents_call_and_the_pusher_its_weights() -> None:
    config = read_config(REPOSITORY / "serve_config.cpu.yaml")
    [application] = config.applications
    assert prepared(config, {"interactive": 1}) == []
    assert "sessions" not in application.args
    model = str(REPOSITORY / "models" / "tiny")
    assert prepared(config, {"agent": 1, "pusher": 1}) == ["--push-weights", model]
    assert application.args["sessions"] == {}


def test_a_master_listens_on_loopback_where_its_workers_look_for_it() -> None:
    assert workers_options(0) == []
    options = dict(zip(*[iter(workers_options(2))] * 2, strict=True))
    assert (options["--processes"], options["--master-bind-host"]) == ("2", "127.0.0.1")
    assert options["--master-bind-port"] == options["--master-port"]
