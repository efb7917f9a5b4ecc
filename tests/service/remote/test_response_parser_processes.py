"""The parsers in processes of their own, with vLLM in them and a tokenizer of a model."""

import asyncio

import pytest
from transformers import AutoTokenizer

from deployments.generation.response_parser import ParserUnusable
from deployments.generation.settings import ResponseSettings
from deployments.protocols.chat import ResponseToParse
from service.remote.response_parser import ProcessResponseParser
from tests.paths import TINY_MODEL
from tests.virtual_time import runs

# Several processes import vLLM one after the other.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
CALLS = ['<tool_call>{"name": "add", "arguments": {}}</tool_call>', "<tool_call>{</tool_call>", "plain"]


@runs
async def test_responses_are_parsed_in_processes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    settings = ResponseSettings(tool_call_parser="hermes", parser_processes=1)

    assert await ProcessResponseParser.start(ResponseSettings(), str(TINY_MODEL), frozenset()) is None
    parser = await ProcessResponseParser.start(settings, str(TINY_MODEL), frozenset())
    assert parser is not None
    responses = [ResponseToParse(tokenizer.encode(text, add_special_tokens=False), turn=1) for text in CALLS]
    called, broken, plain = await asyncio.gather(*map(parser.parse, responses))
    assert called.tool_calls == [
        {"id": "call00100", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    ]
    assert broken.parse_error is not None
    assert broken.parse_error.startswith("JSONDecodeError: ")
    assert plain.parse_error is None
    parser.close()
    of_other_model = ResponseSettings(reasoning_parser="deepseek_r1")
    with pytest.raises(ParserUnusable, match="could not locate think start/end tokens"):
        await ProcessResponseParser.start(of_other_model, str(TINY_MODEL), frozenset())
