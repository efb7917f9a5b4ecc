"""vLLM's own parsers, over texts that models write and texts that they should not."""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_harmony import HarmonyError  # type: ignore[import-untyped]
from transformers import AutoTokenizer
from vllm.entrypoints.openai.parser import harmony_utils
from vllm.parser.harmony import HarmonyParser

from deployments.generation import response_parser
from deployments.generation.response_parser import ParserChoice, ParserUnusable, _VLLMResponseParser, parse_all, prepare
from deployments.protocols.chat import ParsedResponse, ResponseToParse
from tests.paths import TINY_MODEL

pytestmark = pytest.mark.slow
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"numbers": [41, 1]}}\n</tool_call>'


@dataclass(frozen=True)
class Kind:
    """The tiny model's tokenizer with the markers as tokens, special ones or plain ones, and its parser."""

    folder: Path
    tokenizer: Any
    parser: _VLLMResponseParser

    def response(self, text: str, **fields: Any) -> ResponseToParse:
        return ResponseToParse(ids(self.tokenizer, text), **fields)

    def parse(self, text: str, **fields: Any) -> ParsedResponse:
        return self.parser.parse(self.response(text, **fields))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    made = {}
    for kind in ("special", "plain"):
        folder = tmp_path_factory.mktemp(kind)
        tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
        tokenizer.add_tokens(MARKERS, special_tokens=kind == "special")
        tokenizer.save_pretrained(folder)
        shutil.copy(TINY_MODEL / "config.json", folder)
        choice = ParserChoice(str(folder), "hermes", "qwen3", frozenset({tokenizer.eos_token_id}))
        made[kind] = Kind(folder, tokenizer, _VLLMResponseParser(choice))
    return made


@pytest.fixture(autouse=True)
def handlers_of_other_parsers() -> Iterator[None]:
    """`prepare` removes them, because a worker process has one parser."""
    logger = logging.getLogger("vllm")
    handlers = list(logger.handlers)
    yield
    logger.handlers[:] = handlers


def ids(tokenizer: Any, text: str, ended: bool = True) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), *([tokenizer.eos_token_id] if ended else [])]


@pytest.mark.parametrize("kind", ["special", "plain"])
def test_calls_and_reasoning_are_read_by_special_and_by_plain_markers(kinds: dict[str, Kind], kind: str) -> None:
    parsed = kinds[kind].parse(f"<think>Two numbers.</think>I add them. {CALL}{CALL}", tools=[ADD], turn=2)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"numbers": [41, 1]}'}}
    assert parsed.tool_calls == [{"id": "call00200", **call}, {"id": "call00201", **call}]
    assert (parsed.reasoning_content, parsed.parsed_content) == ("Two numbers.", "I add them. ")
    assert parsed.parse_error is None


def test_calls_are_read_also_where_the_sample_names_no_tools(kinds: dict[str, Kind]) -> None:
    for tools in (None, [], [{"name": "add"}]):
        [call] = kinds["plain"].parse(f"</think>{CALL}", tools=tools).tool_calls
        assert call["function"]["name"] == "add"


def test_a_call_that_is_not_json_is_an_error_that_says_why(kinds: dict[str, Kind]) -> None:
    parsed = kinds["plain"].parse('</think><tool_call>{"name": "add", "arguments": {</tool_call>', tools=[ADD])
    assert (parsed.tool_calls, parsed.parsed_content) == ([], None)
    assert str(parsed.parse_error).startswith("JSONDecodeError: ")
    following = kinds["plain"].parse(f"</think>{CALL}", tools=[ADD])
    assert (following.parse_error, len(following.tool_calls)) == (None, 1)


@pytest.mark.parametrize(
    ("parser", "text", "call_id"),
    [
        ("llama3_json", '{"name": "add", "parameters": {"numbers": [41, 1]}}', "call00300"),
        ("pythonic", "[add(numbers=[41, 1])]", "call00300"),
        ("qwen3_json", CALL, "call00300"),
        ("mistral", '[TOOL_CALLS]add{"numbers": [41, 1]}', "call00300"),
        ("hunyuan_a13b", '<tool_calls>[{"name": "add", "arguments": {"numbers": [41, 1]}}]</tool_calls>', "call00300"),
        ("xlam", '[{"name": "add", "arguments": {"numbers": [41, 1]}}]', "call00300"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>"
            '{"numbers": [41, 1]}<|tool_call_end|><|tool_calls_section_end|>',
            "functions.add:7",
        ),
    ],
)
def test_formats_give_the_same_call_with_the_models_id_or_one_of_its_place(
    tmp_path: Path, parser: str, text: str, call_id: str
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
    sections = ["tool_calls_section", "tool_call", "tool_call_argument"]
    tokenizer.add_tokens(
        [*MARKERS, "[TOOL_CALLS]", "[ARGS]", *(f"<|{name}_{end}|>" for name in sections for end in ("begin", "end"))],
        special_tokens=True,
    )
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(TINY_MODEL / "config.json", tmp_path)
    parsers = _VLLMResponseParser(ParserChoice(str(tmp_path), parser, None))
    response = ResponseToParse(ids(tokenizer, text, ended=False), tools=[ADD], turn=3)
    calls = [call for _ in range(2) for call in parsers.parse(response).tool_calls]
    assert [(call["id"], call["function"]["name"]) for call in calls] == [(call_id, "add")] * 2
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"numbers": [41, 1]}] * 2


