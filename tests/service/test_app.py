"""What the app builder refuses, whichever way Serve was started."""

import asyncio
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions

from service import app
from service.access.access_control import ServiceExposed
from service.app import build
from service.ingress import http_options
from service.services import _load_chat
from service.settings import AccessSettings, ServiceSettings
from tests.paths import TINY_MODEL

WITH_TLS = HTTPOptions(host="127.0.0.1").model_copy(update={"ssl_certfile": "/etc/tls.crt"})


EVERYTHING = ServiceSettings.model_validate(
    {
        "engine": {"device": "cpu", "model": "models/tiny", "max_model_len": 64},
        "environments": {
            "math": {"import_path": "deployments.tasks.math:MathEnvironment", "reward_models": ["judge"]},
            "played": {
                "import_path": "deployments.tasks.sliding_puzzle:SlidingPuzzleEnvironment",
                "agent": {"import_path": "examples.agents:play"},
            },
        },
        "reward_models": {"judge": {"model": "models/tiny"}},
        "sessions": {},
        "images": {},
        "jobs": {},
        "rollout_records": {},
    }
)


STORES = {"policy_store": "Policy", "sessions": "Sessions", "images": "Images", "jobs": "Jobs", "records": "Records"}
"""The deployment that each argument is."""


def deployment_of(bound: Application) -> Any:
    """Serve shows it nowhere else."""
    return vars(bound)["_bound_deployment"]


def applications(bound: Application) -> Iterator[Application]:
    """This one, and those that it is given."""
    yield bound
    deployment = deployment_of(bound)
    for argument in (*deployment.init_args, *deployment.init_kwargs.values()):
        for each in argument.values() if isinstance(argument, dict) else [argument]:
            if isinstance(each, Application):
                yield from applications(each)


def test_each_deployment_takes_what_it_is_given() -> None:
    stores = {}
    for each in applications(build(EVERYTHING)):
        deployment = deployment_of(each)
        bound = inspect.signature(deployment.func_or_class).bind(*deployment.init_args, **deployment.init_kwargs)
        given = bound.arguments | deployment.init_kwargs
        stores[deployment.name] = {
            name: deployment_of(given[name]).name for name in STORES if isinstance(given.get(name), Application)
        }
    assert stores == {
        "Ingress": STORES,
        "Generator": {name: STORES[name] for name in ("policy_store", "sessions", "images")},
        "math": {"images": "Images"},
        "played": {"images": "Images"},
        "played_agent": {},
        "judge": {},
        **{name: {} for name in STORES.values()},
    }


def test_where_strangers_could_reach_it_the_application_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "http_options", lambda: HTTPOptions(host="0.0.0.0"))
    with pytest.raises(ServiceExposed, match=r"^http_options\.host: 0\.0\.0\.0 can be reached from other machines"):
        build(EVERYTHING)
    build(EVERYTHING.model_copy(update={"access": AccessSettings(guarded_by="the gateway asks who is calling")}))


def test_the_service_listens_where_serve_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http_options() is None, "nothing listens without a Serve that runs"
    build(EVERYTHING)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    client = SimpleNamespace(http_config=WITH_TLS)
    monkeypatch.setattr(serve.context, "_get_global_client", lambda **_: client)
    assert http_options() == WITH_TLS


@pytest.mark.parametrize(
    "engine", [{"model": str(TINY_MODEL)}, {"model": "unknown", "tokenizer": str(TINY_MODEL)}], ids=list
)
def test_the_tokenizer_is_that_of_the_model_unless_another_one_is_named(
    engine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = EVERYTHING.model_copy(update={"engine": EVERYTHING.engine.model_copy(update=engine)})
    tokenizer, parser = asyncio.run(_load_chat(settings))
    assert (len(tokenizer.vocabulary), parser) == (262, None)
