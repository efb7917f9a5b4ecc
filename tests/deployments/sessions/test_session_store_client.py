"""The client of the session store: a store that has died is waited for."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.failures import SessionStoreLost
from deployments.sessions.store import SessionStore
from deployments.sessions.store_client import AWAY_S, SessionStoreClient
from deployments.storage.storage import StorageFailed, StoreReplaced
from tests import virtual_time

METHODS = sorted(name for name in vars(SessionStoreClient) if not name.startswith("_"))
AT_ONCE = ["answer", "heard"]


class Handle:
    """A Serve handle to a store that raises `failure` until a time, in seconds of the loop."""

    def __init__(self, failure: Exception, until_s: float = 1e9) -> None:
        self._failure = failure
        self._until_s = until_s

    def __getattr__(self, method: str) -> "Handle":
        return self

    @property
    def remote(self) -> Callable[..., Any]:
        return self._answer

    async def _answer(self, *_arguments: Any) -> str:
        if virtual_time.now() < self._until_s:
            raise self._failure
        return "the answer"


def call(handle: Any, method: str) -> tuple[Any, float]:
    """What a call returns or raises, and after how many seconds."""
    arguments = [None for _ in inspect.signature(getattr(SessionStore, method)).parameters][1:]

    async def called() -> tuple[Any, float]:
        method_of_client = getattr(SessionStoreClient(handle), method)
        [result] = list[Any](await asyncio.gather(method_of_client(*arguments), return_exceptions=True))
        return result, virtual_time.now()

    return virtual_time.run(called())


def test_the_client_has_the_methods_of_the_store_with_the_same_signatures() -> None:
    for name in METHODS:
        assert inspect.signature(getattr(SessionStore, name)) == inspect.signature(getattr(SessionStoreClient, name))


@pytest.mark.parametrize("failure", [ActorDiedError(), StoreReplaced("by another")])
@pytest.mark.parametrize("method", [name for name in METHODS if name not in AT_ONCE])
def test_a_store_that_has_died_is_waited_for(method: str, failure: Exception) -> None:
    result, after_s = call(Handle(failure, until_s=20), method)
    assert not isinstance(result, Exception)
    assert after_s == pytest.approx(20, abs=1)


def test_a_store_that_stays_away_is_lost() -> None:
    result, after_s = call(Handle(ActorDiedError()), "samples")
    assert isinstance(result, SessionStoreLost)
    assert after_s == pytest.approx(AWAY_S, abs=1)


def test_a_database_that_fails_is_said_at_once() -> None:
    result, after_s = call(Handle(StorageFailed("no room")), "samples")
    assert (type(result), after_s) == (StorageFailed, 0)


@pytest.mark.parametrize("method", AT_ONCE)
def test_what_is_asked_again_and_again_does_not_wait(method: str) -> None:
    result, after_s = call(Handle(ActorDiedError()), method)
    assert (type(result), after_s) == (SessionStoreLost, 0)