pieces = st.sampled_from(
    [*MARKERS, '{"name": "add", ', '"arguments": ', "{}", "}", '"', "[1", "add", "\\u12", "\n", "é"]
)


@given(st.lists(pieces, max_size=12).map("".join))
def test_whatever_a_model_writes_is_parsed_or_an_error(kinds: dict[str, Kind], text: str) -> None:
    parsed = response_parser.parsed(kinds["plain"].parser, kinds["plain"].response(text, tools=[ADD]))
    for call in parsed.tool_calls:
        assert call["function"]["name"] is not None
        json.loads(call["function"]["arguments"])
    has_found = bool(parsed.tool_calls) or parsed.reasoning_content is not None
    assert (parsed.parsed_content is not None) == has_found


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (("no such", None), "no such"),
        ((None, "deepseek_r1"), "could not locate think start/end tokens"),
        ((None, None), "neither tool_call_parser nor reasoning_parser is set"),
        (("hf", None), "response_template"),
    ],
)
def test_a_parser_that_cannot_work_is_refused(choice: tuple[str | None, str | None], says: str) -> None:
    prepare(ParserChoice(str(TINY_MODEL), *choice))
    with pytest.raises(ParserUnusable, match=says):
        parse_all([])


@pytest.mark.parametrize("choice", [("openai", "openai_gptoss"), ("openai", None), (None, "openai_gptoss")])
def test_the_parsers_of_gpt_oss_need_the_harmony_vocabulary(
    monkeypatch: pytest.MonkeyPatch, choice: tuple[str | None, str | None]
) -> None:
    def without_network() -> None:
        raise HarmonyError("error downloading or loading vocab file")

    monkeypatch.setattr(harmony_utils, "get_encoding", without_network)
    with pytest.raises(ParserUnusable, match="HarmonyError: error downloading or loading vocab file"):
        _VLLMResponseParser(ParserChoice(str(TINY_MODEL), *choice))
    monkeypatch.setattr(harmony_utils, "get_encoding", lambda: None)
    monkeypatch.setattr(HarmonyParser, "parse", lambda *_, **__: ("why", "42", None))
    parser = _VLLMResponseParser(ParserChoice(str(TINY_MODEL), *choice))
    assert parser.parse(ResponseToParse([52])) == ParsedResponse([], "why", "42"), "not a class that raises"


def test_half_of_a_surrogate_pair_is_an_error(kinds: dict[str, Kind]) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"numbers": "\\ud800"}}</tool_call>'
    parsed = response_parser.parsed(kinds["plain"].parser, kinds["plain"].response(text, tools=[ADD]))
    assert parsed == ParsedResponse(parse_error=parsed.parse_error)
    assert "surrogates not allowed" in (parsed.parse_error or "")


CALLS = {
    **{"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
    "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
}
THINKING = {"open": "<think>", "close": "</think>"}
TEMPLATE = {"start_anchor": "<|assistant|>\n", "fields": {"thinking": THINKING, "content": {}, "tool_calls": CALLS}}


def test_the_hf_parser_reads_what_the_template_of_the_tokenizer_says(kinds: dict[str, Kind], tmp_path: Path) -> None:
    tokenizer = kinds["plain"].tokenizer
    shutil.copytree(kinds["plain"].folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "response_template": TEMPLATE}))
    templated = _VLLMResponseParser(ParserChoice(str(tmp_path), "hf", "hf", frozenset({tokenizer.eos_token_id})))
    for begun, thought in (("", "<think>Two numbers."), ("<think>", "Two numbers.")):
        prompt = ids(tokenizer, f"<|user|>\n41 + 1?<|end|>\n<|assistant|>\n{begun}", ended=False)
        said = ids(tokenizer, f"{thought}</think>I add them. {CALL}")
        parsed = templated.parse(ResponseToParse(said, prompt_token_ids=prompt, tools=[ADD], turn=2))
        [call] = parsed.tool_calls
        assert call["function"] == {"name": "add", "arguments": '{"numbers": [41, 1]}'}
        assert call["id"] == "call00200"
        assert (parsed.reasoning_content, parsed.parsed_content) == ("Two numbers.", "I add them. ")
