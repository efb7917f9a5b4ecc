"""`client.sessions`: agents that bring their own loop."""

from typing import Any, Self, Unpack

from rollout_client.calls.async_client.connection import AsyncConnection, AsyncResource
from rollout_client.calls.call import call_for, path_of, without_none
from rollout_client.calls.json_values import as_given, json_bytes, json_value
from rollout_client.calls.options import CallOptions
from rollout_client.calls.sessions import OpenedSession
from rollout_client.contract.sessions import (
    DriftReport,
    SessionInfo,
    SessionList,
    SessionRequest,
    SessionReward,
    SessionSample,
    SessionSamples,
)


class AsyncSession(OpenedSession):
    """One session, open inside of `async with`. A program gets its address and its key, and is recorded.

    Leaving the block ends the session: calls in flight are aborted. What was recorded stays readable until it expires.
    Each method raises a `RolloutError`.
    """

    def __init__(self, connection: AsyncConnection, request: dict[str, Any]) -> None:
        self._connection = connection
        self._request = request

    async def __aenter__(self) -> Self:
        given = json_value({name: as_given(value) for name, value in self._request.items()})
        body = SessionRequest.model_validate(given).model_dump_json(exclude_unset=True).encode()
        self._info = await self._connection.short(call_for(SessionInfo, "POST", "/sessions", body=body), {})
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.end()

    async def info(self, **options: Unpack[CallOptions]) -> SessionInfo:
        """The state of the session."""
        return await self._connection.short(call_for(SessionInfo, "GET", path_of("sessions", self.id)), options)

    async def samples(self, **options: Unpack[CallOptions]) -> list[SessionSample]:
        """Its branches as rollouts."""
        call = call_for(SessionSamples, "GET", path_of("sessions", self.id, "samples"))
        return (await self._connection.short(call, options)).samples

    async def drift(self, **options: Unpack[CallOptions]) -> DriftReport:
        """Where the program's texts differ from what was generated."""
        return await self._connection.short(
            call_for(DriftReport, "GET", path_of("sessions", self.id, "drift")), options
        )

    async def reward(
        self, reward: float | dict[str, float], generation_id: str | None = None, **options: Unpack[CallOptions]
    ) -> SessionInfo:
        """Rewards the session, or the branches that hold one generated message; a dict has named parts."""
        name = "rewards" if isinstance(reward, dict) else "reward"
        return await self._rewarded({name: reward, "generation_id": generation_id}, options)

    async def judge(self, generation_id: str | None = None, **options: Unpack[CallOptions]) -> SessionInfo:
        """Rewards the session, or one generated message, as the environment of its task judges it."""
        return await self._rewarded({"judge": True, "generation_id": generation_id}, options)

    async def end(self, **options: Unpack[CallOptions]) -> SessionInfo:
        """Takes no more calls, and aborts those in flight."""
        return await self._connection.short(call_for(SessionInfo, "DELETE", path_of("sessions", self.id)), options)

    async def _rewarded(self, fields: dict[str, Any], options: CallOptions) -> SessionInfo:
        reward = SessionReward.model_validate(without_none(fields)).model_dump(exclude_unset=True)
        call = call_for(SessionInfo, "POST", path_of("sessions", self.id, "reward"), body=json_bytes(reward))
        return await self._connection.short(call, options)


class AsyncSessions(AsyncResource):
    """`client.sessions`."""

    def open(self, **request: Any) -> AsyncSession:
        """A session with the fields of `SessionRequest`: `async with client.sessions.open(sampling=...) as session`.

        Entering the block raises `ValueError` if the fields are not those, and `NotJson` if one holds no JSON.
        """
        return AsyncSession(self._connection, request)

    async def all(self, **options: Unpack[CallOptions]) -> list[SessionInfo]:
        """Those of the client's key, the oldest first."""
        return (await self._connection.short(call_for(SessionList, "GET", "/sessions"), options)).sessions
