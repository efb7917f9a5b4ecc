"""The same conversation, however an SDK writes it: taken inside a session and outside, and one branch of a session."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.generation.serving.vllm_layers import Served
from tests.paths import SMALL_MODEL
from tests.virtual_time import runs

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
QUESTION = {"role": "user", "content": "2 + 3?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
RESULT = {"role": "tool", "content": "5", "tool_call_id": "abcdefghi"}
FIRST_PART = (
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{{ message['content'][0]['text'] }}{%- endif -%}"
)
"""As Devstral's template reads an answer; of an empty list it says "list object has no element 0"."""
CONTENTS: list[dict[str, Any]] = [
    {"content": ""},
    {"content": None},
    {},
    {"content": []},
    {"content": [{"type": "text", "text": ""}]},
]


def asking(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages], "tools": TOOLS, "max_completion_tokens": 4}


@pytest.fixture(scope="module")
def strict_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with a template that takes the first part of an answer's content."""
    folder = tmp_path_factory.mktemp("strict") / "model"
    shutil.copytree(SMALL_MODEL, folder)
    template = folder / "chat_template.jinja"
    before, answer, after = template.read_text().partition("{{- text -}}\n{%- for call")
    assert answer
    template.write_text(f"{before}{FIRST_PART}\n{{%- for call{after}")
    return folder


@runs
async def test_an_empty_content_beside_calls_is_one_message_in_all_forms(strict_model: Path) -> None:
    served = await Served(strict_model, tool_call_parser="hermes").open()
    for content in CONTENTS:
        served.reply("5")
        body = asking(QUESTION, {"role": "assistant", **content, "tool_calls": CALLS}, RESULT)
        await served.answered("chat/completions", body, "s")
    prompts = [served.core.get_tokenizer().decode(ids) for ids in served.core.prompts]
    assert prompts == [prompts[0]] * len(CONTENTS)
    drift = [message.action for call in (await served.store.drift("s", "")).drift for message in call.messages]
    # The first call alone brings the answer, which the session has not generated.
    assert drift == ["rendered_anew"]
