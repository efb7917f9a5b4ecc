"""The bridge to Gymnasium, over its own text environments."""

import asyncio
import sys
from io import BytesIO
from typing import Any

import gymnasium
import numpy
import pytest
from PIL import Image

from deployments.environments.step_runner import StepRunner
from deployments.images.book import ImagesSettings
from deployments.images.checks import ObservedImages
from deployments.protocols.environments import StepRequest
from deployments.tasks.bridges.gymnasium import GymnasiumEnvironment, _GymnasiumInfo, _plain_text
from deployments.tasks.replies import last_tagged
from rollout_env import SampleRejected, check, play
from rollout_env.loading import EnvironmentNotLoadable, checked_arguments
from tests.fakes.image_store import ImagesInProcess

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


def test_a_hole_ends_the_episode_without_a_reward() -> None:
    played = play(lake(), moves(["down", "right", "up"]), {"extra_env_info": {"seed": 0}})
    assert (played.total_reward, played.terminated, len(played.unused_replies)) == (0.0, True, 1)


@pytest.mark.parametrize(
    "reply", ["down", "<action>jump</action>", "<action>1</action>", "<think><action>down</action></think>", ""]
)
def test_a_reply_without_a_legal_action_changes_nothing_and_is_told_so(reply: str) -> None:
    played = play(lake(), [reply, *moves(PATH)], {"extra_env_info": {"seed": 0}})
    assert played.message_log[2]["content"] == "There was no legal action.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert played.total_reward == 1.0


@pytest.mark.parametrize(
    ("env_id", "kwargs", "actions"),
    [
        ("FrozenLake-v1", {"is_slippery": True}, ["0", "1", "2", "3"]),
        ("Taxi-v4", {}, ["0", "1", "2", "3", "4", "5"]),
        ("CliffWalking-v1", {"is_slippery": True}, ["0", "1", "2", "3"]),
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


def test_an_observation_without_a_rendering_is_shown_as_text() -> None:
    [sample] = GymnasiumEnvironment("Blackjack-v1").example_samples(1, seed=3)
    env = gymnasium.make("Blackjack-v1")
    observation, _ = env.reset(seed=sample["extra_env_info"]["seed"])
    shown = play(GymnasiumEnvironment("Blackjack-v1"), [], sample).message_log[0]["content"]
    assert shown == f"Answer with <action>NAME</action>. The actions are: 0, 1.\n\n{observation}"


def test_a_session_that_is_opened_again_stands_where_the_first_stood_also_after_examples_in_the_prompt() -> None:
    environment = GymnasiumEnvironment("FrozenLake-v1", actions=DIRECTIONS)
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


def test_pictures_are_those_that_the_environment_renders_after_the_same_actions() -> None:
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


def test_the_image_store_keeps_the_pictures_of_observations_by_name() -> None:
    images = ImagesInProcess()

    async def start_and_step() -> list[Any]:
        runner = StepRunner(lake(observation="image"), "lake", 60, ObservedImages(images, ImagesSettings()))
        log: Any = [{"role": "assistant", "content": moves(["down"])[0]}]
        step = StepRequest(log, {"seed": 0}, step_id="b", owner="ann", session_id="s", turn=0)
        start = StepRequest([], {"seed": 0}, step_id="a", owner="ann", is_start=True)
        outcomes = [await runner.start(request, set()) for request in (start, step)]
        await runner.close()
        return outcomes

    start, step = asyncio.run(start_and_step())
    names = [*start.observation[0]["images"], *step.observation["images"]]
    assert images.puts == [[name] for name in names]
    env = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="rgb_array")
    env.reset(seed=0)
    for name in names:
        assert numpy.array_equal(pixels(asyncio.run(images.get(name))), env.render())
        env.step(1)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"])
def test_environments_without_a_text_are_played_in_pictures_too(env_id: str) -> None:
    environment = GymnasiumEnvironment(env_id, observation="image")
    played = play(environment, moves(["0", "1"]), {"extra_env_info": {"seed": 7}})
    env = gymnasium.make(env_id, render_mode="rgb_array")
    env.reset(seed=7)
    for action, outcome in zip((0, 1), played.outcomes, strict=False):
        env.step(action)
        message: Any = outcome.observation
        assert numpy.array_equal(pixels(message["images"][0]), env.render())


def test_a_session_that_is_opened_again_shows_the_picture_that_the_first_would_have_shown() -> None:
    environment = GymnasiumEnvironment("FrozenLake-v1", actions=DIRECTIONS, observation="image")
    played = play(environment, moves(["down", "left", "down"]), {"extra_env_info": {"seed": 5}})
    info = _GymnasiumInfo.model_validate(played.extra_env_info)
    session = environment.open_session(played.message_log[:5], info)
    assert session.step(played.message_log[:6], info) == played.outcomes[2]
    session.close()


class Pictureless(gymnasium.Env):  # type: ignore[misc]  # the package is not there where types are checked
    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(5)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "dark", {}

    def render(self) -> Any:
        return numpy.zeros((4, 4, 3), numpy.float64)


def test_what_has_no_picture_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium.register("Pictureless-v0", entry_point=Pictureless)
    with pytest.raises(TypeError, match="Cannot handle this data type"):
        GymnasiumEnvironment("Pictureless-v0", observation="image")
    monkeypatch.setattr(Pictureless, "metadata", {"render_modes": ["ansi"]})
    with pytest.raises(ValueError, match=r"Pictureless-v0 has no rendering as image \(rgb_array\) but \['ansi'\]"):
        GymnasiumEnvironment("Pictureless-v0", observation="image")
    with pytest.raises(EnvironmentNotLoadable, match="observation: Input should be 'text' or 'image'"):
        checked_arguments(GymnasiumEnvironment, {"env_id": "FrozenLake-v1", "observation": "picture"}, "lake")
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match="pygame is not installed"):
        lake(observation="image")


