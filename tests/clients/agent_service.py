"""The service's own routes and session store, in which agents of tests generate what the tests say."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from httpx import URL

from deployments.sessions.records import ChatContext, EngineCall, GeneratedMessage, RenderedMessage
from deployments.sessions.session_table import SessionsSettings
from deployments.sessions.store import SessionStore
from rollout_client import AsyncRolloutClient
from tests.fakes.model_server import ScriptedModelServer
from tests.fakes.storage import ScriptedStorage
from tests.service.scripted_http import ScriptedHttp


class AgentService:
    def __init__(self) -> None:
        self.store = SessionStore(SessionsSettings(), ScriptedStorage())
        self.http = ScriptedHttp(model_server=ScriptedModelServer(), session_store=self.store)

    def call(self, use: Callable[[AsyncRolloutClient], Awaitable[Any]]) -> Any:
        return self.http.call(use)

    def connected(self) -> AsyncRolloutClient:
        """A client of it in another event loop; closing it closes its connection."""
        http_client = httpx.AsyncClient(transport=httpx.ASGITransport(self.http.app))
        return AsyncRolloutClient("http://service", retries=0, http_client=http_client)

    async def generate(self, base_url: str, token_ids: list[int]) -> None:
        """What the engine does for one call of a session."""
        session_id = URL(base_url).path.split("/")[-2]
        messages = [{"role": "user", "content": "Go on."}]
        call_id = f"call-{len(token_ids)}"
        plan = await self.store.plan(session_id, call_id, messages, ChatContext())
        message = {"role": "assistant", "content": "2"}
        generated = GeneratedMessage(call_id, message, "2", token_ids, [-0.5] * len(token_ids), "stop")
        rendered = [RenderedMessage(messages[0], [1])]
        await self.store.add(session_id, EngineCall(call_id, ChatContext(), plan, rendered, [9], [generated]))
