"""vLLM's own servers of OpenAI's, Anthropic's and vLLM's APIs and SGLang's `/generate` over one engine, and the
replica's entry to them.

`serving_app` builds the application of vLLM's layers, routers and error handlers; `ServingLayers` answers calls.
"""

from collections.abc import AsyncGenerator, Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from vllm.entrypoints.anthropic.api_router import router as messages_router
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.api_router import router as tokens_router
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.failures import GenerationRejected
from deployments.generation.engine import VLLMEngine
from deployments.generation.serving.answered_layers import (
    AnsweredChat,
    AnsweredCompletions,
    AnsweredMessages,
    AnsweredResponses,
    AnsweredTokens,
)
from deployments.generation.serving.asgi_calls import answer_parts
from deployments.generation.serving.call_aborts import CallAborts
from deployments.generation.serving.grammar_checks import GrammarChecks
from deployments.generation.serving.image_prompts import ImagePrompts
from deployments.generation.serving.recording_client import RecordingClient
from deployments.generation.serving.served_call import ServedCall
from deployments.generation.serving.session_call import SessionCall
from deployments.generation.serving.session_calls_in_flight import SessionCallsInFlight
from deployments.generation.serving.session_renderer import SessionOnlineRenderer
from deployments.generation.serving.sglang_generate import AnsweredGenerate
from deployments.generation.serving.sglang_generate import router as sglang_router
from deployments.generation.serving.sglang_requests import SGLangRequest
from deployments.generation.serving.template_renderer import TemplateRenderer
from deployments.generation.settings import ResponseSettings
from deployments.protocols.chat import FromHub, SplitSpecialTokens
from deployments.protocols.model_server import ServedPart, ServedRequest, public_model_name
from deployments.upstream.vllm.plugin import install_in_servers
from rollout_client.contract.base import label_of

if TYPE_CHECKING:
    from deployments.sessions.store import SessionStore

ROUTERS = (
    *(chat_router, completion_router, responses_router, messages_router, models_router, tokenize_router),
    *(tokens_router, sglang_router),
)
REQUESTS = (
    *(GenerateRequest, SGLangRequest),
    *(ChatCompletionRequest, CompletionRequest, ResponsesRequest),
    *(AnthropicMessagesRequest, AnthropicCountTokensRequest),
    *(TokenizeCompletionRequest, TokenizeChatRequest, DetokenizeRequest),
)
PLAIN_TEMPLATE: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
"""The model's own chat template."""


def serving_app(
    client: RecordingClient,
    settings: ResponseSettings,
    aborts: CallAborts,
    current_version: Callable[[str | None], str],
    images: ImagePrompts | None = None,
) -> FastAPI:
    """Builds the application. Takes tenths of a second.

    Args:
        settings: its parsers, so that answers and rollouts are parsed alike.
        aborts: of calls of SGLang's API.
        current_version: the label of the weights with which a policy generates now.
        images: `None` for an engine that takes none.
    """
    engine: Any = client
    root = public_model_name(engine.model_config.model)
    paths = [BaseModelPath(name=name, model_path=root) for name in served_names(engine)]
    models = OpenAIServingModels(engine_client=engine, base_model_paths=paths)
    parsers: dict[str, Any] = {
        "enable_auto_tools": settings.tool_call_parser is not None,
        "tool_parser": settings.tool_call_parser,
        "reasoning_parser": settings.reasoning_parser or "",
    }
    renderer = SessionOnlineRenderer(
        engine.model_config, engine.renderer, request_logger=None, **PLAIN_TEMPLATE, **parsers
    )
    renderer.images = images
    renderer.warmup()
    shared: dict[str, Any] = {"request_logger": None, **PLAIN_TEMPLATE, **parsers}
    chat: dict[str, Any] = {"response_role": "assistant", "online_renderer": renderer, **shared}
    app = FastAPI(openapi_url=None)
    state = app.state
    state.engine_client = engine
    # What vLLM's handlers look up. Serve replaces a replica with a dead engine: there is no server to end. Heartbeats
    # are the ingress's (`service/model_server/answers.py`): vLLM has them for chat completions alone, and not while a
    # call waits for its turn there.
    state.args = SimpleNamespace(log_error_stack=False, sse_keep_alive_interval=0)
    state.server = SimpleNamespace(should_exit=False)
    state.openai_serving_models = models
    state.openai_serving_chat = AnsweredChat(engine, models, **chat)
    state.openai_serving_completion = AnsweredCompletions(engine, models, online_renderer=renderer, request_logger=None)
    # Asking the template how it takes an effort of none would cost renderings in the first request.
    state.anthropic_serving_messages = AnsweredMessages(engine, models, **chat, disabled_thinking_effort="none")
    state.openai_serving_responses = AnsweredResponses(engine, models, renderer, **shared)
    state.serving_tokens = AnsweredTokens(engine, models, renderer, request_logger=None)
    state.answered_generate = AnsweredGenerate(engine, models, renderer, aborts, current_version)
    state.serving_tokenization = ServingTokenization(models, renderer, **PLAIN_TEMPLATE)
    init_exception_handler(app)
    install_in_servers(REQUESTS, with_messages=(ChatCompletionRequest, TokenizeChatRequest))
    for router in ROUTERS:
        app.include_router(router)
    return app


