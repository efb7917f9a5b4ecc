"""The ways to run an agent: what a run gets, what it answers, how it fails.

`CallableProgram` is a Python function of this process. `HarnessProgram` is an HTTP server, which is asked once for each
rollout and answers when the run has ended. A command is `CommandProgram`
(`command_program.py`), a game `GameProgram` (`game_program.py`).
"""

import asyncio
import importlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import orjson
from pydantic import BaseModel, ConfigDict, FiniteFloat, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from deployments.agents.settings import HarnessSettings
from deployments.failures import AgentFailed, EnvironmentLost
from deployments.strict_settings import bearer_headers
from rollout_client.agent_runner import AgentReward
from rollout_client.contract.rollouts import SampleInput
from rollout_env import TemporaryFailure
from rollout_env.loopback import is_loopback

MOST_SHOWN = 2000
"""Characters of an agent's output that its failure shows."""
REWARD: TypeAdapter[float | dict[str, float] | None] = TypeAdapter(FiniteFloat | dict[str, FiniteFloat] | None)


class AgentCall(BaseModel):
    """The arguments of one run."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    base_url: str
    """Address of its session. OpenAI's clients take it with `/v1` appended, Anthropic's without."""
    api_key: str
    sample: dict[str, JsonValue]
    """The sample as it was posted, with `task_name` and `idx`."""

    def sample_json(self) -> bytes:
        """The sample for another program, with integers of any size; a number that is not finite is null."""
        return to_json(self.sample, inf_nan_mode="null")


@dataclass(slots=True)
class RunNotes:
    """Notes that a program makes of one run while it goes on."""

    sentence: str = ""
    """Its last output, for the message of its failure."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the rollout, once it has ended."""
    limit: asyncio.Timeout | None = None
    """The time limit of the run, where it has one; a wait for a place uses none of it."""

    @asynccontextmanager
    async def place_of(self, places: asyncio.Semaphore) -> AsyncIterator[None]:
        """Holds a place for the block. The wait for it is no time of the run."""
        loop, end = asyncio.get_running_loop(), self.limit and self.limit.when()
        if self.limit is not None and end is not None:
            left_s = end - loop.time()
            self.limit.reschedule(None)
        async with places:
            if self.limit is not None and end is not None:
                self.limit.reschedule(loop.time() + left_s)
            yield

    def heard(self, stderr: str) -> None:
        """Notes what a command wrote to stderr."""
        shown = _last_of(stderr)
        self.sentence = f"It wrote to stderr last: {shown}" if shown else "It wrote nothing to stderr."


class AgentProgram(Protocol):
    """Runs an agent. Runs share nothing and may overlap."""

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        """Returns when the run has ended: its reward by names, empty if it gives none.

        Cancelling the call ends the run, within a second.

        Args:
            said: updated during the run.

        Raises:
            AgentFailed: it failed. The message has what it said last.
            EnvironmentLost: it cannot be run just now.
        """
        ...


def reward_of(given: Any, what: str) -> dict[str, float]:
    """The reward that an agent has given, by names.

    Args:
        what: the subject of the failure's message.

    Raises:
        AgentFailed: it is not a reward.
    """
    try:
        reward = REWARD.validate_python(given, strict=True)
    except ValidationError as error:
        raise AgentFailed(
            f"{what} is not a reward: it must be a finite number, an object of named ones, or null, got "
            f"{repr(given)[:MOST_SHOWN]}."
        ) from error
    if reward is None:
        return {}
    return dict(reward) if isinstance(reward, Mapping) else {"reward": float(reward)}


def _last_of(text: str) -> str:
    """The end of a text, stripped."""
    text = text.strip()
    return text if len(text) <= MOST_SHOWN else f"...{text[-MOST_SHOWN:]}"


CONNECT_WITHIN_S = 10.0
MOST_BYTES = 2**20
_MAY_PASS = (408, 425, 429, 502, 503, 504)


