"""The application of vLLM's servers over a scripted engine core: its own layers, input and output processing."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import orjson
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from deployments.generation.engine import VLLMEngine
from deployments.generation.serving import layers
from deployments.generation.serving.call_aborts import CallAborts
from deployments.generation.serving.grammar_checks import GrammarChecks
from deployments.generation.settings import EngineSettings, ResponseSettings
from deployments.protocols.generation import SamplingOptions, included_columns
from deployments.protocols.model_server import Endpoint, ServedRequest, ServedTokens
from deployments.sessions.records import OpenSession
from deployments.sessions.session_table import SessionsSettings
from deployments.sessions.store import SessionStore
from deployments.upstream.vllm.engine_progress import StepCounter
from deployments.upstream.vllm.token_texts import install_token_texts
from rollout_client.contract.sessions import SessionRequest, SessionSample
from tests.fakes.async_llm import NAMES_ARE_IDS
from tests.fakes.storage import ScriptedStorage
from tests.paths import SMALL_MODEL


@lru_cache
def config_of(model: Path) -> VllmConfig:
    return AsyncEngineArgs(model=str(model), max_model_len=512, max_logprobs=64).create_engine_config()


LIKELIEST = -0.25


class ScriptedCore:
    """Stands for `AsyncLLM`: its requests get the ids of `replies`, one reply each, `step` ids at a time."""

    def __init__(self, model: Path) -> None:
        self.vllm_config = config_of(model)
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.output_processor, self.engine_core = NAMES_ARE_IDS, self
        self.errored = False
        self.replies: list[list[int]] = []
        self.step = 1
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        """Happens before the last ids of a reply."""
        self.returns_experts = False
        self._running: set[str] = set()
        self._aborted: set[str] = set()

    def get_tokenizer(self) -> Any:
        return self.renderer.get_tokenizer()

    def check_admission(self, _requests: int) -> None:
        """There is room."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def abort(self, engine_ids: Sequence[str], internal: bool = False) -> None:
        self._aborted.update(engine_ids)

    async def call_utility_async(self, _method: str, engine_ids: Sequence[str]) -> list[str]:
        await self.abort(engine_ids)
        return []

    async def abort_all(self) -> None:
        await self.abort([*self._running])

    async def generate(
        self, prompt: Any, params: SamplingParams, engine_id: str, **_options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        request = self.input_processor.process_inputs(engine_id, prompt, params, ("generate",))
        request.external_req_id = engine_id
        assert request.sampling_params is not None
        self._running.add(engine_id)
        self.params.append(request.sampling_params)
        prompt_token_ids = list(request.prompt_token_ids or ())
        self.prompts.append(prompt_token_ids)
        processor = OutputProcessor(self.get_tokenizer(), log_stats=False)
        install_token_texts(SimpleNamespace(output_processor=processor))
        processor.add_request(request, None)
        ids, ends = self.replies.pop(0), {self.get_tokenizer().eos_token_id}
        room = request.sampling_params.max_tokens or len(ids)
        ids = ids[:room]
        for first in range(0, len(ids), self.step):
            some = ids[first : first + self.step]
            is_last = first + len(some) == len(ids)
            reason = (FinishReason.STOP if some[-1] in ends else FinishReason.LENGTH) if is_last else None
            if is_last and self.meanwhile is not None:
                await self.meanwhile()
            if engine_id in self._aborted:
                some, reason = [], FinishReason.ABORT
            output = EngineCoreOutput(engine_id, some, finish_reason=reason)
            if params.logprobs is not None:
                output.new_logprobs = logprobs_of(some, params.logprobs, params.top_k)
            if self.returns_experts and some:
                seen = [*prompt_token_ids, *ids[: first + len(some)]]
                start = len(seen) - 1 - len(some) if first else params.routed_experts_prompt_start
                output.routed_experts = experts_between(seen, start)
            if params.prompt_logprobs is not None and first == 0:
                output.new_prompt_logprobs_tensors = prompt_logprobs_of(prompt_token_ids, params.prompt_logprobs)
            await asyncio.sleep(0)
            for made in processor.process_outputs([output], weight_version="0").request_outputs:
                assert isinstance(made, RequestOutput)
                yield made
                if made.finished:
                    return


class UncheckedGrammars(GrammarChecks):
    async def check(self, params: SamplingParams) -> None:
        """Takes any."""


def experts_between(ids: Sequence[int], start: int) -> Any:
    """Rows of the ids from `start` to the last but one, of two layers with one expert a token."""
    rows = [[[sum(ids[: place + 1]) % 256], [place % 256]] for place in range(start, len(ids) - 1)]
    return np.array(rows, dtype=np.int16).reshape(len(rows), 2, 1)


def logprobs_of(ids: Sequence[int], count: int, top_k: int = 0) -> LogprobsLists:
    """`LIKELIEST` for each id that was sampled. The likeliest ones are those after it: `top_k` of them have as much."""
    table = np.array([[token_id + place for place in range(count + 1)] for token_id in ids], dtype=np.int32)
    scores = np.full((len(ids), count + 1), LIKELIEST, dtype=np.float32)
    scores[:, 1 + (top_k if top_k > 0 else count) :] = -np.inf
    return LogprobsLists(table.reshape(len(ids), count + 1), scores, np.ones(len(ids), dtype=np.int32))


def prompt_logprobs_of(ids: Sequence[int], count: int) -> LogprobsTensors:
    """As `logprobs_of` for each id but the first: minus a hundredth of the id."""
    flat = logprobs_of(ids[1:], count)
    scores = -torch.tensor(ids[1:], dtype=torch.float32).repeat(count + 1, 1).T / 100
    return LogprobsTensors(torch.tensor(flat.logprob_token_ids), scores, torch.ones(len(ids) - 1, dtype=torch.int32))


class ServedEngine:
    """One replica's model server over an engine, and a session store in this process."""

    def __init__(self, engine: VLLMEngine, **settings: Any) -> None:
        self.engine = engine
        self.store = SessionStore(SessionsSettings(), ScriptedStorage())
        self.opened = SessionRequest()
        store: Any = self.store
        self.aborts = CallAborts(self.engine.interrupt)
        of_engine = EngineSettings(model=str(SMALL_MODEL), grammar_time_limit_s=2.0)
        # A process of its own would compile a grammar first.
        with patch.object(layers, "GrammarChecks", UncheckedGrammars):
            self.layers = layers.ServingLayers(engine, of_engine, ResponseSettings(**settings), store, self.aborts)
        self._call_ids = map("call-{}".format, count(1))

    async def open(self, **request: Any) -> Self:
        self.opened = SessionRequest(**request)
        await self.store.open(OpenSession("s", "", "", "http://service", self.opened))
        return self

    async def answer(
        self, endpoint: Endpoint, body: dict[str, Any], session: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """The status and the answer."""
        status, content = await self._answered(endpoint, body, session)
        return status, orjson.loads(content)

    async def answered(self, endpoint: Endpoint, body: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """The answer of a call that succeeds."""
        status, answer = await self.answer(endpoint, body, session)
        assert status == 200, answer
        return answer

    async def events(
        self, endpoint: Endpoint, body: dict[str, Any], session: str | None = None
    ) -> list[dict[str, Any]]:
        """The events of a stream, without `[DONE]`."""
        _, content = await self._answered(endpoint, {**body, "stream": True}, session)
        lines = [line.removeprefix("data: ") for line in content.decode().splitlines() if line.startswith("data: ")]
        return [orjson.loads(line) for line in lines if line != "[DONE]"]

    async def samples(self) -> list[SessionSample]:
        return (await self.store.samples("s", "")).samples

    async def _answered(self, endpoint: Endpoint, body: dict[str, Any], session: str | None) -> tuple[int, bytes]:
        of_session: Any = {"session_id": session}
        if session:
            of_session |= {"session_sampling": self.opened.sampling, "include": included_columns(self.opened.include)}
        asked = next(self._call_ids), range(3), 512, (), SamplingOptions()
        request = ServedRequest(*asked, endpoint=endpoint, body=orjson.dumps(body), **of_session)
        return (await self.carried_out(request))[:2]

    async def carried_out(self, request: ServedRequest) -> tuple[int, bytes, ServedTokens | None]:
        """The status and the whole body of the answer, and what the last part counts."""
        parts = [part async for part in self.layers.answer(request)]
        return parts[0].status or 0, b"".join(part.body for part in parts), parts[-1].tokens


class Served(ServedEngine):
    """One over a scripted core."""

    def __init__(self, model: Path = SMALL_MODEL, **settings: Any) -> None:
        self.core = ScriptedCore(model)
        unchecked: Any = self.core
        super().__init__(VLLMEngine(unchecked, StepCounter()), **settings)

    def reply(self, text: str, ends: bool = True) -> list[int]:
        """What the engine generates for the next request."""
        tokenizer = self.core.get_tokenizer()
        ids = [*tokenizer.encode(text, add_special_tokens=False), *([tokenizer.eos_token_id] if ends else [])]
        self.core.replies.append(ids)
        return ids
