"""The client of the session store: a store that has died is waited for."""

import asyncio
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.failures import SessionStoreLost
from deployments.sessions.records import ChatContext, Plan, SessionClosed, session_unknown
from deployments.sessions.store import AT_ONCE, SessionStore, session_store_client
from deployments.storage.storage import AWAY_S, StorageFailed, StoreReplaced
from rollout_client.contract.base import FieldProblem
from tests import virtual_time
from tests.fakes.store_handle import StoreHandle


def away(failure: Exception, until_s: float = 1e9) -> StoreHandle:
    """A store that raises `failure` until a time, in seconds of the loop."""

    def answer(method: str, *arguments: Any) -> Any:
        if virtual_time.now() < until_s:
            return failure
        return ["the answer"] * len(arguments[1]) if method == "batched" else "the answer"

    return StoreHandle(answer)


@virtual_time.synchronous
async def call(handle: Any, method: str) -> tuple[Any, float]:
    """What a call returns or raises, and after how many seconds."""
    arguments = [None for _ in inspect.signature(getattr(SessionStore, method)).parameters][1:]
    method_of_client = getattr(session_store_client(handle), method)
    [result] = list[Any](await asyncio.gather(method_of_client(*arguments), return_exceptions=True))
    return result, virtual_time.now()


DIED, REPLACED, FAILED = ActorDiedError(), StoreReplaced("by another"), StorageFailed("no room")


@pytest.mark.parametrize(
    ("method", "failure"),
    [
        *((method, failure) for method in ("open", "plan", "add", "end_call") for failure in (DIED, REPLACED)),
        # What was generated is not lost because a database fails.
        ("add", FAILED),
    ],
)
def test_a_store_that_has_died_is_waited_for(method: str, failure: Exception) -> None:
    result, after_s = call(away(failure, until_s=20), method)
    assert not isinstance(result, Exception)
    assert after_s == pytest.approx(20, abs=1)


@pytest.mark.parametrize(
    ("method", "failure", "lost", "lost_after_s"),
    [
        ("samples", DIED, SessionStoreLost, AWAY_S),
        ("samples", FAILED, StorageFailed, 0),
        # What is asked again and again does not wait.
        *((method, DIED, SessionStoreLost, 0) for method in AT_ONCE),
    ],
)
def test_what_stays_away_is_lost(method: str, failure: Exception, lost: type[Exception], lost_after_s: float) -> None:
    result, after_s = call(away(failure), method)
    assert (type(result), after_s) == (lost, pytest.approx(lost_after_s, abs=1 if lost_after_s else 0))


async def test_plans_of_one_moment_are_made_together_and_each_has_its_own_answer() -> None:
    asked: list[list[str]] = []

    def answer(_method: str, planned: str, calls: Sequence[Any]) -> list[Any]:
        assert (planned, [context for *_, context in calls]) == ("plan", [ChatContext()] * len(calls))
        asked.append([call_id for _, call_id, _, _ in calls])
        third = StoreReplaced("by another") if len(asked) == 1 else Plan(None, 3, [], [])
        plans = {"1": Plan(None, 1, [], []), "2": session_unknown("gone"), "3": third}
        return [plans[call_id] for call_id in asked[-1]]

    handle: Any = StoreHandle(answer)
    client = session_store_client(handle)
    calls = [
        client.plan(session_id, call_id, [{}], ChatContext())
        for session_id, call_id in (("kept", "1"), ("gone", "2"), ("kept", "3"))
    ]
    first, second, third = list[Any](await asyncio.gather(*calls, return_exceptions=True))
    assert (first.covered, str(second), third.covered) == (1, str(session_unknown("gone")), 3)
    assert asked == [["1", "2", "3"], ["3"]], "a store that was replaced is asked again"


@pytest.mark.parametrize(
    "failure",
    [
        session_unknown("s"),
        SessionClosed(FieldProblem(field="session_id", message="it was ended", value="s")),
        StorageFailed("x"),
    ],
)
def test_the_failures_of_a_store_travel_as_results(failure: Exception) -> None:
    travelled = pickle.loads(pickle.dumps(failure))
    assert (type(travelled), str(travelled), vars(travelled)) == (type(failure), str(failure), vars(failure))
