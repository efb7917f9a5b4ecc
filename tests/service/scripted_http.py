"""The HTTP face over scripted parts, which remember what reached them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx

from deployments.protocols import GeneratorDescription
from rollout_client import AsyncRolloutClient
from service.remote.policy import RemotePolicy
from service.requests.chat_tokenizer import TransformersChatTokenizer
from service.requests.episodes import EpisodeFactory
from service.rollout_service import RolloutService
from service.routes.http_app import build_http_app
from service.settings import Limits
from tests.paths import TINY_MODEL
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator, outcome

VOCAB_SIZE = 262
LIMITS = Limits(max_body_bytes=4096, max_rollouts_per_request=100)
tokens = TransformersChatTokenizer.load(str(TINY_MODEL))
Answer = TypeVar("Answer")


class ScriptedHttp:
    def __init__(self, limits: Limits = LIMITS) -> None:
        self.generator = ScriptedGenerator(["A"])
        self.environments = {
            name: ScriptedEnvironment([outcome(terminated=True)]) for name in ("math", "sliding_puzzle")
        }
        description = GeneratorDescription("tiny", max_model_len=100, vocab_size=VOCAB_SIZE)
        intake = EpisodeFactory(frozenset(self.environments), description, tokens, limits)
        policy = RemotePolicy(store=None)  # type: ignore[arg-type]
        rollouts = RolloutService(self.generator, self.environments, policy, intake, limits)
        self._app = build_http_app(rollouts)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
                return await http.request(method, path, **options)

        return asyncio.run(send())

    def post(self, body: dict[str, Any] | str | bytes, **headers: str) -> httpx.Response:
        content = json.dumps(body) if isinstance(body, dict) else body
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.request("POST", "/rollout", content=content, headers=named)

    def ask(self, call: Callable[[AsyncRolloutClient], Awaitable[Answer]]) -> Answer:
        """What `call` makes of a client."""

        async def ask() -> Answer:
            async with AsyncRolloutClient("http://service", transport=httpx.ASGITransport(self._app)) as client:
                return await call(client)

        return asyncio.run(ask())

    @property
    def has_started_something(self) -> bool:
        return bool(self.generator.requests or any(environment.requests for environment in self.environments.values()))
