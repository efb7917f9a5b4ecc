"""Calls of model servers' APIs in the ingress: what each counts, whatever becomes of it, and its seed in a session."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from deployments.failures import GenerationLost
from deployments.protocols.model_server import ServedPart, ServedRequest, ServedTokens
from deployments.sessions.records import OpenSession
from rollout_client.contract.rollouts import Sampling
from rollout_client.contract.sessions import SessionRequest
from service.access.keys import ANYBODY, Caller, KeyQuotas
from service.admission.admission import Admission
from service.model_server.calls import FORGET_AFTER_S, ModelCalls, of_session
from service.remote.policy import RemotePolicy
from service.settings import AdmissionSettings
from tests import virtual_time
from tests.service.scripted_model_server import ScriptedModelServer
from tests.service.scripted_store import ScriptedStore

TEAM = Caller("team", frozenset({"rollout"}), quotas=KeyQuotas(tokens_per_minute=60))
BODY = b"x" * 76
"""20 tokens, about."""


class World:
    def __init__(self, parts: Sequence[ServedPart | Exception] = ()) -> None:
        self.server = ScriptedModelServer(parts)
        self.admission = Admission(AdmissionSettings(), max_model_len=100, now_s=virtual_time.now)
        policy = RemotePolicy(ScriptedStore())  # type: ignore[arg-type]
        self.calls = ModelCalls(self.server, policy, self.admission)

    def wait_s(self) -> float:
        """Until the key has a token again, from one a second."""
        usage = self.admission.usage_of(TEAM)
        assert usage is not None
        return usage.wait_s()

    def use_up(self, tokens: float) -> None:
        usage = self.admission.usage_of(TEAM)
        assert usage is not None
        usage.charge(tokens)


@virtual_time.test
async def test_a_call_that_fails_gets_its_charge_back() -> None:
    world = World([GenerationLost("gone")])
    world.use_up(60)
    await asyncio.sleep(1)
    with pytest.raises(GenerationLost):
        await world.calls.answer("chat/completions", BODY, "r", TEAM)
    assert world.wait_s() == 0
    assert not world.calls._in_flight


@virtual_time.test
async def test_a_call_that_is_left_keeps_the_charge_of_what_was_expected_of_it() -> None:
    world = World([ServedPart(b"data", 200, "text/event-stream"), ServedPart(tokens=ServedTokens(1, 1))])
    world.use_up(59)
    async with aclosing(await world.calls.answer("tokenize", BODY, "r", TEAM)) as answer:
        assert answer.status == 200
    assert world.wait_s() == 20
    assert not world.calls._in_flight


@virtual_time.test
async def test_a_call_that_is_left_before_its_body_is_read_is_aborted() -> None:
    world = World([ServedPart(b"data", 200, "text/event-stream"), ServedPart(tokens=ServedTokens(1, 1))])
    answer = await world.calls.answer("chat/completions", BODY, "r", ANYBODY)
    await answer.aclose()
    assert world.server.was_left
    assert not world.calls._in_flight
    assert len(world.server.released) == 1


@virtual_time.test
async def test_a_call_that_is_left_while_it_waits_for_its_quota_counts_nothing() -> None:
    world = World()
    world.use_up(70)
    waiting = asyncio.create_task(world.calls.answer("chat/completions", BODY, "r", TEAM))
    await virtual_time.settled()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert world.wait_s() == 11
    assert world.server.requests == []
    assert not world.calls._in_flight
    assert len(world.server.released) == 1


def seed_of(session: str, generation_index: int, body: bytes = b"{}") -> int | None:
    asked = SessionRequest(sampling=Sampling(seed=7), generation_index=generation_index)
    request = ServedRequest("call", (), 1, (), None, body=body)  # type: ignore[arg-type]
    sampling = of_session(request, OpenSession(session, "", "", "http://service", asked), ANYBODY).session_sampling
    assert sampling is not None
    return sampling.seed


def test_the_sessions_of_a_group_sample_differently_and_a_session_that_is_played_again_alike() -> None:
    seeds = [seed_of("a", 0), seed_of("b", 1), seed_of("c", 2), seed_of("a", 0, b"{ }")]
    assert len(set(seeds)) == 4
    assert seed_of("d", 1) == seeds[1]


def test_the_sessions_of_one_request_share_its_turns() -> None:
    request = ServedRequest("call", (), 1, (), None, body=b"")  # type: ignore[arg-type]
    asked = SessionRequest(priority="batch")
    shares = [
        of_session(request, OpenSession(name, "", "", "http://service", asked, share_id), TEAM).share
        for name, share_id in (("a", "r"), ("b", "r"), ("c", None))
    ]
    assert [(share.id, share.weight, share.key) for share in shares] == [
        ("r", 1 / 16, TEAM.name),
        ("r", 1 / 16, TEAM.name),
        ("c", 1 / 16, TEAM.name),
    ]


@virtual_time.test
async def test_a_call_for_several_choices_is_charged_for_each_of_them() -> None:
    world = World([ServedPart(b"data", 200, "text/event-stream"), ServedPart(tokens=ServedTokens(20, 60))])
    async with aclosing(await world.calls.answer("chat/completions", BODY, "r", TEAM, choices=3)) as answer:
        # 20 tokens of the prompt and 3 times the 100 of the longest answer, of 60.
        assert world.wait_s() == 261
        assert [part async for part in answer.body] == [b"data"]
    [request] = world.server.requests
    assert (request.choices, world.wait_s()) == (3, 21)


@virtual_time.test
async def test_calls_of_a_routing_key_are_turns_of_one_party_until_it_is_silent_for_long() -> None:
    world = World([ServedPart(b"{}", 200, "application/json", ServedTokens(1, 1))])
    for key, caller in (("k", TEAM), ("k", TEAM), ("k", ANYBODY), (None, ANYBODY)):
        answer = await world.calls.answer("generate", BODY, "r", caller, routing_key=key)
        assert [part async for part in answer.body] == [b"{}"]
    first, second, other, own = (request.rollout_id for request in world.server.requests)
    assert first == second != other
    assert world.server.released == [own]
    await asyncio.sleep(FORGET_AFTER_S)
    assert sorted(world.server.released) == sorted([own, first, other])
