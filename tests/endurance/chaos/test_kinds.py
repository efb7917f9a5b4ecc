"""Which kinds of rounds are played, and that the services they need have settings that are valid."""

from pathlib import Path
from time import monotonic

import pytest
import typer

from deployments.generation.settings import EngineSettings
from service.settings import ServiceSettings
from tests.endurance.chaos.__main__ import chosen_kinds, in_turn
from tests.endurance.chaos.nodes.several_nodes import config_of_nodes
from tests.endurance.chaos.one_machine import HANG_TIMEOUT_S, config_of_one_machine
from tests.endurance.chaos.parts import DRAINED, KILLED, STOPPED
from tests.paths import REPOSITORY


def test_the_kinds_take_turns_until_each_has_its_rounds_and_the_time_is_over() -> None:
    kinds = ["proxy", "store"]
    assert list(in_turn(kinds, 2, {}, monotonic() + 60)) == ["proxy", "store"] * 2
    assert list(in_turn(kinds, 3, {"proxy": 2, "store": 1, "ingress": 5}, monotonic() + 60)) == [
        "store",
        "proxy",
        "store",
    ]
    assert list(in_turn(kinds, 2, {"proxy": 2, "store": 3}, monotonic() + 60)) == []
    assert list(in_turn(kinds, 2, {}, monotonic() - 1)) == []


def test_kinds_are_chosen_by_their_names_or_all_of_a_group() -> None:
    assert chosen_kinds("all") == list(KILLED)
    assert chosen_kinds("stopped") == list(STOPPED)
    assert chosen_kinds("drained") == list(DRAINED)
    assert chosen_kinds("nodes") == ["node", "head"]
    assert chosen_kinds("proxy,generator-stopped") == ["proxy", "generator-stopped"]


@pytest.mark.parametrize(
    ("named", "message"),
    [("proxy,browser", "browser: there are only"), ("proxy,head", "node and head need a service of their own")],
)
def test_unknown_kinds_and_kinds_of_two_services_are_refused(named: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        chosen_kinds(named)


def test_the_service_on_one_machine_has_valid_settings() -> None:
    [application] = config_of_one_machine(REPOSITORY / "serve_config.cpu.yaml", Path("steps")).applications
    settings = ServiceSettings.model_validate(application.args)
    assert isinstance(settings.engine, EngineSettings)
    assert settings.engine.hang_timeout_s == HANG_TIMEOUT_S
    assert list(settings.environments) == ["sliding_puzzle"]


def test_the_service_on_several_nodes_has_valid_settings() -> None:
    [application] = config_of_nodes("redis:6379", Path("steps"))["applications"]
    settings = ServiceSettings.model_validate(application["args"])
    assert settings.access.guarded_by is not None
