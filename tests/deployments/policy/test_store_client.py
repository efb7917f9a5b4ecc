"""The client of the policy store: each method calls the method of the same name over the handle."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.failures import PolicyStoreLost
from deployments.policy.store import PolicyStore
from deployments.policy.store_client import PolicyStoreClient

METHODS = sorted(name for name in vars(PolicyStore) if not name.startswith("_"))


class RecordingHandle:
    """A Serve handle whose calls end with `outcome`."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, method: str) -> "RecordedMethod":
        return RecordedMethod(lambda *arguments: self._call(method, arguments))

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append((method, arguments))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class RecordedMethod:
    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


def call(handle: Any, method: str) -> tuple[Any, list[str]]:
    """The result of a call with a distinct argument for each parameter, and the arguments."""
    arguments = [f"argument {name}" for name in inspect.signature(getattr(PolicyStore, method)).parameters][1:]
    return asyncio.run(getattr(PolicyStoreClient(handle), method)(*arguments)), arguments


def test_the_client_has_the_methods_of_the_store_with_the_same_signatures() -> None:
    assert sorted(name for name in vars(PolicyStoreClient) if not name.startswith("_")) == METHODS
    for name in METHODS:
        assert inspect.signature(getattr(PolicyStore, name)) == inspect.signature(getattr(PolicyStoreClient, name))


@pytest.mark.parametrize("method", METHODS)
def test_each_method_passes_all_arguments_on_and_returns_the_stores_answer(method: str) -> None:
    handle = RecordingHandle("the answer")
    result, arguments = call(handle, method)
    assert handle.calls == [(method, tuple(arguments))]
    returns_nothing = inspect.signature(getattr(PolicyStore, method)).return_annotation is None
    assert result == (None if returns_nothing else "the answer")


def test_a_store_that_dies_during_a_call_is_lost() -> None:
    with pytest.raises(PolicyStoreLost, match=r"^The policy store died during the call\.$"):
        call(RecordingHandle(ActorDiedError()), "layout")
