"""Calls of model servers' APIs in the ingress: which are in flight, and their seeds in a session."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from deployments.failures import GenerationLost, PolicyStoreLost
from deployments.protocols.model_server import ServedPart, ServedRequest, ServedTokens
from deployments.sessions.records import OpenSession
from rollout_client.contract.base import PolicyDemand
from rollout_client.contract.rollouts import Sampling
from rollout_client.contract.sessions import SessionRequest
from service.access.keys import ANYBODY, Caller
from service.admission.admission import Admission
from service.model_server.calls import ANY_WEIGHTS, FORGET_AFTER_S, ModelCalls, _of_session
from service.remote.policy import RemotePolicy
from service.settings import AdmissionSettings
from tests.fakes.model_server import ScriptedModelServer
from tests.fakes.policy_store import ScriptedStore

TEAM = Caller("team", frozenset({"rollout"}))
BODY = b"x" * 76


class World:
    def __init__(self, parts: Sequence[ServedPart | Exception | float] = (), model_names: Sequence[str] = ()) -> None:
        self.server = ScriptedModelServer(parts)
        self.store = ScriptedStore()
        self.admission = Admission(AdmissionSettings(), max_model_len=100)
        policy = RemotePolicy(self.store)  # type: ignore[arg-type]
        self.calls = ModelCalls(self.server, policy, self.admission, model_names)


async def test_a_call_that_fails_is_no_longer_in_flight() -> None:
    world = World([GenerationLost("gone")])
    with pytest.raises(GenerationLost):
        await world.calls.answer("generate", BODY, "r", TEAM, routing_key="k")
    assert world.calls.token_calls_of(TEAM) == 0
    await asyncio.sleep(FORGET_AFTER_S)
    assert len(world.server.released) == 1


async def test_a_call_that_is_left_before_its_body_is_read_is_aborted() -> None:
    world = World([ServedPart(b"data", 200, "text/event-stream"), ServedPart(tokens=ServedTokens(1, 1))])
    answer = await world.calls.answer("chat/completions", BODY, "r", ANYBODY)
    await answer.aclose()
    assert world.server.was_left
    assert len(world.server.released) == 1


def seed_of(session: str, generation_index: int, body: bytes = b"{}") -> int | None:
    asked = SessionRequest(sampling=Sampling(seed=7), generation_index=generation_index)
    request = ServedRequest("call", (), 1, (), None, body=body)  # type: ignore[arg-type]
    sampling = _of_session(request, OpenSession(session, "", "", "http://service", asked), ANYBODY).session_sampling
    assert sampling is not None
    return sampling.seed


def test_the_sessions_of_a_group_sample_differently_and_each_alike_again() -> None:
    seeds = [seed_of("a", 0), seed_of("b", 1), seed_of("c", 2), seed_of("a", 0, b"{ }")]
    assert len(set(seeds)) == 4
    assert seed_of("d", 1) == seeds[1]


def test_the_sessions_of_one_request_share_its_turns() -> None:
    request = ServedRequest("call", (), 1, (), None, body=b"")  # type: ignore[arg-type]
    asked = SessionRequest(priority="batch")
    shares = [
        _of_session(request, OpenSession(name, "", "", "http://service", asked, share_id), TEAM).share
        for name, share_id in (("a", "r"), ("b", "r"), ("c", None))
    ]
    assert [(share.id, share.weight, share.key) for share in shares] == [
        ("r", 1 / 16, TEAM.name),
        ("r", 1 / 16, TEAM.name),
        ("c", 1 / 16, TEAM.name),
    ]


async def test_calls_of_a_routing_key_are_turns_of_one_party_until_it_is_silent() -> None:
    world = World([ServedPart(b"{}", 200, "application/json", ServedTokens(1, 1))])
    for key, caller in (("k", TEAM), ("k", TEAM), ("k", ANYBODY), (None, ANYBODY)):
        answer = await world.calls.answer("generate", BODY, "r", caller, routing_key=key)
        assert [part async for part in answer.body] == [b"{}"]
    first, second, other, own = (request.rollout_id for request in world.server.requests)
    assert first == second != other
    assert world.server.released == [own]
    await asyncio.sleep(FORGET_AFTER_S)
    assert sorted(world.server.released) == sorted([own, first, other])


async def test_a_routing_key_that_ended_is_forgotten_at_once_and_an_unknown_one_is_nothing() -> None:
    world = World([ServedPart(b"{}", 200, "application/json", ServedTokens(1, 1))])
    answer = await world.calls.answer("generate", BODY, "r", TEAM, routing_key="k")
    await answer.whole()
    world.calls.end_routing_key("k", ANYBODY)
    world.calls.end_routing_key("other", TEAM)
    assert world.server.released == []
    world.calls.end_routing_key("k", TEAM)
    await asyncio.sleep(2 * FORGET_AFTER_S)
    assert world.server.released == [world.server.requests[0].rollout_id]


OF_A = PolicyDemand(name="run-a")


@pytest.mark.parametrize(
    ("model", "demand", "makes"),
    [
        ("tiny", ANY_WEIGHTS, None),
        (None, ANY_WEIGHTS, None),
        (["run-b"], ANY_WEIGHTS, None),
        ("claude", ANY_WEIGHTS, None),
        ("run-b", ANY_WEIGHTS, "run-b"),
        ("run-b", PolicyDemand(min_version=3), "run-b"),
        ("run-b", OF_A, "run-a"),
    ],
)
async def test_a_call_that_names_a_policy_is_made_by_it(model: Any, demand: PolicyDemand, makes: str | None) -> None:
    world = World(model_names=("tiny",))
    assert await world.calls.demand_of_model(model, demand) == demand.model_copy(update={"name": makes})


async def test_only_a_name_that_a_policy_may_have_is_asked_for_at_the_store() -> None:
    world = World()
    world.store.failures["wait_for"] = PolicyStoreLost("gone")
    assert await world.calls.demand_of_model("org/run-b", ANY_WEIGHTS) == ANY_WEIGHTS
    with pytest.raises(PolicyStoreLost):
        await world.calls.demand_of_model("run-b", ANY_WEIGHTS)


async def test_a_call_that_is_under_way_keeps_its_party_where_its_prefix_is() -> None:
    world = World(
        [ServedPart(b"{", 200, "application/json"), 2 * FORGET_AFTER_S, ServedPart(tokens=ServedTokens(1, 1))]
    )
    first, second = [await world.calls.answer("generate", BODY, "r", TEAM, routing_key="k") for _ in range(2)]
    await first.aclose()
    rest = asyncio.create_task(second.whole())
    await asyncio.sleep(1.5 * FORGET_AFTER_S)
    assert world.server.released == []
    await rest
    await asyncio.sleep(FORGET_AFTER_S)
    assert len(world.server.released) == 1
