"""The methods of the client for sessions: agents that bring their own loop."""

from typing import Any, Self, Unpack

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.options import CallOptions
from rollout_client.calls.sessions import (
    drift_call,
    end_call,
    open_call,
    reward_call,
    samples_call,
    session_call,
    session_list_call,
)
from rollout_client.contract.sessions import DriftReport, SessionInfo, SessionReward, SessionSample


class AsyncSession:
    """One session, open inside of `async with`. A program gets its address and its key, and is recorded.

    Leaving the block ends the session: calls in flight are aborted. What was recorded stays readable until it expires.
    Each method raises a `RolloutError`.
    """

    def __init__(self, connection: AsyncConnection, request: dict[str, Any]) -> None:
        self._connection = connection
        self._request = request
        self._info: SessionInfo | None = None

    async def __aenter__(self) -> Self:
        self._info = await self._connection.short(open_call(self._request), {})
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.end()

    @property
    def id(self) -> str:
        return self._opened.id

    @property
    def base_url(self) -> str:
        """For OpenAI's clients."""
        return f"{self._opened.base_url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic's clients, which put `/v1` behind it themselves."""
        return self._opened.base_url

    @property
    def api_key(self) -> str:
        """The key of this session alone."""
        key = self._opened.api_key
        assert key is not None
        return key

    async def info(self, **options: Unpack[CallOptions]) -> SessionInfo:
        """The state of the session."""
        return await self._connection.short(session_call(self.id), options)

    async def samples(self, **options: Unpack[CallOptions]) -> list[SessionSample]:
        """Its branches as rollouts."""
        return (await self._connection.short(samples_call(self.id), options)).samples

    async def drift(self, **options: Unpack[CallOptions]) -> DriftReport:
        """Where the program's texts differ from what was generated."""
        return await self._connection.short(drift_call(self.id), options)

    async def reward(
        self,
        reward: float | dict[str, float],
        generation_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> SessionInfo:
        """Rewards the session, or the branches that hold one generated message; a dict has named parts."""
        parts = {"rewards": reward} if isinstance(reward, dict) else {"reward": reward}
        named = {} if generation_id is None else {"generation_id": generation_id}
        return await self._connection.short(
            reward_call(self.id, SessionReward.model_validate({**parts, **named})), options
        )

    async def judge(self, generation_id: str | None = None, **options: Unpack[CallOptions]) -> SessionInfo:
        """Rewards the session, or one generated message, as the environment of its task judges it."""
        named = {} if generation_id is None else {"generation_id": generation_id}
        body = SessionReward.model_validate({"judge": True, **named})
        return await self._connection.short(reward_call(self.id, body), options)

    async def end(self, **options: Unpack[CallOptions]) -> SessionInfo:
        """Takes no more calls, and aborts those in flight."""
        return await self._connection.short(end_call(self.id), options)

    @property
    def _opened(self) -> SessionInfo:
        if self._info is None:
            raise ValueError("The session is not open: use it with `async with`.")
        return self._info


class AsyncSessionMethods:
    """The methods of a client for sessions."""

    _connection: AsyncConnection

    def session(self, **request: Any) -> AsyncSession:
        """A session with the fields of `SessionRequest`: `async with client.session(sampling=...) as session`."""
        return AsyncSession(self._connection, request)

    async def sessions(self, **options: Unpack[CallOptions]) -> list[SessionInfo]:
        """Those of the client's key, the oldest first."""
        return await self._connection.short(session_list_call(), options)
