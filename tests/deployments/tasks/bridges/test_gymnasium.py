"""The bridge to Gymnasium, over its own text environments."""

import sys
from io import BytesIO
from typing import Any, Literal

import gymnasium
import numpy
import pytest
from PIL import Image

from deployments.tasks.bridges.gymnasium import GymnasiumEnvironment, _GymnasiumInfo
from rollout_env import check, play
from rollout_env.loading import EnvironmentNotLoadable, checked_arguments

DIRECTIONS = ["left", "down", "right", "up"]
PATH = ["down", "down", "right", "right", "down", "right"]
"""To the goal of the default map, where the ice is not slippery."""


def lake(**arguments: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment("FrozenLake-v1", kwargs={"is_slippery": False}, actions=DIRECTIONS, **arguments)


def moves(names: list[str]) -> list[str]:
    return [f"I go <action>{name}</action>" for name in names]


def test_an_episode_is_played_to_its_goal() -> None:
    played = play(lake(), moves(PATH), {"extra_env_info": {"seed": 0}})
    assert played.message_log[0]["content"] == (
        "Answer with <action>NAME</action>. The actions are: left, down, right, up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    )
    assert played.message_log[2]["content"] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert (played.total_reward, played.terminated, played.answers) == (1.0, True, PATH)


@pytest.mark.parametrize("reply", ["down", "<action>jump</action>", "<think><action>down</action></think>"])
def test_a_reply_without_a_legal_action_changes_nothing_and_is_told_so(reply: str) -> None:
    played = play(lake(), [reply, *moves(PATH)], {"extra_env_info": {"seed": 0}})
    assert played.message_log[2]["content"] == "There was no legal action.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert played.total_reward == 1.0


@pytest.mark.parametrize(
    ("env_id", "kwargs", "actions"),
    [
        ("FrozenLake-v1", {"is_slippery": True}, ["0", "1", "2", "3"]),
        ("Taxi-v4", {}, ["0", "1", "2", "3", "4", "5"]),
        ("Blackjack-v1", {}, ["1", "0"]),
    ],
)
def test_rewards_are_those_of_the_library_for_the_same_seed_and_actions(
    env_id: str, kwargs: dict[str, Any], actions: list[str]
) -> None:
    names = (actions * 5)[:20]
    env = gymnasium.make(env_id, **kwargs)
    env.reset(seed=7)
    expected, over = [], False
    for name in names:
        _, reward, terminated, truncated, _ = env.step(int(name))
        expected.append(float(reward))
        if over := terminated or truncated:
            break
    played = play(GymnasiumEnvironment(env_id, kwargs=kwargs), moves(names), {"extra_env_info": {"seed": 7}})
    assert [outcome.reward for outcome in played.outcomes] == expected
    assert played.terminated == over


@pytest.mark.parametrize("observation", ["text", "image"])
def test_a_session_that_is_opened_again_stands_where_the_first_stood(observation: Literal["text", "image"]) -> None:
    """Also after examples in the prompt."""
    environment = GymnasiumEnvironment("FrozenLake-v1", actions=DIRECTIONS, observation=observation)
    examples: Any = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": moves(["right"])[0]}]
    sample = {"messages": examples, "extra_env_info": {"seed": 5}}
    played = play(environment, moves(["down", "left", "down"]), sample)
    log, info = played.message_log, _GymnasiumInfo.model_validate(played.extra_env_info)
    assert info.prompt_messages == 2
    for turn in range(3):
        session = environment.open_session(log[: 3 + 2 * turn], info)
        outcome = session.step(log[: 4 + 2 * turn], info)
        session.close()
        assert outcome == played.outcomes[turn]


def test_what_is_not_text_and_wrong_names_are_refused() -> None:
    with pytest.raises(ValueError, match="CartPole-v1 has no rendering as text"):
        GymnasiumEnvironment("CartPole-v1")
    with pytest.raises(ValueError, match="actions must be 4 different names, got"):
        GymnasiumEnvironment("FrozenLake-v1", actions=["up", "Up", "down", "left"])


def pixels(file: Any) -> Any:
    return numpy.asarray(Image.open(BytesIO(file)))


def test_pictures_are_those_that_the_environment_renders() -> None:
    env = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="rgb_array")
    env.reset(seed=0)
    first = env.render()
    env.step(1)
    played = play(lake(observation="image"), [*moves(["down"]), "left"], {"extra_env_info": {"seed": 0}})
    seen: list[Any] = [outcome.observation for outcome in played.outcomes]
    assert [message["content"] for message in seen] == ["", "There was no legal action."]
    for message in seen:
        [picture] = message["images"]
        assert numpy.array_equal(pixels(picture), env.render())
    start: Any = lake(observation="image").start([], _GymnasiumInfo(seed=0)).observation
    assert numpy.array_equal(pixels(start["images"][0]), first)
    assert not numpy.array_equal(first, env.render())
    assert start["content"] == "Answer with <action>NAME</action>. The actions are: left, down, right, up."


def test_what_has_no_picture_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentNotLoadable, match="observation: Input should be 'text' or 'image'"):
        checked_arguments(GymnasiumEnvironment, {"env_id": "FrozenLake-v1", "observation": "picture"}, "lake")
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match="pygame is not installed"):
        lake(observation="image")


def test_a_text_action_goes_to_the_environment_as_it_is() -> None:
    class Echo(gymnasium.Env):  # type: ignore[misc]  # the package is not there where types are checked
        observation_space = gymnasium.spaces.Text(20)
        action_space = gymnasium.spaces.Text(5)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            return f"Say {seed}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return action.upper(), 0.5, False, False, {}

    gymnasium.register("Echo-v0", entry_point=Echo)
    played = play(GymnasiumEnvironment("Echo-v0"), moves(["abc", "too long"]), {"extra_env_info": {"seed": 4}})
    texts = [message["content"] for message in played.message_log[::2]]
    assert texts == ["Answer with <action>...</action>.\n\nSay 4", "ABC", "There was no legal action.\nABC"]


def test_it_keeps_the_rules_for_environments() -> None:
    check(lake, replies=moves(PATH), samples=2, max_block_s=30)
    check(lambda: GymnasiumEnvironment("Taxi-v4"), replies=moves(["0", "1", "4"]), samples=2, max_block_s=30)
