"""Where a service that asks for no key may listen, and under which names it answers there."""

import json
from pathlib import Path

import pytest
from ray.serve.config import HTTPOptions

from service.access.access_control import AccessControl, ServiceExposed, refuse_exposed
from service.settings import AccessSettings

GUARDED = AccessSettings(guarded_by="the gateway asks who is calling")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "::1", "[::1]"])
def test_a_service_without_keys_may_listen_on_loopback(host: str) -> None:
    refuse_exposed(AccessSettings(), HTTPOptions(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", None, "10.0.0.4", "0", "example.org", "127.0.0.1.example.org"])
def test_a_service_that_others_can_reach_needs_keys_or_a_guard(host: str | None) -> None:
    with pytest.raises(ServiceExposed) as raised:
        refuse_exposed(AccessSettings(), HTTPOptions(host=host))
    assert str(raised.value).startswith(f"http_options.host: {host} can be reached from other machines, and the")
    refuse_exposed(GUARDED, HTTPOptions(host=host))
    refuse_exposed(AccessSettings(keys_file="keys.yaml"), HTTPOptions(host=host))


@pytest.mark.parametrize("guard", ["", "no", True])
def test_the_guard_is_named_in_words(guard: object) -> None:
    with pytest.raises(ValueError, match="guarded_by"):
        AccessSettings.model_validate({"guarded_by": guard})


def test_only_a_service_without_keys_is_open_on_loopback(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": []}))
    assert AccessControl.of(AccessSettings()).is_open_on_loopback
    assert not AccessControl.of(AccessSettings(keys_file=str(path))).is_open_on_loopback
    assert not AccessControl.of(GUARDED).is_open_on_loopback
