"""Games whose requests break: with what they are posted again, and what is counted. The client is scripted."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from rollout_client import SampleInput, SampleResult
from rollout_client.contract.messages import PromptMessage
from rollout_client.errors import StreamBroken
from tests.clients.message_logs import ONE_TURN, TWO_TURNS
from tests.endurance.chaos.games import Games, Outcome

PROMPT = PromptMessage(role="user", content="Slide.")
GAMES = [SampleInput(task_name="sliding_puzzle", messages=[PROMPT]) for _ in range(2)]


class ScriptedStream:
    def __init__(self, rollouts: Iterable[tuple[int, SampleResult]], breaks: bool) -> None:
        self._rollouts, self._breaks = rollouts, breaks

    async def with_positions(self) -> AsyncIterator[tuple[int, SampleResult]]:
        for positioned in self._rollouts:
            yield positioned
        if self._breaks:
            raise StreamBroken("It broke.")


class ScriptedClient:
    """Each stream brings the next of `scripts`; all but the last one break."""

    def __init__(self, *scripts: list[tuple[int, SampleResult]]) -> None:
        self._scripts = list(scripts)
        self.keys: list[str] = []
        self.posted: list[int] = []

    @asynccontextmanager
    async def stream(self, games: list[SampleInput], **options: Any) -> AsyncIterator[ScriptedStream]:
        self.keys.append(options["idempotency_key"])
        self.posted.append(len(games))
        script = self._scripts.pop(0)
        yield ScriptedStream(script, breaks=bool(self._scripts))


def played(client: ScriptedClient) -> Outcome:
    return asyncio.run(Games(client, GAMES).play())  # type: ignore[arg-type]


def test_a_request_whose_stream_broke_is_posted_again_whole_with_its_key() -> None:
    client = ScriptedClient([(0, ONE_TURN)], [(0, ONE_TURN), (1, TWO_TURNS)])
    outcome = played(client)
    assert client.keys == [client.keys[0]] * 2
    assert client.posted == [2, 2]
    assert outcome.results == {0: ONE_TURN, 1: TWO_TURNS}
    assert (outcome.posted_again, outcome.twice, outcome.errors) == (1, 0, [])


def test_a_rollout_that_comes_twice_in_one_stream_is_counted() -> None:
    assert played(ScriptedClient([(0, ONE_TURN), (0, ONE_TURN), (1, TWO_TURNS)])).twice == 1


def test_a_rollout_that_comes_back_as_another_one_is_an_error() -> None:
    outcome = played(ScriptedClient([(0, ONE_TURN)], [(0, TWO_TURNS), (1, TWO_TURNS)]))
    assert outcome.errors == ["game 0 had another result when its request was posted again"]
