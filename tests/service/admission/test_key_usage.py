"""Quotas of keys: what a generation counts, and the tokens a minute that bound it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import GenerationLost
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    SamplingOptions,
    ScoredPrompt,
    ScoringRequest,
)
from deployments.protocols.replicas import GeneratorDescription
from service.access.keys import ANYBODY, Caller, KeyQuotas
from service.admission.admission import Admission
from service.admission.key_usage import LONGEST_NAP_S, KeyUsage, MeteredGenerator, TokenBudget
from service.settings import AdmissionSettings
from tests import virtual_time
from tests.virtual_time import now


def caller(tokens_per_minute: int | None = 600, name: str = "team") -> Caller:
    return Caller(name, frozenset({"rollout"}), quotas=KeyQuotas(tokens_per_minute=tokens_per_minute))


def usage_of(caller: Caller, ingress_replicas: int = 1) -> KeyUsage:
    usage = KeyUsage(str(caller.name), lambda: ingress_replicas, now, [])
    usage.set_quotas(caller.quotas)
    return usage


class TimedGenerator(MeteredGenerator):
    """Generates `tokens` tokens in `takes_s`, or raises; notes when each generation began."""

    def __init__(self, tokens: int = 10, takes_s: float = 0.0, failure: Exception | None = None) -> None:
        self.tokens, self.takes_s, self.failure = tokens, takes_s, failure
        self.began: list[float] = []
        self.released: list[str] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.began.append(now())
        await asyncio.sleep(self.takes_s)
        if self.failure is not None:
            raise self.failure
        if isinstance(request, ScoringRequest):
            return ScoredPrompt((), (), "length", weight_version="7")
        return Generation([1] * self.tokens, [0.0] * self.tokens, "stop")

    def is_generating(self, rollout_id: str) -> bool:
        return rollout_id == "running"

    def interrupt(self, rollout_id: str) -> bool:
        return rollout_id == "running"

    def release(self, rollout_id: str) -> None:
        self.released.append(rollout_id)

    async def describe(self) -> GeneratorDescription:
        return GeneratorDescription("tiny", 100, 262)


def request(prompt_tokens: int = 10, rollout: str = "r", max_new_tokens: int = 10) -> GenerationRequest:
    return GenerationRequest("g", [1] * prompt_tokens, max_new_tokens, (), SamplingOptions(), rollout_id=rollout)


def left(usage: KeyUsage) -> float:
    """Tokens that the key has at this moment."""
    assert usage._budget is not None
    usage.wait_s()
    return usage._budget._tokens


@virtual_time.test
async def test_each_token_of_a_rollout_counts_once() -> None:
    usage = usage_of(caller())
    generator = MeteredGenerator(TimedGenerator(tokens=10), usage)
    await generator.generate(request(prompt_tokens=30))
    assert left(usage) == 600 - 40
    await generator.generate(request(prompt_tokens=45))
    assert left(usage) == 600 - 55
    await generator.generate(request(prompt_tokens=30, rollout="other"))
    assert left(usage) == 600 - 95


@virtual_time.test
async def test_a_scored_sequence_counts_with_its_length() -> None:
    usage = usage_of(caller())
    asked = ScoringRequest("g", [1] * 70, 1, (), SamplingOptions(), rollout_id="s")
    await MeteredGenerator(TimedGenerator(), usage).generate(asked)
    assert (left(usage), usage.expected_tokens(1000)) == (530, 256)


@virtual_time.test
async def test_a_generation_that_fails_is_not_charged() -> None:
    usage = usage_of(caller())
    generator = MeteredGenerator(TimedGenerator(failure=GenerationLost("gone")), usage)
    for _ in range(3):
        with pytest.raises(GenerationLost):
            await generator.generate(request())
    assert left(usage) == 600


@virtual_time.test
async def test_a_generation_that_is_cancelled_keeps_the_charge_of_its_start() -> None:
    usage = usage_of(caller(tokens_per_minute=60_000))
    generator = MeteredGenerator(TimedGenerator(takes_s=100), usage)
    task = asyncio.create_task(generator.generate(request(prompt_tokens=30, max_new_tokens=20)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left(usage) == 60_000 - 50


@virtual_time.test
async def test_generations_beyond_the_quota_start_as_tokens_come() -> None:
    usage = usage_of(caller(tokens_per_minute=60))
    inner = TimedGenerator(tokens=10)
    generator = MeteredGenerator(inner, usage)
    requests = [request(prompt_tokens=20, rollout=f"{number}", max_new_tokens=10) for number in range(5)]
    await asyncio.gather(*(generator.generate(each) for each in requests))
    # 30 tokens each: two at once, and from then on the next when the last one is paid and a token is left.
    assert inner.began == pytest.approx([0, 0, 1, 31, 61])


@virtual_time.test
async def test_a_generation_that_waits_can_be_cancelled_and_lets_the_next_one_start() -> None:
    usage = usage_of(caller(tokens_per_minute=60))
    usage.charge(90)
    inner = TimedGenerator()
    generator = MeteredGenerator(inner, usage)
    waiting = [asyncio.create_task(generator.generate(request(rollout=f"{number}"))) for number in range(3)]
    await asyncio.sleep(10)
    for task in waiting[:2]:
        task.cancel()
    await waiting[2]
    assert inner.began == pytest.approx([31.0])
    assert left(usage) == pytest.approx(1 - 20)


@virtual_time.test
async def test_a_raised_quota_lets_those_go_on_that_wait() -> None:
    usage = usage_of(caller(tokens_per_minute=1))
    usage.charge(100)
    inner = TimedGenerator()
    task = asyncio.create_task(MeteredGenerator(inner, usage).generate(request()))
    await asyncio.sleep(10)
    usage.set_quotas(KeyQuotas())
    await task
    assert inner.began == [pytest.approx(10.0, abs=LONGEST_NAP_S)]


@virtual_time.test
async def test_requests_of_one_name_share_a_quota_and_those_of_others_have_their_own() -> None:
    admission = Admission(AdmissionSettings(), 100, now_s=now)
    assert admission.usage_of(ANYBODY) is None
    assert admission.usage_of(caller()) is admission.usage_of(caller())
    assert admission.usage_of(caller()) is not admission.usage_of(caller(name="other"))


@virtual_time.test
async def test_an_ingress_replica_grants_its_share() -> None:
    assert left(usage_of(caller(tokens_per_minute=603), ingress_replicas=4)) == 150
    assert left(usage_of(caller(tokens_per_minute=3), ingress_replicas=4)) == 1


@virtual_time.test
async def test_everything_else_is_the_generators() -> None:
    inner = TimedGenerator()
    generator = MeteredGenerator(inner, usage_of(caller()))
    assert [generator.is_generating(name) for name in ("running", "waiting")] == [True, False]
    assert [generator.interrupt(name) for name in ("running", "waiting")] == [True, False]
    generator.release("r")
    assert inner.released == ["r"]
    assert (await generator.describe()).model == "tiny"


def test_a_minutes_worth_is_there_at_the_start_and_no_more_is_saved_up() -> None:
    budget = TokenBudget(60, now=0.0)
    assert budget.wait_s(1000.0) == 0
    budget.charge(60, 1000.0)
    assert budget.wait_s(1000.0) == 1.0


def test_what_is_owed_is_waited_for() -> None:
    budget = TokenBudget(60, now=0.0)
    budget.charge(90, 0.0)
    assert budget.wait_s(0.0) == 31.0
    assert budget.wait_s(20.0) == 11.0
    assert budget.wait_s(31.0) == 0


def test_what_is_given_back_can_be_used_and_is_not_saved_up_beyond_a_minute() -> None:
    budget = TokenBudget(60, now=0.0)
    budget.charge(90, 0.0)
    budget.charge(-30, 0.0)
    assert budget.wait_s(0.0) == 1.0
    budget.charge(-1000, 0.0)
    budget.charge(60, 0.0)
    assert budget.wait_s(0.0) == 1.0


def test_a_changed_quota_forgives_nothing_that_is_owed() -> None:
    budget = TokenBudget(60, now=0.0)
    budget.charge(120, 0.0)
    budget.change(600, 0.0)
    assert budget.wait_s(0.0) == 6.1
    budget.change(30, 0.0)
    assert budget.wait_s(0.0) == 122.0


@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20_000)), max_size=50))
def test_no_more_is_used_than_the_quota_allows_and_one_charge(
    per_minute: int, steps: list[tuple[float, float]]
) -> None:
    budget, now, used, last = TokenBudget(per_minute, 0.0), 0.0, 0.0, 0.0
    for seconds, tokens in steps:
        now += seconds
        if budget.wait_s(now) == 0:
            budget.charge(tokens, now)
            used, last = used + tokens, tokens
            assert used - last <= per_minute * (1 + now / 60) * (1 + 1e-9)


@given(
    quota=st.integers(1, 6),
    replicas=st.integers(1, 4),
    runs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 9), st.booleans()), min_size=16),
)
def test_a_key_never_has_more_sandboxes_on_all_ingress_replicas_than_its_quota_and_all_runs_get_one(
    quota: int, replicas: int, runs: list[tuple[int, int, int, bool]]
) -> None:
    """Each run names an ingress replica, when it begins, how long it takes, and whether it fails."""
    held = most = done = 0

    async def play() -> None:
        mine = Caller("team", frozenset({"rollout"}), quotas=KeyQuotas(max_sandboxes=quota))
        usages = [usage_of(mine, replicas) for _ in range(replicas)]

        async def run(replica: int, begins_s: int, takes_s: int, fails: bool) -> None:
            nonlocal held, most, done
            await asyncio.sleep(begins_s)
            async with usages[replica % replicas].sandboxes:
                held += 1
                most = max(most, held)
                try:
                    await asyncio.sleep(takes_s)
                    if fails:
                        raise GenerationLost("lost")
                finally:
                    held -= 1
                    done += 1

        await asyncio.gather(*(run(*each) for each in runs), return_exceptions=True)

    virtual_time.run(play())
    # Below one sandbox for each ingress replica the quota could not be shared.
    assert most <= max(quota, replicas)
    assert (held, done) == (0, len(runs))
