"""What the app builder refuses, whichever way Serve was started."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from service import app
from service.access.access_control import ServiceExposed
from service.app import build
from service.ingress import http_options
from service.services import _load_chat
from service.settings import AccessSettings, ServiceSettings
from tests.paths import TINY_MODEL

WITH_TLS = HTTPOptions(host="127.0.0.1").model_copy(update={"ssl_certfile": "/etc/tls.crt"})
SETTINGS = ServiceSettings.model_validate(
    {
        "engine": {"device": "cpu", "model": "models/tiny", "max_model_len": 64},
        "environments": {"math": {"import_path": "deployments.tasks.math:MathEnvironment"}},
    }
)


def listening(monkeypatch: pytest.MonkeyPatch, options: HTTPOptions | None) -> None:
    monkeypatch.setattr(app, "http_options", lambda: options)


def test_where_strangers_could_reach_it_the_application_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    listening(monkeypatch, HTTPOptions(host="0.0.0.0"))
    with pytest.raises(ServiceExposed, match=r"^http_options\.host: 0\.0\.0\.0 can be reached from other machines"):
        build(SETTINGS)
    guarded = SETTINGS.model_copy(update={"access": AccessSettings(guarded_by="the gateway asks who is calling")})
    build(guarded)


def test_a_certificate_that_haproxy_would_not_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    listening(monkeypatch, WITH_TLS)
    build(SETTINGS)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(ServiceExposed, match=r"^http_options\.ssl_certfile: /etc/tls\.crt is not used with RAY_SERVE"):
        build(SETTINGS)


def test_without_a_serve_that_runs_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http_options() is None
    build(SETTINGS)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    client = SimpleNamespace(http_config=WITH_TLS)
    monkeypatch.setattr(serve.context, "_get_global_client", lambda **_: client)
    labels: dict[str, str] = {}
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_labels=lambda: labels))
    assert http_options() is WITH_TLS


def test_where_the_ingress_listens_itself_its_port_is_that_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    client = SimpleNamespace(http_config=WITH_TLS.model_copy(update={"port": 24817}))
    monkeypatch.setattr(serve.context, "_get_global_client", lambda **_: client)
    context = SimpleNamespace(get_node_labels=lambda: {"rollout-service-port": "8000"})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert http_options() == WITH_TLS.model_copy(update={"port": 8000})


@pytest.mark.parametrize(
    "engine", [{"model": str(TINY_MODEL)}, {"model": "unknown", "tokenizer": str(TINY_MODEL)}], ids=list
)
def test_the_tokenizer_is_that_of_the_model_unless_another_one_is_named(
    engine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = SETTINGS.model_copy(update={"engine": SETTINGS.engine.model_copy(update=engine)})
    tokenizer, parser = asyncio.run(_load_chat(settings))
    assert (len(tokenizer.vocabulary), parser) == (262, None)
