"""vLLM's own servers of OpenAI's, Anthropic's and vLLM's APIs and SGLang's `/generate` over one engine, and the
replica's entry to them.

vLLM's serving objects are called directly, without its router and application (`endpoints.py`).
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request
from pydantic import TypeAdapter
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeRequest,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.failures import GenerationRejected
from deployments.generation.engine import VLLMEngine, served_names
from deployments.generation.serving.answered_layers import (
    AnsweredChat,
    AnsweredCompletions,
    AnsweredMessages,
    AnsweredResponses,
    AnsweredTokens,
)
from deployments.generation.serving.call_aborts import CallAborts
from deployments.generation.serving.endpoints import VLLMEndpoint, answer_parts
from deployments.generation.serving.grammar_checks import GrammarChecks
from deployments.generation.serving.recording_client import RecordingClient
from deployments.generation.serving.served_call import CURRENT_CALL, ServedCall
from deployments.generation.serving.session_call import SessionCall, SessionCallClient
from deployments.generation.serving.session_renderer import SessionOnlineRenderer
from deployments.generation.serving.sglang_generate import AnsweredGenerate
from deployments.generation.serving.sglang_requests import SGLangRequest
from deployments.generation.serving.template_renderer import TemplateRenderer
from deployments.generation.settings import EngineSettings, ResponseSettings
from deployments.protocols.chat import FromHub, SplitSpecialTokens
from deployments.protocols.model_server import Endpoint, ServedPart, ServedRequest, public_model_name
from deployments.upstream.vllm.plugin import install_in_servers
from rollout_client.contract.base import label_of

if TYPE_CHECKING:
    from deployments.sessions.store import SessionStore

REQUESTS = (
    *(GenerateRequest, SGLangRequest),
    *(ChatCompletionRequest, CompletionRequest, ResponsesRequest),
    *(AnthropicMessagesRequest, AnthropicCountTokensRequest),
    *(TokenizeCompletionRequest, TokenizeChatRequest, DetokenizeRequest),
)
_PLAIN_TEMPLATE: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
"""The model's own chat template."""


class _ServedModels(OpenAIServingModels):
    """Takes, besides the names that it lists, the model's path and the name of the call's own policy."""

    def is_base_model(self, model_name: str) -> bool:
        policy = CURRENT_CALL.get().request.policy
        return super().is_base_model(model_name) or model_name in (policy, self.model_config.model)


