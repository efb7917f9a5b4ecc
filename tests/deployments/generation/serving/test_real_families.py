"""The calls and thoughts of model families in their own tokens: read from rollouts, and in sessions.

vLLM's own serving layers run over a scripted engine core, with the vendors' tokenizers and templates.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from deployments.generation.response_parser import ParserChoice, _VLLMResponseParser
from deployments.protocols.chat import ResponseToParse
from deployments.sessions.records import OpenSession
from rollout_client.contract.sessions import SessionRequest
from tests.deployments.chat.real_tokenizers import folder_of, wanted
from tests.deployments.chat.vendors import vendor
from tests.deployments.generation.serving.vllm_layers import Served
from tests.endurance.session_laws.forms import reserialized, with_whitespace, without_reasoning
from tests.virtual_time import runs

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
IN_SESSIONS = [name for name in FAMILIES if name not in ("gptoss", "mistral")]
"""vLLM knows models of gpt-oss by their type, not by their parsers, and renders their chats by itself; a template that
moves the tools takes none in a session."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
QUESTION = {"role": "user", "content": "Add one to 41."}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def model(name: str) -> Path:
        """The folder of a small model with the family's tokenizer."""
        folder = tmp_path_factory.mktemp(name)
        for file in folder_of(name).iterdir():
            shutil.copy(file, folder)
        hf = vendor(f"real {name}").hf
        sizes: Any = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=len(hf), eos_token_id=hf.eos_token_id, max_position_embeddings=4096, **sizes)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        named = json.loads((folder / "tokenizer_config.json").read_text())
        named["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        return folder

    return model


def served(folder: Path, name: str) -> Served:
    tools, reasoning = PARSERS[name]
    return Served(folder, tool_call_parser=tools, reasoning_parser=reasoning)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_of_a_rollout_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder_of(name)))
    one = vendor(f"real {name}")
    parser = _VLLMResponseParser(ParserChoice(str(folder_of(name)), *PARSERS[name], one.tokens.ends_of_turn))
    read = parser.parse(
        ResponseToParse([*one.ids_of(CALLS[name] + ("" if name == "gptoss" else one.family.end))], tools=[TOOL], turn=1)
    )
    assert read.parse_error is None
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in read.tool_calls] == [
        ("add", ARGUMENTS)
    ]
    assert (read.reasoning_content or "").strip() == (THOUGHT if THOUGHT in CALLS[name] else "")
    assert read.tool_calls[0]["id"] == "call00100"
    said = parser.parse(ResponseToParse([*one.ids_of("Just 42." + one.family.end)], tools=[TOOL]))
    assert (said.tool_calls, said.parse_error) == ([], None)


FORMS: dict[Callable[[Any], Any], list[str]] = {
    dict: [],
    without_reasoning: ["reasoning_content"],
    # vLLM hands over the arguments parsed: however their JSON was written, it says the same.
    reserialized: [],
    with_whitespace: ["content"],
}
"""How OpenAI's clients send a message back, and the fields that the drift report then names."""


@pytest.mark.parametrize("name", IN_SESSIONS)
@runs
async def test_a_session_goes_on_from_the_ids_of_its_calls(models: Callable[[str], Path], name: str) -> None:
    layers = served(models(name), name)
    for session, (form, fields) in enumerate(FORMS.items()):
        id_ = f"s{session}"
        await layers.store.open(OpenSession(id_, "", "", "http://service", SessionRequest()))
        made = layers.reply(CALLS[name])
        body: dict[str, Any] = {"messages": [QUESTION], "tools": [TOOL], "max_tokens": 100}
        _, first = await layers.answer("chat/completions", body, id_)
        message = first["choices"][0]["message"]
        shown = {key: message.get(key) for key in ("role", "content", "tool_calls")}
        sent = form({**shown, "reasoning_content": message.get("reasoning")})
        result = {"role": "tool", "content": "42", "tool_call_id": message["tool_calls"][0]["id"]}
        layers.reply("It is 42.")
        status, _ = await layers.answer("chat/completions", {**body, "messages": [QUESTION, sent, result]}, id_)
        assert status == 200
        asked, continued = layers.core.prompts[-2:]
        assert continued[: len(asked) + len(made)] == asked + made
        assert "42" in vendor(f"real {name}").text_of(continued[len(asked) + len(made) :])
        report = await layers.store.drift(id_, "")
        drifted = [(one.action, one.fields) for call in report.drift for one in call.messages]
        named = [field for field in fields if field != "reasoning_content" or message.get("reasoning")]
        assert drifted == ([("generated_ids", named)] if named else [])
        [sample] = (await layers.store.samples(id_, "")).samples
        flat = [token_id for one in sample.message_log for token_id in one.token_ids]
        assert flat[: len(continued)] == continued
