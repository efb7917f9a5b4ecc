"""The stores over their handles: each call is passed on, and a store that dies is lost."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.failures import JobStoreLost, PolicyStoreLost
from deployments.rpc.handle_calls import job_store_client, policy_store_client
from tests.fakes.store_handle import StoreHandle


def test_a_call_passes_all_arguments_on_and_returns_the_stores_answer() -> None:
    handle: Any = StoreHandle(lambda *_: "the answer")
    assert asyncio.run(policy_store_client(handle).upload_state(3, name="a")) == "the answer"  # type: ignore[comparison-overlap]
    assert handle.calls == [("upload_state", 3, {"name": "a"})]


@pytest.mark.parametrize(
    ("client", "lost", "who"),
    [(policy_store_client, PolicyStoreLost, "policy"), (job_store_client, JobStoreLost, "job")],
)
def test_a_store_that_dies_during_a_call_is_lost(client: Callable[[Any], Any], lost: type[Exception], who: str) -> None:
    with pytest.raises(lost, match=rf"^The {who} store died during the call\.$"):
        asyncio.run(client(StoreHandle(lambda *_: ActorDiedError())).answer())


def test_a_client_has_no_private_methods() -> None:
    client: Any = policy_store_client(StoreHandle(print))  # type: ignore[arg-type]
    assert not hasattr(client, "_tick")
