"""vLLM's parsers of tool calls and reasoning, as its servers use them, for one response at a time.

Runs in worker processes of the ingress: `service/remote/response_parser.py` is the other half. Imports vLLM only when a
parser is made.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from deployments.protocols.chat import FROM_MAIN, FromHub, ParsedResponse, ResponseToParse

_HARMONY = {"openai", "openai_gptoss"}
"""The parsers of gpt-oss. Both only say that `HarmonyParser` reads its responses."""
PRELOADED = ("vllm.parser.parser_manager", "vllm.tool_parsers", "vllm.reasoning", "vllm.tokenizers", __name__)
"""Modules that a worker process imports before its first call."""
WHOLE_PROMPT = "hf"
"""The one parser of vLLM that looks at the tokens before the response."""
_NUMBERED_ID = "functions."
"""How ids begin that vLLM makes of a call's name and number, as one family of models writes them."""
_PROBE_TOOL = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}
_LONGEST_ERROR = 500
"""Characters of the reason why a response was not parsed."""


class ParserUnusable(Exception):
    """vLLM has no such parser, or it does not work with the model's tokenizer. The message says which."""


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """Which parsers read the responses of which model."""

    tokenizer: str
    tool_call_parser: str | None
    reasoning_parser: str | None
    ends_of_turn: frozenset[int] = frozenset()
    """Tokens that end a response and are no part of its text."""
    hub: FromHub = FROM_MAIN

    @property
    def is_harmony(self) -> bool:
        return bool(_HARMONY & {self.tool_call_parser, self.reasoning_parser})


class _LoggedErrors(logging.Handler):
    """vLLM's parsers log what they cannot read, and go on as if it were text: keeps what was logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _VLLMResponseParser:
    """Holds the tokenizer and the parsers' classes; the parser of each response is a new one, as in vLLM's servers."""

    def __init__(self, choice: ParserChoice) -> None:
        """Raises `ParserUnusable`."""
        from vllm.parser.parser_manager import ParserManager
        from vllm.tokenizers import get_tokenizer

        try:
            self._tokenizer: Any = get_tokenizer(
                choice.tokenizer,
                tokenizer_mode="hf",
                revision=choice.hub.for_tokenizer,
                trust_remote_code=choice.hub.trust_remote_code,
            )
            parser_class = ParserManager.get_parser(
                choice.tool_call_parser,
                choice.reasoning_parser,
                enable_auto_tools=choice.tool_call_parser is not None,
                model_name=choice.tokenizer,
                is_harmony=choice.is_harmony,
                tokenizer=self._tokenizer,
            )
            if choice.is_harmony:
                from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

                # It has a vocabulary of its own, and takes a missing one for a response that broke off.
                get_encoding()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ParserUnusable(f"{type(error).__name__}: {error}".rstrip(".")) from error
        if parser_class is None:
            raise ParserUnusable("neither tool_call_parser nor reasoning_parser is set")
        self._parser_class = parser_class
        self._logged = _LoggedErrors()
        logging.getLogger("vllm").addHandler(self._logged)
        # A parser whose markers are special tokens asks its server not to leave them out.
        probe = self._parser_class(self._tokenizer, None).adjust_request(_request_of(orjson.dumps([_PROBE_TOOL])))
        self._skip_special_tokens = bool(getattr(probe, "skip_special_tokens", True))
        self._ends_of_turn = choice.ends_of_turn

    def parse(self, response: ResponseToParse) -> ParsedResponse:
        """Raises what the parser raises."""
        request = _request_of(orjson.dumps(response.tools) if response.tools else b"")
        parser = self._parser_class(
            self._tokenizer, request.tools, chat_template_kwargs=response.chat_template_kwargs or {}
        )
        if response.prompt_token_ids:
            parser.set_prompt_token_ids(response.prompt_token_ids)
        token_ids = list(response.token_ids)
        if token_ids and token_ids[-1] in self._ends_of_turn:
            token_ids.pop()
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        self._logged.records.clear()
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        error = _error_of(self._logged.records[0]) if self._logged.records else None
        if not calls and not reasoning:
            return ParsedResponse(parse_error=error)
        return ParsedResponse(_named_calls(calls or (), response.turn, text), reasoning or None, content or "", error)


@lru_cache(maxsize=64)
def _request_of(tools: bytes) -> Any:
    """The request that a parser asks about tools, given as JSON or as nothing. No parser changes it.

    Tools that are not in OpenAI's form, which a chat template may accept, are left out: then a parser takes any call.
    """
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    # Null in place of "auto", which vLLM permits beside tools alone: calls are read whether or not tools are named.
    without: dict[str, Any] = {"messages": [{"role": "user", "content": ""}], "tool_choice": None}
    if not tools:
        return ChatCompletionRequest.model_validate(without)
    try:
        return ChatCompletionRequest.model_validate({**without, "tools": orjson.loads(tools), "tool_choice": "auto"})
    except (ValidationError, ValueError):
        return ChatCompletionRequest.model_validate(without)


def _named_calls(calls: Sequence[Any], turn: int, text: str) -> list[dict[str, Any]]:
    """The calls in OpenAI's form. One without an id of its own gets one that its turn and place determine.

    An id is the model's own if it stands in the text of the response: vLLM's parsers draw others, in several forms. The
    one that is made here has nine letters and digits, because the templates of one family of models refuse others.
    """
    return [
        {
            "id": call.id if _is_own(call.id, text) else f"call{turn:03}{place:02}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(calls)
    ]


def _is_own(call_id: str | None, text: str) -> bool:
    return call_id is not None and call_id != "" and (call_id in text or call_id.startswith(_NUMBERED_ID))


def _error_of(record: logging.LogRecord) -> str:
    """The message that a parser logged, with its exception."""
    raised = record.exc_info[1] if record.exc_info else None
    said = record.getMessage() if raised is None else f"{type(raised).__name__}: {raised}"
    return said[:_LONGEST_ERROR]


_parser: _VLLMResponseParser | ParserUnusable | None = None
"""The parser of this worker process."""


def prepare(choice: ParserChoice) -> None:
    """Makes the parser of this worker process, or remembers why there is none."""
    global _parser
    try:
        import vllm.logger  # noqa: F401 - it sets the handlers that are removed next

        # They would print a traceback for each call that is not well-formed.
        logging.getLogger("vllm").handlers.clear()
        _parser = _VLLMResponseParser(choice)
    except ParserUnusable as error:
        _parser = error


def parse_all(responses: Sequence[ResponseToParse]) -> list[ParsedResponse]:
    """Parses in this worker process, which `prepare` has prepared.

    Raises:
        ParserUnusable: there is no parser.
    """
    if isinstance(_parser, ParserUnusable):
        raise _parser
    assert _parser is not None
    return [parsed(_parser, response) for response in responses]


def parsed(parser: _VLLMResponseParser, response: ResponseToParse) -> ParsedResponse:
    try:
        found = parser.parse(response)
        # Raises for half of a surrogate pair, which a model's JSON can spell: no answer could be written with it.
        orjson.dumps([found.tool_calls, found.reasoning_content, found.parsed_content])
        return found
    except Exception as error:  # noqa: BLE001 - a parser raises anything on what a model writes
        return ParsedResponse(parse_error=f"{type(error).__name__}: {error}"[:_LONGEST_ERROR])
