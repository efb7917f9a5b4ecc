"""The chat templates of vendors: what is appended to a response is what the template puts there, for each family.

Families whose templates TRL does not ship are here as short templates of our own that have their traits.
"""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import EnvironmentRejected, PromptRejected
from deployments.protocols.chat import ChatOptions
from rollout_client.contract.messages import PromptMessage
from tests.deployments.chat.vendors import (
    ALL,
    FAMILIES,
    OBJECT,
    REAL,
    Family,
    Vendor,
    call,
    marked,
    result,
    vendor,
    vendor_of_bytes,
)

pytestmark = pytest.mark.slow

ROOM = 100_000
CHAT = ChatOptions()
QUESTION = {"role": "user", "content": "Question"}
ANSWER = {"role": "assistant", "content": "Fine."}
SAID: dict[str, Any] = {"role": "user", "content": "Go on."}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A."}}},
    },
}


def appended(
    one: Vendor, messages: list[Any], response: str, calls: list[Any] | None = None, options: ChatOptions = CHAT
) -> str:
    """What is appended to a response whose text, special tokens included, is given."""
    observed = one.tokens.observations(messages, one.ids_of(response), options, ROOM, calls or [])
    return one.text_of([token_id for each in observed for token_id in each.token_ids])


KIMI_K3 = vendor_of_bytes(
    Family("<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", "", OBJECT, "<|end_of_msg|>"),
    """{%- macro end(tag) %}<|close|>{{ tag }}<|sep|>{% endmacro %}
{%- set ns = namespace(calls=[], index=0) %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{% set ns.calls = m.tool_calls or [] %}{% set ns.index = 0 %}
<|open|>message role="assistant"<|sep|><|open|>response<|sep|>{{ m.content }}{{ end('response') }}
{%- if ns.calls %}<|open|>tools<|sep|>{% for c in ns.calls %}<|open|>call tool="{{ c.function.name }}"<|sep|>
{%- for key, value in c.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}{{ end('call') }}{% endfor %}
{{- end('tools') }}{% endif %}
{%- elif m.role == 'tool' %}{% set name = (ns.calls[ns.index] or {}).function.name %}{% set ns.index = ns.index + 1 %}
{%- if not name %}{{ raise_exception('tool messages need a resolvable tool name') }}{% endif -%}
<|open|>message role="tool" tool="{{ name }}" index="{{ ns.index }}"<|sep|>{{ m.content }}
{%- else %}<|open|>message role="{{ m.role }}"<|sep|>{{ m.content }}{% endif %}{{ end('message') }}<|end_of_msg|>
{%- endfor %}{% if add_generation_prompt %}<|open|>message role="assistant"<|sep|><|open|>response<|sep|>{% endif %}""",
)
COMMAND_R7B = vendor_of_bytes(
    Family("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", end_of_calls="<|END_OF_TURN_TOKEN|>"),
    """{%- macro number(id) %}{% set ns = namespace(n=0) %}{% for m in messages %}{% for c in m.tool_calls or [] %}
{%- if c.id == id %}{{ ns.n }}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}{% endmacro %}
{%- for m in messages %}<|START_OF_TURN_TOKEN|>
{%- if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}
{%- elif m.role == 'tool' %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>
{{- '{"tool_call_id": "' + number(m.tool_call_id) + '", "results": {"0": ' + m.content | tojson + '}}' -}}
<|END_TOOL_RESULT|>
{%- elif m.tool_calls %}<|CHATBOT_TOKEN|><|START_ACTION|>{{ m.tool_calls | tojson }}<|END_ACTION|>
{%- else %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>
{%- endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>""",
)
MINIMAX_M2 = vendor_of_bytes(
    Family("<|end|>", arguments=OBJECT),
    """{%- set ns = namespace(name=none) %}
{%- for m in messages %}{% if m.role == 'tool' %}{% if ns.name is none %}
{{- raise_exception('Message has tool role, but there was no previous call!') }}{% endif -%}
<|tool|><response>{{ m.content }}</response>
{%- else %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<invoke>{{ c.function.name }}
{%- for key, value in c.function.arguments | items %}<p>{{ value }}</p>{% endfor %}</invoke>{% endfor %}
{%- set ns.name = (m.tool_calls or [])[-1].function.name if m.tool_calls else none %}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
)
MISTRAL_NEMO = vendor_of_bytes(
    Family("<|eos|>", arguments=OBJECT, text_before_calls=""),
    """{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{% if m.role == 'user' %}{% if tools is not none and (m == users[-1]) -%}
[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}
{%- elif m.role == 'tool' %}{% if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif -%}
[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}""",
)
OF_OUR_OWN = {"Kimi K3": KIMI_K3, "MiniMax M2": MINIMAX_M2, "Mistral Nemo": MISTRAL_NEMO}


@pytest.mark.parametrize("name", marked([*ALL, *OF_OUR_OWN]))
def test_what_is_appended_to_an_answer_is_what_the_template_puts_there(name: str) -> None:
    one = OF_OUR_OWN.get(name) or vendor(name)
    after = one.rendered([QUESTION, ANSWER, SAID]).partition(ANSWER["content"])[2]
    assert appended(one, [SAID], ANSWER["content"]) == after
    end = one.family.end
    assert end + appended(one, [SAID], ANSWER["content"] + end) == after


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=[pytest.mark.tokenizers] * (name in REAL))
        for name, family in (ALL | {name: one.family for name, one in OF_OUR_OWN.items()}).items()
        if family.arguments
        for count in ([1] if family.at_most_one_call else [1, 2])
    ],
)
def test_results_of_tools_are_appended_as_the_template_writes_them(name: str, count: int) -> None:
    one = OF_OUR_OWN.get(name) or vendor(name)
    calls = [call(place, tool, one.family.arguments) for place, tool in enumerate(["add", "sub"][:count])]
    results = [result(place, f"It is {place}.") for place in range(count)]
    answer = {"role": "assistant", "content": one.family.text_before_calls, "tool_calls": calls}
    whole = one.rendered([QUESTION, answer, *results])
    after = appended(one, results, "cut off", calls)
    assert whole.endswith(after)
    assert all(each["content"] in after for each in results)
    assert "41" not in after
    end = one.family.end_of_calls or one.family.end
    assert end + appended(one, results, "calls" + end, calls) == after
    # With calls that nobody read out of the response, they follow from the results.
    named = [{**each, "name": tool} for each, tool in zip(results, ["add", "sub"], strict=False)]
    assert appended(one, named, "cut off") == after


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gemma3", "refuses a message of role 'tool' after an answer: Conversation roles must alternate"),
        ("phi3", "drops messages of role 'tool' after an answer"),
    ],
)
def test_families_without_results_of_tools_refuse_them(name: str, problem: str) -> None:
    with pytest.raises(EnvironmentRejected, match=problem):
        appended(vendor(name), [result(0, "4", "add")], "calls", [call(0, "add", {})])


@pytest.mark.parametrize("name", ["gptoss", "llama3_1"])
def test_a_cut_result_that_is_written_as_json_shows_what_its_tokens_say(name: str) -> None:
    one = vendor(name)
    content = 'a\n"b"\t漢\\ \n'
    calls = [call(0, "add", one.family.arguments)]
    whole = one.text_of(one.tokens.observations([result(0, content)], [], CHAT, ROOM, calls)[0].token_ids)
    start = whole.index(json.dumps(content, ensure_ascii=False)) + 1
    for room in range(len(one.ids_of(whole))):
        [cut] = one.tokens.observations([result(0, content)], [], CHAT, room, calls)
        said = one.text_of(cut.token_ids).rstrip("\ufffd")[start:]
        written = [json.dumps(content[:length], ensure_ascii=False)[1:-1] for length in range(len(content) + 1)]
        assert cut.content == content[: max(length for length, text in enumerate(written) if said.startswith(text))]


RESULTS: list[Any] = [
    {"role": "tool", "content": " 42 ", "tool_call_id": "a", "name": "add"},
    {"role": "tool", "content": "", "tool_call_id": "b"},
    {"role": "tool", "content": "7", "tool_call_id": "c"},
    {"role": "user", "content": "Go on."},
]


@pytest.mark.parametrize("options", [CHAT, ChatOptions("raw")])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_several_messages_that_do_not_fit_are_cut_in_ids_and_text(name: str, options: ChatOptions) -> None:
    one = vendor(name)
    response = one.ids_of("calls" + one.family.end)
    whole = [each.token_ids for each in one.tokens.observations(RESULTS, response, options, ROOM)]
    ids = [token_id for each in whole for token_id in each]
    for room in range(len(ids)):
        cut = one.tokens.observations(RESULTS, response, options, room)
        assert [token_id for each in cut for token_id in each.token_ids] == ids[:room]
        assert [each.token_ids for each in cut[:-1]] == whole[: len(cut) - 1]
        assert [each.content for each in cut[:-1]] == [each["content"] for each in RESULTS[: len(cut) - 1]]
        last = RESULTS[len(cut) - 1]["content"]
        assert cut[-1].content in (last, last.strip()) or last.strip().startswith(cut[-1].content.strip())
        assert cut[-1].content.strip() in one.text_of([*cut[-1].token_ids])
        assert cut[-1].was_cut
        assert len(cut) == 1 or cut[-1].token_ids or not whole[len(cut) - 1]


def test_switches_and_tools_reach_prompts_and_observations() -> None:
    """Also where the generation prompt differs from the begin of an answer."""
    one, off = vendor("qwen3"), {"enable_thinking": False}
    options = ChatOptions(tools=[TOOL], chat_template_kwargs=off)
    [prompt] = one.tokens.prompt_ids([QUESTION], options, ROOM)
    assert one.text_of(prompt) == one.rendered([QUESTION], tools=[TOOL], **off)
    assert '"name": "add"' in one.text_of(prompt)
    after = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert appended(one, [SAID], "Fine." + one.family.end, options=options) == after


def test_families_that_drop_earlier_thoughts_keep_what_was_sampled() -> None:
    answer = {"role": "assistant", "content": "<think>\nThought.\n</think>\n\nFine."}
    dropping = [name for name in FAMILIES if "Thought." not in vendor(name).rendered([QUESTION, answer, SAID])]
    assert {"qwen3", "deepseekv3", "glm4moe"} < {*dropping}
    for one in map(vendor, dropping):
        response = answer["content"] + one.family.end
        assert appended(one, [SAID], response) == appended(one, [SAID], "Fine." + one.family.end)


system_and_user = [{"role": "system", "content": "Be brief."}, QUESTION]


@pytest.mark.parametrize("name", marked(name for name in ALL if name != "gemma"))
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_system_prompt_is_taken_with_and_without_tools(name: str, tools: list[Any] | None) -> None:
    one = vendor(name)
    if tools and one.family.moves_instructions:
        with pytest.raises(PromptRejected, match="moves the tools to the last message"):
            one.tokens.prompt_ids(system_and_user, ChatOptions(tools=tools), ROOM)
        return
    parts = one.tokens.prompt_ids(system_and_user, ChatOptions(tools=tools), ROOM)
    texts = [one.text_of(part) for part in parts]
    assert "".join(texts) == one.rendered(system_and_user, tools=tools)
    assert "Question" in texts[1]


texts = st.text(alphabet="ab é漢{<", min_size=1, max_size=8)
contents = st.one_of(texts, st.builds("<think>\n{}\n</think>\n\n{}".format, texts, texts))


@st.composite
def conversations(draw: st.DrawFn, family: Family, has_system: bool) -> list[Any]:
    chat: list[Any] = [{"role": "system", "content": draw(texts)}] if has_system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        chat.append({"role": "user", "content": draw(texts)})
        if family.arguments and draw(st.booleans()):
            calls = [call(place, "add", family.arguments) for place in range(1 if family.at_most_one_call else 2)]
            beside = "" if family.refuses_text_beside_calls else draw(st.sampled_from(["", "Hm."]))
            chat.append({"role": "assistant", "content": beside, "tool_calls": calls})
            chat.extend(result(place, draw(texts), "add") for place in range(len(calls)))
        chat.append({"role": "assistant", "content": draw(contents)})
    return [*chat, {"role": "user", "content": draw(texts)}]


@pytest.mark.parametrize("name", marked(ALL))
@given(data=st.data())
def test_messages_of_a_prompt_end_where_the_first_ones_alone_end(name: str, data: st.DataObject) -> None:
    one = vendor(name)
    chat = data.draw(conversations(one.family, name != "gemma"))
    whole = one.rendered(chat)
    parts = one.tokens.prompt_ids(chat, CHAT, ROOM)
    assert [token_id for part in parts for token_id in part] == one.ids_of(whole)
    for count in range(1, len(chat)):
        try:
            alone = one.rendered(chat[:count], False)
        except Exception:  # noqa: BLE001  # whatever the template raises: there is nothing to compare with
            continue
        if whole.startswith(alone):
            assert one.text_of([token_id for part in parts[:count] for token_id in part]) == alone


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("qwen3", "<|im_start|>assistant\n"),
        ("qwen3_5_think", "<|im_start|>assistant\n<think>\n"),
        ("gptoss", "<|start|>assistant"),
    ],
)
def test_the_generation_prompt_is_what_begins_a_response(name: str, prompt: str) -> None:
    assert vendor(name).text_of(vendor(name).tokens.generation_prompt(CHAT)) == prompt


@pytest.mark.parametrize(
    ("name", "ending", "after"),
    [
        ("qwen3", "<|endoftext|>", "\n<|im_start|>user\nGo on."),
        ("llama3_1", "<|eom_id|>", "<|start_header_id|>user<|end_header_id|>\n\nGo on."),
        ("gemma3", "<eos>", "\n<start_of_turn>user\nGo on."),
        ("gptoss", "<|return|>", "<|start|>user<|message|>Go on."),
        ("gptoss", "<|call|>", "<|start|>user<|message|>Go on."),
        ("cohere2", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Go on."),
        ("glm4moe", "<|observation|>", "<|user|>\nGo on."),
        ("glm4moe", "<|user|>", "\nGo on."),
    ],
)
def test_a_turn_that_ended_with_another_end_token_is_not_ended_again(name: str, ending: str, after: str) -> None:
    assert appended(vendor(name), [SAID], "Fine." + ending).startswith(after)


@pytest.mark.parametrize("count", [1, 2])
def test_results_are_refused_where_all_calls_of_a_chat_are_numbered(count: int) -> None:
    calls = [call(place, "add", {"a": 41}) for place in range(count)]
    with pytest.raises(EnvironmentRejected, match="numbers the calls of the whole conversation"):
        appended(COMMAND_R7B, [result(place, "4") for place in range(count)], "cut off", calls)


def test_a_result_is_known_by_the_id_of_its_call() -> None:
    assert 'tool="made_up"' in appended(KIMI_K3, [result(7, "It is 7.", "made_up")], "cut off")
    assert 'tool="sub"' in appended(KIMI_K3, [result(1, "R")], "cut off", [call(1, "sub", {})])


def test_the_part_of_an_ending_that_a_response_has_is_not_repeated() -> None:
    begun = "Fine.<|close|>response<|sep|>"
    assert appended(KIMI_K3, [SAID], begun).startswith("<|close|>message<|sep|><|end_of_msg|><|open|>")
    after_calls = "<|open|>tools<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert appended(KIMI_K3, [SAID], after_calls).startswith('<|open|>message role="user"')


def test_tools_that_a_template_writes_before_the_last_question_are_refused() -> None:
    with pytest.raises(PromptRejected, match="moves the tools to the last message"):
        MISTRAL_NEMO.tokens.prompt_ids([QUESTION], ChatOptions(tools=[TOOL]), ROOM)
    [ids] = MISTRAL_NEMO.tokens.prompt_ids([QUESTION], CHAT, ROOM)
    assert MISTRAL_NEMO.text_of(ids) == "[INST]Question[/INST]"


@pytest.mark.parametrize("name", ["phi3", "phi3_5"])
def test_a_template_that_ends_the_text_early_does_not_move_tools(name: str) -> None:
    [ids] = vendor(name).tokens.prompt_ids([QUESTION], ChatOptions(tools=[TOOL]), ROOM)
    assert vendor(name).text_of(ids) == vendor(name).rendered([QUESTION])


WRITES_CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
WRITES_PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        # Kimi K2: a content that is no text is a list of parts.
        f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{WRITES_PARTS}{{% endif %}}{WRITES_CALLS}",
        # MiniMax M2: it writes `None`.
        f"{{{{ m.content }}}}{WRITES_CALLS}",
        # The first DeepSeek R1: calls are written only if the content is null.
        f"{{% if m.content is none %}}{WRITES_CALLS}{{% else %}}{{{{ m.content }}}}{{% endif %}}",
    ],
)
@pytest.mark.parametrize("without_text", [{}, {"content": None}])
def test_calls_without_a_text_are_written_by_each_template(template: str, without_text: dict[str, None]) -> None:
    framed = "{% for m in messages %}<|{{ m.role }}|>" + template + "<|end|>{% endfor %}"
    one = vendor_of_bytes(Family("<|end|>"), framed + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    chat = [QUESTION, {"role": "assistant", **without_text, "tool_calls": [call(0, "add", {})]}, result(0, "4")]
    parts = one.tokens.prompt([PromptMessage.model_validate(message) for message in chat], CHAT, ROOM)
    texts = [one.text_of([*part.token_ids]) for part in parts]
    assert texts == ["<|user|>Question<|end|>", "<|assistant|>(add)<|end|>", "<|tool|>4<|end|><|assistant|>"]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss", "glm4moe"])
def test_empty_results_are_no_dropped_ones(name: str) -> None:
    one = vendor(name)
    after = appended(one, [result(0, "", "add")], "calls", [call(0, "add", one.family.arguments)])
    assert re.search("tool|observation|ipython|functions", after)
