"""Environments of Gymnasium that are played in text or in pictures, by the names of their actions."""

import json
import re
from contextlib import closing
from typing import Annotated, Any, ClassVar, Literal

from PIL import Image
from pydantic import BaseModel, Field

from deployments.tasks.replies import last_tagged
from deployments.tasks.shapes import png
from deployments.tasks.support import GameInfo, GameSession, imported, seeds_from
from rollout_env import ChatMessage, LostSession, Session, StartOutcome, StepOutcome, TaskEnvironment

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[([0-9;]{0,40})m(.*?)(?:\x1b\[0m|\Z)", re.DOTALL)
_NO_ACTION = "There was no legal action."
_TEXT_MODE, _IMAGE_MODE = "ansi", "rgb_array"
"""Names that Gymnasium has for renderings as text and as an array of pixels."""


class _GymnasiumInfo(GameInfo):
    """The `extra_env_info` of an episode; further fields are ignored. The seed is that of `reset`."""

    options: dict[str, Any] | None = None
    """The options of `reset`."""


class GymnasiumEnvironment(TaskEnvironment):
    """The model answers with `<action>NAME</action>`. Rewards are Gymnasium's; truncation ends the rollout too."""

    ExtraEnvInfo: ClassVar[type[BaseModel]] = _GymnasiumInfo

    def __init__(
        self,
        env_id: str,
        kwargs: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        instruction: str | None = None,
        observation: Literal["text", "image"] = "text",
        lost_session: LostSession = "reopen",
        max_sessions: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        """Makes the environment once, to see that it can be played.

        Args:
            env_id: as in `gymnasium.make`; `package.module:ID` imports the module first.
            kwargs: of `gymnasium.make`.
            actions: names of the actions of a discrete space, in their order; by default their numbers.
            instruction: how to answer, before the first observation; by default it names the actions.
            observation: `text` shows the rendering as text, or else the observation as text; `image` the rendering as a
                picture, for models that see.
            lost_session: `reopen` makes all actions so far again, which needs an environment that only its seed makes
                random; `restart` for any other.
            max_sessions: how many episodes one replica holds at once.

        Raises:
            PackageMissing: Gymnasium is not installed.
            ValueError: the environment has no text or no pictures to show, or `actions` does not fit its actions.
        """
        self._gymnasium = imported("gymnasium", "gymnasium")
        self.env_id = env_id
        self.kwargs = dict(kwargs or {})
        with closing(self.made()) as env:
            self.render_mode = self._render_mode(env, observation)
            self.actions = _action_names(env.action_space, actions)
        self.lost_session = lost_session
        self.max_sessions = max_sessions
        if self.render_mode is not None:
            self.kwargs["render_mode"] = self.render_mode
        _GymnasiumEpisode(self, _GymnasiumInfo(seed=0)).close()
        self.instruction = _instruction_of(self.actions) if instruction is None else instruction
        self.description = f"{env_id} of Gymnasium, shown as {observation}."  # type: ignore[misc]

    def made(self) -> Any:
        return self._gymnasium.make(self.env_id, **self.kwargs)

    def start(self, message_log: list[ChatMessage], extra_env_info: _GymnasiumInfo) -> StartOutcome:
        """Adds the instruction and the first observation."""
        with closing(_GymnasiumEpisode(self, extra_env_info)) as episode:
            shown = episode.shown_after(self.instruction, "\n\n")
        return StartOutcome(shown, {**extra_env_info.model_dump(), "prompt_messages": len(message_log)})

    def open_session(self, message_log: list[ChatMessage], extra_env_info: _GymnasiumInfo) -> Session:
        """Resets an environment, and makes the actions that the log has already."""
        return _GymnasiumEpisode(self, extra_env_info).replayed(message_log, extra_env_info)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"extra_env_info": {"seed": episode_seed}} for episode_seed in seeds_from(seed, count)]

    def _render_mode(self, env: Any, observation: str) -> str | None:
        """How the environment is rendered; None where observations are shown. Raises `ValueError` if neither is."""
        wanted, modes = _IMAGE_MODE if observation == "image" else _TEXT_MODE, env.metadata.get("render_modes", [])
        if wanted in modes:
            return wanted
        spaces = self._gymnasium.spaces
        if observation == "image" or isinstance(env.observation_space, spaces.Box | spaces.Dict | spaces.Graph):
            raise ValueError(
                f"{self.env_id} has no rendering as {observation} ({wanted}) but {modes}, and observations that are no "
                "short text: choose another observation"
            )
        return None


class _GymnasiumEpisode(GameSession):
    """One environment of Gymnasium, from its reset on."""

    def __init__(self, task: GymnasiumEnvironment, info: _GymnasiumInfo) -> None:
        self._task = task
        self._env = task.made()
        observation, _ = self._env.reset(seed=info.seed, options=info.options)
        self._shown = self._message(observation)

    def shown_after(self, text: str, separator: str) -> ChatMessage:
        """The current observation behind a text."""
        return {**self._shown, "content": separator.join(filter(None, (text, self._shown["content"])))}

    def play(self, reply: str) -> StepOutcome:
        named = last_tagged(reply, "action")
        action = None if named is None else _action_of(named, self._task.actions, self._env.action_space)
        if action is None:
            return StepOutcome(self.shown_after(_NO_ACTION, "\n"), reward=0.0, terminated=False, answer=named)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._shown = self._message(observation)
        self.is_over = bool(terminated or truncated)
        return StepOutcome(self._shown, float(reward), self.is_over, answer=named)

    def close(self) -> None:
        self._env.close()

    def _message(self, observation: Any) -> ChatMessage:
        if self._task.render_mode == _IMAGE_MODE:
            return {"role": "user", "content": "", "images": [png(Image.fromarray(self._env.render()))]}
        if isinstance(observation, str) or self._task.render_mode is None:
            return {"role": "user", "content": str(observation)}
        return {"role": "user", "content": _plain_text(self._env.render())}


def _action_names(space: Any, names: list[str] | None) -> list[str] | None:
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


def _instruction_of(actions: list[str] | None) -> str:
    if actions is None:
        return "Answer with <action>...</action>."
    return f"Answer with <action>NAME</action>. The actions are: {', '.join(actions)}."


def _action_of(named: str, actions: list[str] | None, space: Any) -> Any:
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


def _plain_text(rendered: str) -> str:
    """A rendering without escape sequences: square brackets around what is highlighted, colours in words."""
    return _COLOURED.sub(_described, rendered).strip("\n")


def _described(coloured: "re.Match[str]") -> str:
    codes = [int(code) for code in coloured[1].split(";") if code]
    text = coloured[2]
    for code in codes:
        if 30 <= code < 38:
            text = f"({text} {_COLOURS[code - 30]})"
        elif 40 <= code < 48:
            text = f"[{text}]"
    return text
