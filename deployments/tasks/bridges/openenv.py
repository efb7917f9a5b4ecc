"""Environments that an OpenEnv server holds, over its WebSocket: one socket a rollout, closed with it.

The server makes an environment for each socket. So a socket that drops takes its environment along: the step is a
retryable failure, and the rollout is played anew.
"""

import asyncio
import hashlib
import json
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, cast

import httpx
from pydantic import BaseModel, ConfigDict, Field, HttpUrl
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from deployments.tasks.replies import last_tagged, text_outcome
from deployments.tasks.support import seeds_from
from rollout_env import (
    ChatMessage,
    SampleRejected,
    Session,
    StartOutcome,
    StepOutcome,
    TaskEnvironment,
    TemporaryFailure,
    reply_text,
)
from rollout_env.loopback import is_loopback

_LARGEST_MESSAGE_BYTES = 100 * 2**20
"""The bound of OpenEnv's own client."""
_CLOSE_S = 10.0
"""How long the server may take to close a socket."""


class _OpenEnvInfo(BaseModel):
    """The `extra_env_info` of an episode; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    seed: int = Field(ge=0, lt=2**31)
    """The seed of `reset`."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `reset`."""
    digest: str | None = None
    """Digest of the first observation, set by the start."""


class ServerError(Exception):
    """The answer of the server to a message that it cannot process."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.code = str(data.get("code", "UNKNOWN"))
        details = "; ".join(str(error.get("msg", error)) for error in data.get("errors", []))
        self.reason = ": ".join(filter(None, (str(data.get("message", "")), details)))
        super().__init__(f"the OpenEnv server answered {self.code}: {self.reason}")


class OpenEnvEnvironment(TaskEnvironment):
    """A reply becomes an action, an observation becomes a message. Rewards are those of the server."""

    ExtraEnvInfo: ClassVar[type[BaseModel]] = _OpenEnvInfo

    def __init__(
        self,
        url: HttpUrl,
        action_field: str | None = None,
        observation_field: str | None = None,
        instruction: str | None = None,
        max_sessions: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        """Asks the server for its schemas.

        Args:
            url: of the server, such as `http://127.0.0.1:8000`.
            action_field: the field of an action that is the text of the reply. Without it, the reply holds an action as
                JSON between `<action>` and `</action>`.
            observation_field: the field of an observation that is shown; by default all of them, as JSON.
            instruction: how to answer, before the first observation; by default it shows the schema of an action.
            max_sessions: how many sockets one replica holds at once. The server has a limit of its own, by default 1.

        Raises:
            TemporaryFailure: the server does not answer.
            ValueError: its actions have no such field.
        """
        self.url = str(url).rstrip("/")
        self.action_field = action_field
        self.observation_field = observation_field
        self.max_sessions = max_sessions
        schema = _schema_of_action(self.url)
        if action_field is not None and action_field not in schema.get("properties", {}):
            raise ValueError(
                f"the actions of {self.url} have no field {action_field}, but {list(schema['properties'])}"
            )
        self.instruction = _instruction_of(schema, action_field) if instruction is None else instruction
        self.description = f"The OpenEnv environment at {self.url}."  # type: ignore[misc]

    async def start(
        self,
        message_log: list[ChatMessage],  # noqa: ARG002 - the first observation follows whatever prompt there is
        extra_env_info: _OpenEnvInfo,
    ) -> StartOutcome:
        """Adds the instruction and the first observation."""
        episode = await _OpenEnvEpisode.opened(self, extra_env_info)
        await episode.close()
        text = "\n\n".join(filter(None, (self.instruction, episode.first)))
        state = {**extra_env_info.model_dump(), "digest": _digest_of(episode.first)}
        return StartOutcome(observation={"role": "user", "content": text or "Begin."}, metadata=state)

    async def open_session(
        self,
        message_log: list[ChatMessage],  # noqa: ARG002 - an episode begins at its reset
        extra_env_info: _OpenEnvInfo,
    ) -> Session:
        """Opens a socket and resets its environment.

        Raises:
            TemporaryFailure: the server cannot be reached, or has no room for another socket.
            SampleRejected: the first observation is not the one that the prompt shows.
        """
        episode = await _OpenEnvEpisode.opened(self, extra_env_info)
        if extra_env_info.digest not in (None, _digest_of(episode.first)):
            await episode.close()
            raise SampleRejected(
                f"{self.url} gave another first observation for the seed {extra_env_info.seed}: it is not seeded."
            )
        return episode

    def action_of(self, reply: str) -> dict[str, Any] | None:
        """The action of a reply; `None` if it has none."""
        if self.action_field is not None:
            return {self.action_field: reply}
        text = last_tagged(reply, "action")
        try:
            action = None if text is None else json.loads(text)
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def text_of(self, observation: dict[str, Any]) -> str:
        if self.observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        shown = observation.get(self.observation_field)
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"extra_env_info": {"seed": episode_seed}} for episode_seed in seeds_from(seed, count)]


class _OpenEnvEpisode(Session):
    """One socket and the environment behind it."""

    def __init__(self, task: OpenEnvEnvironment, socket: ClientConnection) -> None:
        self._task = task
        self._socket = socket
        self.first = ""
        """The observation of the reset."""

    @classmethod
    async def opened(cls, task: OpenEnvEnvironment, info: _OpenEnvInfo) -> "_OpenEnvEpisode":
        """Raises `TemporaryFailure` if the server cannot be reached, or has no room."""
        url = f"ws{task.url.removeprefix('http')}/ws"
        proxy: Literal[True] | None = None if is_loopback(task.url) else True
        try:
            socket = await connect(url, max_size=_LARGEST_MESSAGE_BYTES, proxy=proxy)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise TemporaryFailure(f"The OpenEnv server at {task.url} cannot be reached: {error}") from error
        episode = cls(task, socket)
        try:
            answer = await episode._request("reset", {**info.reset, "seed": info.seed})
        except BaseException:
            await episode.close()
            raise
        episode.first = task.text_of(answer["observation"])
        return episode

    async def step(self, message_log: list[ChatMessage], extra_env_info: _OpenEnvInfo) -> StepOutcome:  # noqa: ARG002
        """Sends the action of the reply. An action that is not valid is told, and changes nothing.

        Raises:
            TemporaryFailure: the socket dropped.
            ServerError: the environment raised.
        """
        action = self._task.action_of(reply_text(message_log[-1]))
        if action is None:
            return text_outcome("There was no action: write it as JSON between <action> and </action>.")
        try:
            answer = await self._request("step", action)
        except ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return text_outcome(f"The action is not valid: {error.reason}.")
        text = self._task.text_of(answer["observation"])
        reward = 0.0 if answer.get("reward") is None else float(answer["reward"])
        return text_outcome(text, reward, terminated=bool(answer.get("done")))

    async def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The observation that the server answers with, and its reward and end."""
        try:
            # A server without room says so and closes the socket, maybe before it is asked.
            with suppress(ConnectionClosed):
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        except WebSocketException as error:
            raise TemporaryFailure(f"The socket to the OpenEnv server at {self._task.url} dropped: {error}") from error
        data = answer.get("data", {})
        if answer.get("type") != "error":
            return data
        failure = ServerError(data)
        if failure.code == "CAPACITY_REACHED":
            raise TemporaryFailure(f"The OpenEnv server at {self._task.url} has no room: {failure.reason}") from failure
        raise failure

    async def close(self) -> None:
        """Lets the server close the socket, which it does when the environment behind it is gone."""
        try:
            with suppress(TimeoutError, WebSocketException):
                async with asyncio.timeout(_CLOSE_S):
                    await self._socket.send(json.dumps({"type": "close"}))
                    await self._socket.wait_closed()
        finally:
            await self._socket.close()


def _schema_of_action(url: str) -> dict[str, Any]:
    """Raises `TemporaryFailure` if the server does not say it."""
    try:
        answer = httpx.get(f"{url}/schema", trust_env=not is_loopback(url)).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise TemporaryFailure(f"The OpenEnv server at {url} does not tell its schemas: {error}") from error
    return cast(dict[str, Any], answer["action"])


def _instruction_of(schema: dict[str, Any], action_field: str | None) -> str:
    if action_field is not None:
        return ""
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    return f"Answer with <action>JSON</action>. The fields of the JSON object are: {json.dumps(fields)}"


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
