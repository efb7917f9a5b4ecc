"""Conversations are scored in batches of similar length; one that cannot be scored fails alone."""

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import EnvironmentLost
from deployments.models.clients import RemoteRewardModel
from deployments.models.reward_replica import RewardModelReplica, _batches
from deployments.models.settings import RewardModelSettings
from deployments.rpc import batching
from rollout_env import ChatMessage, ModelRefused, ModelUnavailable

pytestmark = pytest.mark.true_clock


class LengthScorer:
    """Scores by length. Waits where a test says so; raises for a conversation with `bad` in it."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        text = messages[-1]["content"]
        if text == "bad":
            raise LookupError("no template")
        return [0] * len(text)

    def scores(self, conversations: Sequence[Sequence[int]]) -> list[float]:
        self.batches.append([list(ids) for ids in conversations])
        assert self.go_on.wait(60)
        return [math.nan if len(ids) == 13 else float(len(ids)) for ids in conversations]


def said(text: str) -> list[ChatMessage]:
    return [{"role": "assistant", "content": text}]


def replica(scorer: LengthScorer, **fields: Any) -> RewardModelReplica:
    return RewardModelReplica(RewardModelSettings(model="m", **fields), scorer)


class Handle:
    """Calls a replica of the same process, as a handle of its deployment would."""

    def __init__(self, called: Any) -> None:
        self.calls: list[int] = []
        self._called = called
        self.score = self

    def remote(self, conversations: list[Any]) -> Any:
        self.calls.append(len(conversations))
        return asyncio.ensure_future(self._called(conversations))


async def test_what_comes_while_the_model_works_is_scored_together() -> None:
    scorer = LengthScorer()
    scorer.go_on.clear()
    scored = replica(scorer)
    first = asyncio.create_task(scored.score([said("a")]))
    while not scorer.batches:
        await asyncio.sleep(0)
    others = [asyncio.create_task(scored.score([said("b" * length)])) for length in (2, 3, 4)]
    await asyncio.sleep(0)
    scorer.go_on.set()
    assert await asyncio.gather(first, *others) == [[1.0], [2.0], [3.0], [4.0]]
    assert [len(batch) for batch in scorer.batches] == [1, 3]


async def test_a_conversation_that_cannot_be_scored_fails_alone() -> None:
    model = RemoteRewardModel("helpful", Handle(replica(LengthScorer()).score))
    results = await asyncio.gather(
        *(model.score(said(text)) for text in ("aa", "bad", "x" * 13, "cccc")), return_exceptions=True
    )
    assert (results[0], results[3]) == (2.0, 4.0)
    assert isinstance(results[1], ModelRefused)
    assert str(results[1]) == "The reward model helpful cannot score this: LookupError: no template."
    assert isinstance(results[2], ModelRefused)
    assert "the score is nan" in str(results[2])


async def test_conversations_of_one_iteration_travel_in_one_call() -> None:
    handle = Handle(replica(LengthScorer()).score)
    model = RemoteRewardModel("helpful", handle)
    assert await asyncio.gather(*(model.score(said("a" * length)) for length in range(1, 7))) == [1, 2, 3, 4, 5, 6]
    assert handle.calls == [6]


async def test_conversations_too_large_together_travel_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MOST_BYTES_PER_MESSAGE", 1200)

    handle = Handle(replica(LengthScorer()).score)
    model = RemoteRewardModel("helpful", handle)
    # Each takes about 200 bytes and the JSON of its message.
    await asyncio.gather(*(model.score([*said("a"), *said("b" * 200)]) for _ in range(5)), return_exceptions=True)
    assert handle.calls == [2, 2, 1]


@pytest.mark.parametrize("error", [EnvironmentLost("The reward model died during the call."), RuntimeError("CUDA")])
async def test_a_call_that_breaks_is_a_failure_that_may_pass(error: Exception) -> None:
    async def fail(_: list[Any]) -> list[Any]:
        raise error

    with pytest.raises(ModelUnavailable, match=str(error)):
        await RemoteRewardModel("helpful", Handle(fail)).score(said("a"))


async def test_a_score_that_nobody_waits_for_any_longer_is_dropped() -> None:
    scorer = LengthScorer()
    model = RemoteRewardModel("helpful", Handle(replica(scorer).score))
    kept, dropped = (asyncio.create_task(model.score(said(text))) for text in ("a", "bb"))
    await asyncio.sleep(0)
    dropped.cancel()
    assert await kept == 1.0
    assert scorer.batches == [[[0]]]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100))
def test_each_item_is_in_one_batch_that_is_no_larger_than_permitted(lengths: list[int], most_tokens: int) -> None:
    made = list(_batches(lengths, most_tokens))
    assert sorted(place for batch in made for place in batch) == list(range(len(lengths)))
    for batch in made:
        assert batch
        assert len(batch) * max(lengths[place] for place in batch) <= most_tokens or len(batch) == 1
    ordered = [lengths[place] for batch in made for place in batch]
    assert ordered == sorted(ordered)


def test_items_of_similar_length_go_together() -> None:
    assert list(_batches([9, 1, 8, 2], 18)) == [[1, 3], [2, 0]]
    assert list(_batches([3, 3, 3, 50], 9)) == [[0, 1, 2], [3]]