def http_client(url: str, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A client of the server at the URL, whose answers may take as long as a run."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_WITHIN_S),
        limits=httpx.Limits(max_connections=None),
        headers={"content-type": "application/json", **(headers or {})},
        trust_env=not is_loopback(url),
    )


async def post(client: httpx.AsyncClient, url: str, content: bytes, what: str, **options: Any) -> bytes:
    """The body of a successful answer, of at most `MOST_BYTES`.

    Args:
        what: the subject of the failure's message.

    Raises:
        AgentFailed: the answer is another one, or longer.
        EnvironmentLost: there is none, or it says that another try may succeed.
    """
    body = bytearray()
    try:
        async with client.stream("POST", url, content=content, **options) as response:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MOST_BYTES:
                    raise AgentFailed(f"{what} answered more than {MOST_BYTES} bytes.")
    except httpx.TransportError as error:
        raise EnvironmentLost(f"{what} does not answer: {error!r}.") from error
    if response.is_success:
        return bytes(body)
    failure = EnvironmentLost if response.status_code in _MAY_PASS else AgentFailed
    raise failure(f"{what} answered {response.status_code}. {_last_of(body.decode(errors='replace'))}")


class HarnessProgram(AgentProgram):
    def __init__(self, settings: HarnessSettings) -> None:
        """Raises `KeyMissing`."""
        self._url = str(settings.url)
        self._client = http_client(self._url, bearer_headers(settings.api_key_variable))

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:  # noqa: ARG002
        what = f"The harness at {self._url}"
        # orjson writes no integers of more than 64 bits.
        body = await post(self._client, self._url, call.model_dump_json().encode(), what)
        try:
            answer = orjson.loads(body) if body.strip() else None
        except orjson.JSONDecodeError as error:
            raise AgentFailed(f"{what} answered without JSON: {_last_of(body.decode(errors='replace'))}") from error
        return reward_of(answer, f"The answer of the harness at {self._url}")


class AgentNotLoadable(Exception):
    """The config names an agent that cannot be run. The message is a sentence."""


class CallableProgram(AgentProgram):
    def __init__(self, import_path: str, further: Sequence[str] = ()) -> None:
        """Raises `AgentNotLoadable`. `further` names arguments that the function takes beside the usual three."""
        self._agent = _load_agent(import_path, further)

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:  # noqa: ARG002 - a function says nothing
        return await self.play(call)

    async def play(self, call: AgentCall, *further: Any) -> dict[str, float]:
        """A run with further arguments. Raises what `run` raises."""
        sample = SampleInput.model_validate(call.sample)
        try:
            reward: Any = await self._agent(f"{call.base_url}/v1", call.api_key, sample, *further)
        except TemporaryFailure as error:
            raise EnvironmentLost(f"The agent cannot be run just now: {_last_of(str(error))}") from error
        except Exception as error:
            raise AgentFailed(f"The agent raised {type(error).__name__}: {_last_of(str(error))}") from error
        return reward_of(reward, "What the agent returned")


def _load_agent(import_path: str, further: Sequence[str] = ()) -> Callable[..., Awaitable[AgentReward]]:
    """Imports the agent. Raises `AgentNotLoadable` if it is missing, or not an async function of its arguments."""
    arguments = ("base_url", "api_key", "sample", *further)
    module_name, _, name = import_path.partition(":")
    try:
        agent = getattr(importlib.import_module(module_name), name)
        inspect.signature(agent).bind(*arguments)
    except (Exception, SystemExit) as error:
        raise AgentNotLoadable(
            f"{import_path} is not package.module:function of a function that takes {', '.join(arguments)}: "
            f"{type(error).__name__}: {error}."
        ) from error
    if not (inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))):  # noqa: B004
        raise AgentNotLoadable(f"{import_path} is not an async function: write async def {name}.")
    return agent  # type: ignore[no-any-return]