def served_names(engine: Any) -> list[str]:
    """By what names callers may ask for the model, the first one being that in answers.

    vLLM names a model by its path where `served_model_name` is not set.
    """
    named = engine.model_config.served_model_name
    return [public_model_name(name) for name in ([named] if isinstance(named, str) else named)]


def template_renderer(engine: VLLMEngine, split_special_tokens: SplitSpecialTokens) -> TemplateRenderer:
    config = engine.llm.model_config
    # One of its own: vLLM's threads use theirs meanwhile.
    tokenizer = TransformersChatTokenizer.load(
        config.tokenizer,
        config.model,
        split_special_tokens=split_special_tokens,
        hub=FromHub(config.revision, config.tokenizer_revision, config.trust_remote_code),
    )
    return TemplateRenderer(tokenizer, config.max_model_len)


def current_version(engine: VLLMEngine, policy: str | None) -> str:
    """The label of the weights with which the policy generates now. It has some, because its calls are refused else."""
    return label_of(policy, engine.weights.version_of(policy) or 0)


class ServingLayers:
    """vLLM's serving layers of one replica."""

    def __init__(
        self,
        engine: VLLMEngine,
        settings: ResponseSettings,
        sessions: "SessionStore | None",
        grammar_time_limit_s: float,
        split_special_tokens: SplitSpecialTokens,
        aborts: CallAborts,
    ) -> None:
        """`sessions` is where calls of sessions are recorded; `None` for a service that keeps none."""
        self._grammars = GrammarChecks(engine.llm.vllm_config, grammar_time_limit_s)
        self._sessions: SessionCallsInFlight | None = None
        images: ImagePrompts | None = None
        if sessions is not None or engine.images is not None:
            renderer = template_renderer(engine, split_special_tokens)
            if sessions is not None:
                self._sessions = SessionCallsInFlight(sessions, renderer, engine.interrupt, engine.image_tokens)
            if engine.images is not None:
                images = ImagePrompts(engine, renderer)
        client = RecordingClient(engine, self._grammars)
        self._app = serving_app(client, settings, aborts, partial(current_version, engine), images)

    def answer(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        """Yields the answer in parts. Closing the generator breaks the call off.

        Raises:
            GenerationRejected: it is a call of a session, and the service keeps none.
        """
        call = ServedCall(request)
        if request.session_id is not None:
            if self._sessions is None:
                raise GenerationRejected("The service keeps no sessions.")
            call.session = SessionCall(call, request.session_id, self._sessions)
        return answer_parts(self._app, call)

    def close(self) -> None:
        """Ends the processes that calls have started."""
        self._grammars.close()
