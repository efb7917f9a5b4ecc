"""Games as agents: who sits where, what each player sees and is rewarded with, and how games fail."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.agents.environment import AgentRunsOfTask
from deployments.agents.game_program import GameProgram, GameTask, load_game
from deployments.agents.programs import AgentCall, AgentNotLoadable, RunNotes
from deployments.agents.settings import AgentSettings, GameSettings, Rival
from deployments.failures import AgentFailed, EnvironmentLost
from deployments.models import clients
from examples.nim import RULES
from tests.deployments.models.chat_server import Answer, ChatServer, chat_server, said

pytestmark = pytest.mark.slow

NIM = "examples.nim:Nim"
SERVED: dict[str, Any] = {"opponents": {"rival": 1}}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FIRST_PAUSE_S", 0.0)


def settings(**fields: Any) -> GameSettings:
    return GameSettings.model_validate({"import_path": NIM, "arguments": {"heaps": [1, 2]}, **fields})


def played(server: ChatServer, notes: RunNotes, info: dict[str, Any], **fields: Any) -> dict[str, float]:
    program = GameProgram(settings(**fields), own_url=lambda: server.url.removesuffix("/v1"))
    return asyncio.run(program.run(call_of(server, info), notes))


def call_of(server: ChatServer, info: dict[str, Any]) -> AgentCall:
    return AgentCall(
        base_url=f"{server.url.removesuffix('/v1')}/session",
        api_key="session-key",
        sample={"task_name": "nim", "idx": 0, "extra_env_info": {"seed": 0, **info}},
    )


def answers(*moves: str) -> Any:
    """Answers each chat completion with the next move, and each reward with nothing."""
    left = iter(moves)

    def answer(number: int, body: dict[str, Any]) -> Answer:
        if "messages" not in body:
            return Answer(body={})
        return Answer(body={**said(next(left)).body, "id": f"generation-{number}"})

    return answer


def test_both_seats_of_the_policy_are_conversations_with_their_own_rewards() -> None:
    notes = RunNotes()
    with chat_server(answers("take 1 from A", "take 1 from B", "take 1 from B")) as server:
        assert played(server, notes, {}) == {}
    first, second, third, *rewards = server.requests
    assert {request["path"] for request in (first, second, third)} == {"/session/v1/chat/completions"}
    assert {headers["authorization"] for headers in server.headers} == {"Bearer session-key"}
    assert first["messages"] == [{"role": "user", "content": f"{RULES}\nHeaps: A 1, B 2. Your move."}]
    assert second["messages"] == [
        {"role": "user", "content": f"{RULES}\nThe other player took 1 from A.\nHeaps: A 0, B 2. Your move."}
    ]
    assert third["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "take 1 from A"},
        {"role": "user", "content": "The other player took 1 from B.\nHeaps: A 0, B 1. Your move."},
    ]
    assert rewards == [
        {"path": "/session/reward", "rewards": {"seat_0": 1.0}, "generation_id": "generation-2"},
        {"path": "/session/reward", "rewards": {"seat_1": -1.0}, "generation_id": "generation-1"},
    ]
    assert notes.metrics == {"moves": 3, "seat_0_reward": 1.0, "seat_1_reward": -1.0}


def test_another_model_plays_beside_the_session_and_its_tokens_are_counted() -> None:
    notes = RunNotes()
    with chat_server(answers("take 1 from A", "take 2 from B")) as server:
        played(server, notes, {"seats": {"1": "policy"}}, models={"rival": {"policy": "champion"}}, **SERVED)
    rival, policy, reward = server.requests
    assert (rival["path"], policy["path"]) == ("/v1/chat/completions?policy=champion", "/session/v1/chat/completions")
    assert reward["rewards"] == {"seat_1": 1.0}
    assert {name: value for name, value in notes.metrics.items() if not name.endswith("_seconds")} == {
        "moves": 2,
        "seat_0_reward": -1.0,
        "seat_1_reward": 1.0,
        "opponent_calls": 1,
        "opponent_prompt_tokens": 7,
        "opponent_completion_tokens": 3,
    }


def test_no_move_spells_a_control_token_to_another_player() -> None:
    moves = "[GAME] [A C] [0] <|im_end|> [INST] [/INST] [TOOL_CALLS] [gMASK]"
    for other in ("policy", "rival"):
        with chat_server(answers(moves, "[B]")) as server:
            echo = {"import_path": f"{__name__}:Echo", "arguments": {}, "models": {"rival": {}}}
            played(server, RunNotes(), {"seats": {"0": "policy", "1": other}}, **echo)
        [told] = server.requests[1]["messages"]
        assert told["content"] == (
            r"[GAME] [A C] [0] \u003c|im_end|> \u005bINST] \u005b/INST] \u005bTOOL_CALLS] \u005bgMASK]"
        )


class Echo:
    """Two players hear each other, once each."""

    def __init__(self, seed: int) -> None:
        self._said = ["Speak."]

    def turn(self) -> tuple[int, str] | None:
        return (len(self._said) - 1, self._said[-1]) if len(self._said) < 3 else None

    def move(self, text: str) -> None:
        self._said.append(text)

    def rewards(self) -> Mapping[int, float]:
        return {0: 0.0, 1: 0.0}


def test_a_sample_may_name_another_policy_of_this_service_and_its_version() -> None:
    with chat_server(answers("take 1 from A", "take 2 from B")) as server:
        seats = {"0": "policy", "1": {"policy": "run-b", "version": 3}}
        played(server, RunNotes(), {"seats": seats}, rivals={"parameters": {"temperature": 0}})
    assert server.requests[1]["path"] == "/v1/chat/completions?policy=run-b&version=3"
    assert server.requests[1]["temperature"] == 0


def test_a_game_without_a_seat_of_the_policy_fails() -> None:
    with chat_server(answers()) as server, pytest.raises(AgentFailed, match=r"leave one out of extra_env_info\.seats"):
        played(server, RunNotes(), {"seats": {"0": {}, "1": {}}})


@pytest.mark.parametrize(("status", "failure"), [(503, EnvironmentLost), (400, AgentFailed)])
def test_a_player_that_is_silent_fails_the_game_and_nobody_loses_it(status: int, failure: type[Exception]) -> None:
    refused = Answer(status=status, body={"error": "no"})
    with chat_server(lambda *_: refused) as server:
        with pytest.raises(failure, match=f"The session answered {status}"):
            played(server, RunNotes(), {"seats": {"0": "policy"}})
        with pytest.raises(failure, match="does not answer"):
            played(server, RunNotes(), {"seats": {"1": "policy"}}, models={"rival": {"retries": 1}}, **SERVED)
    assert not any("rewards" in request for request in server.requests)


def test_what_a_game_was_is_in_the_metrics_of_the_run() -> None:
    with chat_server(answers("take 1 from A", "take 2 from B")) as server:
        outcome = asyncio.run(AgentRunsOfTask(AgentSettings(game=settings())).step([], call_of(server, {})))
    assert (outcome.reward, (outcome.metrics or {})["moves"]) == ({}, 2)


@given(st.integers(min_value=0, max_value=2**31 - 1), st.integers(min_value=1, max_value=6))
def test_one_seat_is_the_policys_and_equal_seeds_have_equal_players(seed: int, seats: int) -> None:
    game = settings(seats=seats, models={"a": {}, "b": {}}, opponents={"a": 1, "b": 2})
    seated = game.seated(seed, {})
    assert seated == game.seated(seed, {})
    assert (seated.count("policy"), seated.index("policy")) == (1, seed % seats)
    assert {*seated} <= {"policy", "a", "b"}


def test_opponents_are_drawn_by_their_weights_and_named_seats_stay() -> None:
    game = settings(models={"a": {}, "b": {}}, opponents={"a": 1, "b": 3})
    drawn = Counter(seat for seed in range(1000) for seat in game.seated(seed, {}) if seat != "policy")
    assert 700 < drawn["b"] < 800
    assert game.seated(0, {0: Rival(policy="c")}) == [Rival(policy="c"), "policy"]
    assert settings().seated(0, {}) == ["policy", "policy"]


def test_samples_are_checked_for_seats_and_players_that_there_are() -> None:
    fields = settings(models={"a": {}}).extra_env_info()
    fields.model_validate({"seed": 1, "seats": {"0": "policy", "1": "a"}})
    for wrong in ({"2": "a"}, {"0": "b"}, {"0": {"policies": "x"}}):
        with pytest.raises(ValidationError):
            fields.model_validate({"seed": 1, "seats": wrong})
    first, second = GameTask(settings()).example_samples(2, 0)
    assert second["extra_env_info"]["seed"] == first["extra_env_info"]["seed"] + 1


@pytest.mark.parametrize(
    ("fields", "refusal", "says"),
    [
        ({"opponents": {"a": 1}}, ValidationError, "opponents: there is no a under models"),
        ({"models": {"policy": {}}}, ValidationError, "choose another name"),
        ({"opponents": {"policy": 0}}, ValidationError, "greater than 0"),
        ({"import_path": "no_such:game"}, AgentNotLoadable, "no_such:game makes no game: ModuleNotFoundError"),
        ({"arguments": {"heap": 1}}, AgentNotLoadable, "makes no game: TypeError"),
        ({"arguments": {"heaps": [0]}}, AgentNotLoadable, r"makes no game: ValueError: heaps"),
    ],
)
def test_what_is_no_game_is_refused_before_a_start(fields: dict[str, Any], refusal: type[Exception], says: str) -> None:
    with pytest.raises(refusal, match=says):
        load_game(settings(**fields))


def test_a_game_is_scored_by_itself() -> None:
    game = {"import_path": NIM}
    assert AgentSettings.model_validate({"game": game}).scored_by == "agent"
    with pytest.raises(ValidationError, match="say the reward: leave scored_by out"):
        AgentSettings.model_validate({"game": game, "scored_by": "environment"})
