"""Answers calls of OpenAI's and Anthropic's APIs beside one engine."""

from collections.abc import AsyncGenerator

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.failures import GenerationRejected
from deployments.generation.engine import VLLMEngine
from deployments.generation.response_settings import ResponseSettings
from deployments.generation.serving.app import serving_app
from deployments.generation.serving.asgi_calls import answer_parts
from deployments.generation.serving.grammar_checks import GrammarChecks
from deployments.generation.serving.recording_client import RecordingClient
from deployments.generation.serving.served_call import ServedCall
from deployments.generation.serving.session_answers import session_answer_parts
from deployments.generation.serving.session_calls_in_flight import SessionCallsInFlight
from deployments.generation.serving.template_renderer import TemplateRenderer
from deployments.protocols.chat import SplitSpecialTokens
from deployments.protocols.model_server import ServedPart, ServedRequest
from deployments.sessions.store_client import SessionStoreClient


class ServingLayers:
    """Of one replica."""

    def __init__(
        self,
        engine: VLLMEngine,
        settings: ResponseSettings,
        sessions: SessionStoreClient | None,
        grammar_time_limit_s: float,
        split_special_tokens: SplitSpecialTokens,
    ) -> None:
        """Args: `sessions` is where calls of sessions are recorded; `None` for a service that keeps none."""
        self._grammars = GrammarChecks(engine.llm.vllm_config, grammar_time_limit_s)
        self._app = serving_app(RecordingClient(engine, self._grammars), settings)
        self._sessions: SessionCallsInFlight | None = None
        if sessions is not None:
            config = engine.llm.model_config
            # One of its own: vLLM's threads use theirs meanwhile.
            tokenizer = TransformersChatTokenizer.load(
                config.tokenizer, config.model, split_special_tokens=split_special_tokens
            )
            renderer = TemplateRenderer(tokenizer, config.max_model_len)
            self._sessions = SessionCallsInFlight(sessions, renderer, engine.interrupt)

    def answer(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        """Yields the answer in parts. Closing the generator breaks the call off.

        Raises:
            GenerationRejected: it is a call of a session, and the service keeps none.
        """
        if request.session_id is None:
            return answer_parts(self._app, ServedCall(request))
        if self._sessions is None:
            raise GenerationRejected("The service keeps no sessions.")
        return session_answer_parts(self._app, request, request.session_id, self._sessions)

    def close(self) -> None:
        """Ends the processes that calls have started."""
        self._grammars.close()