def test_a_text_action_goes_to_the_environment_as_it_is() -> None:
    class Echo(gymnasium.Env):  # type: ignore[misc]  # the package is not there where types are checked
        observation_space = gymnasium.spaces.Text(20)
        action_space = gymnasium.spaces.Text(5)

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            return f"Say {seed}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return action.upper(), 0.5, False, False, {}

    gymnasium.register("Echo-v0", entry_point=Echo)
    played = play(GymnasiumEnvironment("Echo-v0"), moves(["abc", "too long"]), {"extra_env_info": {"seed": 4}})
    texts = [message["content"] for message in played.message_log[::2]]
    assert texts == ["Answer with <action>...</action>.\n\nSay 4", "ABC", "There was no legal action.\nABC"]


def test_an_episode_that_is_over_takes_no_step() -> None:
    environment = lake()
    info = _GymnasiumInfo(seed=0)
    session = environment.open_session([], info)
    for reply in moves(["down", "right"]):
        session.step([{"role": "assistant", "content": reply}], info)
    with pytest.raises(SampleRejected, match="The game is over"):
        session.step([{"role": "assistant", "content": "again"}], info)


def test_colours_are_told_in_words() -> None:
    assert _plain_text("|\x1b[35mR\x1b[0m: \x1b[43m \x1b[0m|\x1b[34;1mB\x1b[0m\n\n") == "|(R magenta): [ ]|(B blue)"
    assert last_tagged("<action>a</action><action> b </action>", "action") == "b"


def test_it_keeps_the_rules_for_environments() -> None:
    check(lake, replies=moves(PATH), samples=2, max_block_s=30)
    check(lambda: lake(observation="image"), replies=moves(PATH), samples=2, max_block_s=30)
    check(lambda: GymnasiumEnvironment("Taxi-v4"), replies=moves(["0", "1", "4"]), samples=2, max_block_s=30)
