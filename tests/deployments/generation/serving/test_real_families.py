"""The calls and thoughts of model families, read from rollouts in the vendors' own tokens."""

import json
from typing import Any

import pytest

from deployments.generation.response_parser import ParserChoice, _VLLMResponseParser
from deployments.protocols.chat import ResponseToParse
from tests.deployments.chat.real_tokenizers import folder_of, wanted
from tests.deployments.chat.vendors import vendor

pytestmark = [pytest.mark.slow, pytest.mark.tokenizers]

THOUGHT = "I add."
ARGUMENTS = {"a": 41, "b": "é"}
PARSERS: dict[str, tuple[str, str | None]] = {
    "qwen3": ("hermes", "qwen3"),
    "llama3_1": ("llama3_json", None),
    "deepseek_v3": ("deepseek_v3", None),
    "mistral": ("mistral", None),
    "gptoss": ("openai", "openai_gptoss"),
}
"""Of tool calls and of reasoning. Gemma 3 has neither."""
CALLS = {
    "qwen3": f"<think>\n{THOUGHT}\n</think>\n\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 41, "b": "é"}}\n</tool_call>',
    "llama3_1": '{"name": "add", "parameters": {"a": 41, "b": "é"}}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a":41,"b":"é"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 41, "b": "é"}, "id": "abcdefghi"}]',
    "gptoss": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 41, "b": "é"}<|call|>',
}
FAMILIES = [name for name in PARSERS if name in wanted()]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_of_a_rollout_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder_of(name)))
    one = vendor(f"real {name}")
    parser = _VLLMResponseParser(ParserChoice(str(folder_of(name)), *PARSERS[name], one.tokens.ends_of_turn))
    read = parser.parse(
        ResponseToParse([*one.ids_of(CALLS[name] + ("" if name == "gptoss" else one.family.end))], tools=[TOOL], turn=1)
    )
    assert read.parse_error is None
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in read.tool_calls]
    assert calls == [("add", ARGUMENTS)]
    assert (read.reasoning_content or "").strip() == (THOUGHT if THOUGHT in CALLS[name] else "")
    assert read.tool_calls[0]["id"] == "call00100"
    said = parser.parse(ResponseToParse([*one.ids_of("Just 42." + one.family.end)], tools=[TOOL]))
    assert (said.tool_calls, said.parse_error) == ([], None)
