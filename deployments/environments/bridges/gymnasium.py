"""Environments of Gymnasium that are played in text: a rendering as text or a text observation, and actions by name."""

import importlib
import json
import random
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from deployments.environments.bridges.support import imported
from deployments.environments.replies import last_tagged, text_outcome
from rollout_env import (
    ChatMessage,
    LostSession,
    SampleRejected,
    Session,
    StartOutcome,
    StepOutcome,
    TaskEnvironment,
    reply_text,
)

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLOURED = re.compile(r"\x1b\[([0-9;]{0,40})m(.*?)(?:\x1b\[0m|\Z)", re.DOTALL)
NO_ACTION = "There was no legal action."


class GymnasiumInfo(BaseModel):
    """The `extra_env_info` of an episode; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    seed: int = Field(ge=0, lt=2**31)
    """The seed of `reset`."""
    options: dict[str, Any] | None = None
    """The options of `reset`."""
    prompt_messages: int = Field(default=0, ge=0)
    """Messages of the prompt before the first observation; set by the start."""


class GymnasiumEnvironment(TaskEnvironment):
    """The model answers with `<action>NAME</action>`. Rewards are Gymnasium's; truncation ends the rollout too."""

    ExtraEnvInfo: ClassVar[type[BaseModel]] = GymnasiumInfo

    def __init__(
        self,
        env_id: str,
        kwargs: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        instruction: str | None = None,
        modules: Sequence[str] = (),
        lost_session: LostSession = "reopen",
        max_sessions: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        """Makes the environment once, to see that it can be played.

        Args:
            env_id: as in `gymnasium.make`.
            kwargs: of `gymnasium.make`.
            actions: names of the actions of a discrete space, in their order; by default their numbers.
            instruction: how to answer, before the first observation; by default it names the actions.
            modules: imported first, because they register the environment.
            lost_session: `reopen` makes all actions so far again, which needs an environment that only its seed makes
                random; `restart` for any other.
            max_sessions: how many episodes one replica holds at once.

        Raises:
            PackageMissing: Gymnasium is not installed.
            ValueError: the environment has no text, or `actions` does not fit its actions.
        """
        self._gymnasium = imported("gymnasium", "gymnasium")
        for module in modules:
            importlib.import_module(module)
        self.env_id = env_id
        self.kwargs = {**(kwargs or {}), **self._text_rendering(kwargs or {})}
        self.lost_session = lost_session
        self.max_sessions = max_sessions
        env = self.made()
        try:
            self.actions = action_names(env.action_space, actions)
        finally:
            env.close()
        self.instruction = instruction_of(self.actions) if instruction is None else instruction
        self.description = f"{env_id} of Gymnasium, played in text."  # type: ignore[misc]

    def made(self) -> Any:
        return self._gymnasium.make(self.env_id, **self.kwargs)

    def start(self, message_log: list[ChatMessage], extra_env_info: GymnasiumInfo) -> StartOutcome:
        """Adds the instruction and the first observation."""
        episode = GymnasiumEpisode(self, extra_env_info)
        episode.close()
        text = "\n\n".join(filter(None, (self.instruction, episode.text)))
        state = {**extra_env_info.model_dump(), "prompt_messages": len(message_log)}
        return StartOutcome(observation={"role": "user", "content": text}, metadata=state)

    def open_session(self, message_log: list[ChatMessage], extra_env_info: GymnasiumInfo) -> Session:
        """Resets an environment, and makes the actions that the log has already."""
        episode = GymnasiumEpisode(self, extra_env_info)
        for message in message_log[extra_env_info.prompt_messages :]:
            if message["role"] == "assistant":
                episode.play(reply_text(message))
        return episode

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        first = random.Random(seed).randrange(2**30)
        return [{"extra_env_info": {"seed": first + number}} for number in range(count)]

    def _text_rendering(self, kwargs: dict[str, Any]) -> dict[str, str]:
        """The rendering as text, where the environment has one. Raises `ValueError` if it has no text at all."""
        env = self._gymnasium.make(self.env_id, **kwargs)
        try:
            if "ansi" in env.metadata.get("render_modes", []):
                return {"render_mode": "ansi"}
            spaces = self._gymnasium.spaces
            if isinstance(env.observation_space, spaces.Box | spaces.Dict | spaces.Graph):
                raise ValueError(
                    f"{self.env_id} has neither a rendering as text nor observations that are short as text"
                )
        finally:
            env.close()
        return {}


class GymnasiumEpisode(Session):
    """One environment of Gymnasium, from its reset on."""

    def __init__(self, task: GymnasiumEnvironment, info: GymnasiumInfo) -> None:
        self._actions = task.actions
        self._env = task.made()
        observation, _ = self._env.reset(seed=info.seed, options=info.options)
        self.text = self._text_of(observation)
        self._is_over = False

    def step(self, message_log: list[ChatMessage], extra_env_info: GymnasiumInfo) -> StepOutcome:  # noqa: ARG002
        """Makes the action of the reply.

        Raises:
            SampleRejected: the episode is over.
        """
        if self._is_over:
            raise SampleRejected("The episode is over.")
        return self.play(reply_text(message_log[-1]))

    def play(self, reply: str) -> StepOutcome:
        named = last_tagged(reply, "action")
        action = None if named is None else action_of(named, self._actions, self._env.action_space)
        if action is None:
            return text_outcome(f"{NO_ACTION}\n{self.text}", answer=named)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self.text = self._text_of(observation)
        self._is_over = bool(terminated or truncated)
        return text_outcome(self.text, float(reward), self._is_over, answer=named)

    def close(self) -> None:
        self._env.close()

    def _text_of(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._env.render_mode == "ansi":
            return plain_text(self._env.render())
        return str(observation)


def action_names(space: Any, names: list[str] | None) -> list[str] | None:
    """The names of the actions of a discrete space; `None` for another space.

    Raises:
        ValueError: `names` are not as many as there are actions, or two of them are equal.
    """
    if type(space).__name__ != "Discrete":
        if names is not None:
            raise ValueError(f"actions are names for a discrete action space, and this one is {space}")
        return None
    numbers = [str(space.start + place) for place in range(space.n)]
    if names is None:
        return numbers
    if len(names) != len(numbers) or len({name.lower() for name in names}) != len(names):
        raise ValueError(f"actions must be {len(numbers)} different names, got {names}")
    return names


def instruction_of(actions: list[str] | None) -> str:
    if actions is None:
        return "Answer with <action>...</action>."
    return f"Answer with <action>NAME</action>. The actions are: {', '.join(actions)}."


def action_of(named: str, actions: list[str] | None, space: Any) -> Any:
    """The action of this name; `None` if there is none in the space."""
    if actions is not None:
        names = [name.lower() for name in actions]
        return space.start + names.index(named.lower()) if named.lower() in names else None
    if type(space).__name__ == "Text":
        return named if space.contains(named) else None
    try:
        action = space.from_jsonable([json.loads(named)])[0]
        return action if space.contains(action) else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def plain_text(rendered: str) -> str:
    """A rendering without escape sequences: square brackets around what is highlighted, colours in words."""
    return COLOURED.sub(described, rendered).strip("\n")


def described(coloured: "re.Match[str]") -> str:
    codes = [int(code) for code in coloured[1].split(";") if code]
    text = coloured[2]
    for code in codes:
        if 30 <= code < 38:
            text = f"({text} {COLOURS[code - 30]})"
        elif 40 <= code < 48:
            text = f"[{text}]"
    return text