def _endpoints(
    client: RecordingClient,
    settings: ResponseSettings,
    aborts: CallAborts,
    vllm_engine: VLLMEngine,
    template: TemplateRenderer | None,
) -> dict[Endpoint, VLLMEndpoint]:
    """The endpoints over vLLM's serving objects. Making these takes tenths of a second.

    Args:
        settings: its parsers, so that answers and rollouts are parsed alike.
        aborts: of calls of SGLang's API.
        template: `None` for a service without sessions whose engine takes no images.
    """
    # Before the types of bodies are used: they are patched.
    install_in_servers(REQUESTS, with_messages=(ChatCompletionRequest, TokenizeChatRequest))
    engine: Any = client
    root = public_model_name(engine.model_config.model)
    paths = [BaseModelPath(name=name, model_path=root) for name in served_names(engine.model_config)]
    models = _ServedModels(engine_client=engine, base_model_paths=paths)
    parsers: dict[str, Any] = {
        "enable_auto_tools": settings.tool_call_parser is not None,
        "tool_parser": settings.tool_call_parser,
        "reasoning_parser": settings.reasoning_parser or "",
    }
    renderer = SessionOnlineRenderer(
        engine.model_config, engine.renderer, request_logger=None, **_PLAIN_TEMPLATE, **parsers
    )
    if vllm_engine.images is not None and template is not None:
        renderer.engine, renderer.template = vllm_engine, template
    renderer.warmup()
    shared: dict[str, Any] = {"request_logger": None, **_PLAIN_TEMPLATE, **parsers}
    of_chat: dict[str, Any] = {"response_role": "assistant", "online_renderer": renderer, **shared}
    chat = AnsweredChat(engine, models, **of_chat)
    completions = AnsweredCompletions(engine, models, online_renderer=renderer, request_logger=None)
    # Asking the template how it takes an effort of none would cost renderings in the first request.
    messages = AnsweredMessages(engine, models, **of_chat, disabled_thinking_effort="none")
    responses = AnsweredResponses(engine, models, renderer, **shared)
    tokens = AnsweredTokens(engine, models, renderer, request_logger=None)
    generate = AnsweredGenerate(engine, models, renderer, aborts, partial(_current_version, vllm_engine))
    tokenization = ServingTokenization(models, renderer, **_PLAIN_TEMPLATE)

    async def show_models(_request: None, _raw_request: Request) -> Any:
        return await models.show_available_models()

    def endpoint(body: Any, answer: Callable[..., Awaitable[Any]], **written: Any) -> VLLMEndpoint:
        return VLLMEndpoint(answer, TypeAdapter(body), **written)

    anthropic: dict[str, Any] = {"dumped": {"exclude_none": True}, "error": translate_error_response}
    return {
        "chat/completions": endpoint(ChatCompletionRequest, chat.create_chat_completion),
        "completions": endpoint(CompletionRequest, completions.create_completion),
        "responses": endpoint(ResponsesRequest, responses.create_responses, dumped={"mode": "json", "by_alias": True}),
        "messages": endpoint(AnthropicMessagesRequest, messages.create_messages, **anthropic),
        "messages/count_tokens": endpoint(AnthropicCountTokensRequest, messages.count_tokens, **anthropic),
        "models": VLLMEndpoint(show_models),
        "tokenize": endpoint(TokenizeRequest, tokenization.create_tokenize),
        "detokenize": endpoint(DetokenizeRequest, tokenization.create_detokenize),
        "generate": endpoint(SGLangRequest, generate.answer),
        "inference/v1/generate": endpoint(GenerateRequest, tokens.serve_tokens),
    }


def _template_renderer(engine: VLLMEngine, split_special_tokens: SplitSpecialTokens) -> TemplateRenderer:
    config = engine.llm.model_config
    # One of its own: vLLM's threads use theirs meanwhile.
    tokenizer = TransformersChatTokenizer.load(
        config.tokenizer,
        config.model,
        split_special_tokens=split_special_tokens,
        hub=FromHub(config.revision, config.tokenizer_revision, config.trust_remote_code),
    )
    return TemplateRenderer(tokenizer, config.max_model_len)


def _current_version(engine: VLLMEngine, policy: str | None) -> str:
    """The label of the weights with which the policy generates now. It has some, because its calls are refused else."""
    return label_of(policy, engine.weights.version_of(policy) or 0)


class ServingLayers:
    """vLLM's serving layers of one replica."""

    def __init__(
        self,
        engine: VLLMEngine,
        settings: EngineSettings,
        responses: ResponseSettings,
        sessions: "SessionStore | None",
        aborts: CallAborts,
    ) -> None:
        """`sessions` is where calls of sessions are recorded; `None` for a service that keeps none."""
        self._grammars = GrammarChecks(engine.llm.vllm_config, settings.grammar_time_limit_s)
        self._sessions: SessionCallClient | None = None
        template: TemplateRenderer | None = None
        if sessions is not None or engine.images is not None:
            template = _template_renderer(engine, settings.split_special_tokens)
            if sessions is not None:
                self._sessions = SessionCallClient(sessions, template, engine.interrupt, engine.image_tokens)
        self._endpoints = _endpoints(RecordingClient(engine, self._grammars), responses, aborts, engine, template)

    def answer(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        """Yields the answer in parts. Closing the generator breaks the call off.

        Raises:
            GenerationRejected: it is a call of a session, and the service keeps none.
        """
        session = None
        if request.session_id is not None:
            if self._sessions is None:
                raise GenerationRejected("The service keeps no sessions.")
            session = SessionCall(request, request.session_id, self._sessions)
        return answer_parts(self._endpoints[request.endpoint].answered, ServedCall(request, session))

    def close(self) -> None:
        """Ends the processes that calls have started."""
        self._grammars.close()
