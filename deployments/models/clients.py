"""Models as environments ask them.

`HttpChatModel` asks one behind an OpenAI-compatible server, or a policy of this service: bounded, retried and timed.
`RemoteRewardModel` asks a reward model of the service, whose half is `deployments/models/reward_replica.py`.

Guarantees of `HttpChatModel`: at most `max_concurrent_calls` requests are under way; a call makes at most 1 + `retries`
attempts; the key is in no message and no log.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from deployments.failures import EnvironmentLost
from deployments.models.settings import ChatModelSettings
from deployments.rpc.batching import CallBatcher, at_once, bytes_of_conversation
from deployments.rpc.handle_calls import StoreClient
from deployments.strict_settings import bearer_headers
from rollout_env import ChatMessage, ChatModel, ModelRefused, ModelReply, ModelUnavailable, RewardModel

MAY_PASS = frozenset({408, 409, 425, 429})
"""Statuses below 500 that may pass."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 20.0
LONGEST_QUOTE = 300
"""Characters of a server's refusal that are shown."""
SENT_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls")
"""Fields of a message that OpenAI's format knows."""


class _AttemptFailed(Exception):
    """One attempt failed in a way that may pass."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        """Keeps the reason and `wait_s`, the seconds that the server asks to wait."""
        super().__init__(reason)
        self.wait_s = wait_s


def _pause_s(retry_state: RetryCallState) -> float:
    """Doubling pauses with jitter, so that calls do not return all at once, after the time that the server asks for."""
    longest_s: float = min(FIRST_PAUSE_S * 2 ** (retry_state.attempt_number - 1), LONGEST_PAUSE_S)
    failure = retry_state.outcome.exception() if retry_state.outcome else None
    asked_s = failure.wait_s if isinstance(failure, _AttemptFailed) else 0.0
    return min(asked_s, LONGEST_PAUSE_S) + longest_s * random.uniform(0.5, 1.0)


class HttpChatModel(ChatModel):
    """One model for one environment replica. Its calls belong to one event loop."""

    def __init__(self, settings: ChatModelSettings, name: str, own_url: Callable[[], str] | None = None) -> None:
        """Reads the key.

        Args:
            name: name of the model in the config, for messages.
            own_url: says the address of this service, for a model without `base_url`. Blocks.

        Raises:
            KeyMissing: the variable of the key is not set.
        """
        self._settings = settings
        self._name = name
        self._own_url = own_url
        headers = bearer_headers(settings.api_key_variable)
        limits = httpx.Limits(max_connections=settings.max_concurrent_calls, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(timeout=settings.timeout_s, headers=headers, limits=limits)
        self._slots = asyncio.Semaphore(settings.max_concurrent_calls)

    async def chat(self, messages: Sequence[ChatMessage], **parameters: Any) -> ModelReply:
        started = time.monotonic()
        body = {
            **({} if self._settings.model is None else {"model": self._settings.model}),
            **self._settings.parameters,
            **parameters,
            "messages": [_sent(message) for message in messages],
        }
        async with self._slots:
            retrying = AsyncRetrying(
                stop=stop_after_attempt(1 + self._settings.retries),
                wait=_pause_s,
                retry=retry_if_exception_type(_AttemptFailed),
                retry_error_callback=self._give_up,
            )
            answer: Any = await retrying(self._attempt, body)
        return self._reply(answer, time.monotonic() - started, retrying.statistics["attempt_number"])

    async def _attempt(self, body: Mapping[str, Any]) -> Any:
        """Raises `_AttemptFailed` or `ModelRefused`."""
        url = await self._url()
        try:
            # The timeouts of httpx are those of single reads: a server that sends a byte a second never reaches them.
            async with asyncio.timeout(self._settings.timeout_s):
                response = await self._http.post(url, json=body, params=self._settings.query)
        except TimeoutError as error:
            raise _AttemptFailed(f"no answer within {self._settings.timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise _AttemptFailed(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code in MAY_PASS or response.status_code >= 500:
            raise _AttemptFailed(f"status {response.status_code}", _retry_after_s(response))
        if response.status_code != 200:
            quoted = response.text[:LONGEST_QUOTE]
            raise ModelRefused(f"The server of the model {self._name} answers {response.status_code}: {quoted}")
        try:
            return response.json()
        except ValueError as error:
            raise _AttemptFailed("an answer that is not JSON") from error

    async def _url(self) -> str:
        """Where to ask. That of this service is asked for at each attempt: a replica may have started before it."""
        base_url = str(self._settings.base_url)
        if self._settings.base_url is None:
            assert self._own_url is not None
            base_url = f"{await asyncio.to_thread(self._own_url)}/v1"
        return f"{base_url.rstrip('/')}/chat/completions"

    def _give_up(self, state: RetryCallState) -> NoReturn:
        failure = state.outcome.exception() if state.outcome else None
        message = f"The model {self._name} did not answer (attempts: {state.attempt_number}): {failure}."
        raise ModelUnavailable(message) from failure

    def _reply(self, answer: Any, seconds: float, attempts: int) -> ModelReply:
        """Raises `ModelRefused` if the answer is not in OpenAI's format."""
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            usage = answer.get("usage") or {}
            return ModelReply(
                content=message.get("content") or "",
                tool_calls=list(message.get("tool_calls") or []),
                reasoning_content=message.get("reasoning_content") or message.get("reasoning"),
                finish_reason=choice.get("finish_reason") or "stop",
                prompt_tokens=usage.get("prompt_tokens"),
                completion_tokens=usage.get("completion_tokens"),
                seconds=seconds,
                attempts=attempts,
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise ModelRefused(
                f"The server of the model {self._name} sent no chat completion: {str(answer)[:LONGEST_QUOTE]}"
            ) from error


def _sent(message: ChatMessage) -> dict[str, Any]:
    """The message in OpenAI's format, whose only role for what an environment says is `user`."""
    fields = {name: value for name, value in message.items() if name in SENT_FIELDS}
    return {**fields, "role": "user"} if message["role"] == "environment" else fields


def _retry_after_s(response: httpx.Response) -> float:
    """The seconds that the server asks to wait; 0 if it names none, or a date."""
    wanted: str = response.headers.get("retry-after", "")
    return float(wanted) if wanted.isdecimal() else 0.0


class RemoteRewardModel(RewardModel):
    """Sends the conversations of one event-loop iteration in one call, or in several within the bounds of a message."""

    def __init__(self, name: str, handle: Any) -> None:
        """Takes the deployment's handle."""
        self._who = f"The reward model {name}"
        self._model = StoreClient(handle, EnvironmentLost, self._who)
        self._batcher: CallBatcher[Sequence[ChatMessage], float] = CallBatcher(
            at_once(self._scores), bytes_of_conversation
        )

    async def score(self, messages: Sequence[ChatMessage]) -> float:
        return await self._batcher.call(messages)

    async def _scores(self, conversations: list[Sequence[ChatMessage]]) -> list[float | Exception]:
        try:
            results = await self._model.score([list(messages) for messages in conversations])
        except Exception as error:  # noqa: BLE001 - whatever breaks the call, its conversations have no score
            message = f"{self._who} failed: {type(error).__name__}: {error}"
            return [ModelUnavailable(message) for _ in conversations]
        return [
            ModelRefused(f"{self._who} cannot score this: {result}.") if isinstance(result, Exception) else result
            for result in results
        ]
