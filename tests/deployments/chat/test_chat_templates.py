"""The chat formats of the common model families: what is appended is what the template would have rendered.

The templates are short ones of our own that frame messages as those families do.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AddedToken, AutoTokenizer

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.failures import EnvironmentRejected, PromptRejected
from deployments.protocols.chat import ChatOptions, UnsupportedTokenizer
from rollout_client.contract.messages import PromptMessage
from rollout_env import ChatMessage
from tests.deployments.chat.observed import observed
from tests.paths import TINY_MODEL

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL_TOKENS = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "qwen2_5": (None, "<|im_end|>", ["<|im_start|>"]),
    "qwen3": (None, "<|im_end|>", ["<|im_start|>"]),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]"]),
    "gemma": ("<bos>", "<end_of_turn>", ["<start_of_turn>"]),
}
ROOM = 10_000
CHAT = ChatOptions()

words = st.text(alphabet="ab é漢{<", max_size=8)
answers = words.map(str.strip)


def tokenizer_of(family: str) -> Any:
    bos, eos, others = SPECIAL_TOKENS[family]
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
    special = {"eos_token": eos, "additional_special_tokens": others} | ({"bos_token": bos} if bos else {})
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer


TOKENIZERS = {family: tokenizer_of(family) for family in SPECIAL_TOKENS}
CONVERSATIONS = {family: TransformersChatTokenizer(tokenizer) for family, tokenizer in TOKENIZERS.items()}
families = st.sampled_from(sorted(SPECIAL_TOKENS))


def rendered(family: str, chat: list[Any], add_generation_prompt: bool = True, **kwargs: Any) -> str:
    return str(
        TOKENIZERS[family].apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )
    )


def ids_of(family: str, text: str) -> list[int]:
    ids: list[int] = TOKENIZERS[family](text, add_special_tokens=False)["input_ids"]
    return ids


def response_to(family: str, chat: list[Any], answer: str) -> list[int]:
    """What a model of the family generates for `answer`: all of its turn up to the end token."""
    whole = rendered(family, [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": "?"}])
    eos = SPECIAL_TOKENS[family][1]
    turn = whole[len(rendered(family, chat)) :]
    return ids_of(family, turn[: turn.index(eos) + len(eos)])


@given(family=families, question=words, turns=st.lists(st.tuples(answers, words), min_size=1, max_size=4))
def test_a_conversations_ids_decode_to_the_templates_rendering_of_it(
    family: str, question: str, turns: list[tuple[str, str]]
) -> None:
    tokens = CONVERSATIONS[family]
    chat = [{"role": "user", "content": question}]
    log = [
        token_id
        for message in tokens.prompt([PromptMessage(role="user", content=question)], CHAT, ROOM)
        for token_id in message.token_ids
    ]
    for answer, said in turns:
        response = response_to(family, chat, answer)
        observation = observed(tokens, {"role": "user", "content": said}, response, CHAT, ROOM)
        log += response + observation.token_ids
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    assert TOKENIZERS[family].decode(log) == rendered(family, chat)
    assert log == ids_of(family, rendered(family, chat))


@pytest.mark.parametrize("family", ["llama3", "qwen2_5", "qwen3"])
def test_system_prompts_and_tool_answers_are_framed_as_the_template_does(family: str) -> None:
    system: ChatMessage = {"role": "system", "content": "Be brief."}
    question: ChatMessage = {"role": "user", "content": "Q"}
    answer: ChatMessage = {"role": "assistant", "content": "call()"}
    result: ChatMessage = {"role": "tool", "content": "42"}
    tokens = CONVERSATIONS[family]
    prompt = tokens.prompt([PromptMessage.model_validate(system), PromptMessage.model_validate(question)], CHAT, ROOM)
    response = response_to(family, [system, question], answer["content"])
    observation = observed(tokens, result, response, CHAT, ROOM)
    log = [*(token_id for message in prompt for token_id in message.token_ids), *response, *observation.token_ids]
    assert TOKENIZERS[family].decode(log) == rendered(family, [system, question, answer, result])


RESULTS: list[ChatMessage] = [
    {"role": "tool", "content": " 42 ", "tool_call_id": "a", "name": "add"},
    {"role": "tool", "content": "", "tool_call_id": "b"},
    {"role": "tool", "content": "7", "tool_call_id": "c"},
    {"role": "user", "content": "Go on."},
]


@pytest.mark.parametrize("family", ["llama3", "qwen2_5", "qwen3"])
def test_several_messages_of_one_observation_are_rendered_together(family: str) -> None:
    tokens = CONVERSATIONS[family]
    question: ChatMessage = {"role": "user", "content": "Q"}
    [prompt] = tokens.prompt([PromptMessage.model_validate(question)], CHAT, ROOM)
    response = response_to(family, [question], "calls")
    observed_ = tokens.observations(RESULTS, response, CHAT, ROOM)
    log = [*prompt.token_ids, *response, *(token_id for each in observed_ for token_id in each.token_ids)]
    whole = rendered(family, [question, {"role": "assistant", "content": "calls"}, *RESULTS])
    assert TOKENIZERS[family].decode(log) == whole
    assert log == ids_of(family, whole)
    assert [(each.content, each.was_cut) for each in observed_] == [(each["content"], False) for each in RESULTS]
    texts = [TOKENIZERS[family].decode(each.token_ids) for each in observed_]
    assert all(each["content"].strip() in text for each, text in zip(RESULTS, texts, strict=True))
    assert "assistant" in texts[-1]


@pytest.mark.parametrize("options", [CHAT, ChatOptions("raw")])
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_several_messages_that_do_not_fit_are_cut_in_ids_and_text(family: str, options: ChatOptions) -> None:
    tokens = CONVERSATIONS[family]
    response = response_to(family, [{"role": "user", "content": "Q"}], "calls")
    whole = [each.token_ids for each in tokens.observations(RESULTS, response, options, ROOM)]
    ids = [token_id for each in whole for token_id in each]
    for room in range(len(ids)):
        cut = tokens.observations(RESULTS, response, options, room)
        assert [token_id for each in cut for token_id in each.token_ids] == ids[:room]
        assert [each.token_ids for each in cut[:-1]] == whole[: len(cut) - 1]
        assert [each.content for each in cut[:-1]] == [each["content"] for each in RESULTS[: len(cut) - 1]]
        last = RESULTS[len(cut) - 1]["content"]
        assert cut[-1].content in (last, last.strip()) or last.strip().startswith(cut[-1].content.strip())
        assert cut[-1].content.strip() in TOKENIZERS[family].decode(cut[-1].token_ids)
        assert cut[-1].was_cut
        assert len(cut) == 1 or cut[-1].token_ids or not whole[len(cut) - 1]


def test_content_may_be_parts_or_null_as_far_as_the_template_takes_it() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:"
        "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
        "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}"
        "{% for call in m.tool_calls or [] %}[{{ call.name }}]{% endfor %}<|im_end|>{% endfor %}"
    )
    messages = [
        PromptMessage.model_validate({"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}),
        PromptMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}),
        PromptMessage.model_validate({"role": "assistant", "tool_calls": [{"name": "sub"}]}),
        PromptMessage(role="tool", content="3", tool_call_id="x", name="add"),
    ]
    prompt = TransformersChatTokenizer(tokenizer).prompt(messages, CHAT, ROOM)
    assert [tokenizer.decode(message.token_ids) for message in prompt] == [
        "<|im_start|>user:(a)(b)<|im_end|>",
        "<|im_start|>assistant:[add]<|im_end|>",
        "<|im_start|>assistant:[sub]<|im_end|>",
        "<|im_start|>tool:3<|im_end|>",
    ]
    assert [(message.content, message.name, message.tool_call_id) for message in prompt] == [
        ("ab", None, None),
        ("", None, None),
        ("", None, None),
        ("3", "add", "x"),
    ]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": None}, "content is missing: only a message with tool_calls may have none"),
        ({"role": "user"}, "content is missing: only a message with tool_calls may have none"),
        (
            {"role": "user", "content": [{"type": "image", "text": ""}]},
            "Input should be a text, or a list of parts: {'type': 'text', 'text': ...} or {'type': 'image', 'image': ",
        ),
    ],
)
def test_a_message_without_text_is_refused(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        PromptMessage.model_validate(message)


def test_template_switches_reach_prompt_and_observations() -> None:
    off = ChatOptions(chat_template_kwargs={"enable_thinking": False})
    tokens = CONVERSATIONS["qwen3"]
    [message] = tokens.prompt([PromptMessage(role="user", content="Q")], off, ROOM)
    assert TOKENIZERS["qwen3"].decode(message.token_ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    response = ids_of("qwen3", "A<|im_end|>")
    observation = observed(tokens, {"role": "user", "content": "O"}, response, off, ROOM)
    assert TOKENIZERS["qwen3"].decode(observation.token_ids) == (
        "\n<|im_start|>user\nO<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_what_was_generated_is_kept_where_the_template_would_drop_it_from_a_history() -> None:
    tokens = CONVERSATIONS["qwen3"]
    response = ids_of("qwen3", "<think>\nhm\n</think>\n\nA<|im_end|>")
    observation = observed(tokens, {"role": "user", "content": "O"}, response, CHAT, ROOM)
    assert TOKENIZERS["qwen3"].decode(response + observation.token_ids) == (
        "<think>\nhm\n</think>\n\nA<|im_end|>\n<|im_start|>user\nO<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_reach_the_prompt() -> None:
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
    [message] = CONVERSATIONS["llama3"].prompt(
        [PromptMessage(role="user", content="Q")], ChatOptions(tools=tools), ROOM
    )
    text = TOKENIZERS["llama3"].decode(message.token_ids)
    assert text == rendered("llama3", [{"role": "user", "content": "Q"}], tools=tools)
    assert '"name": "add"' in text


def test_tools_are_accepted_also_where_the_generation_prompt_differs_from_the_begin_of_an_answer() -> None:
    options = ChatOptions(tools=[{"type": "function"}], chat_template_kwargs={"enable_thinking": False})
    [message] = CONVERSATIONS["qwen3"].prompt([PromptMessage(role="user", content="Q")], options, ROOM)
    expected = rendered("qwen3", [{"role": "user", "content": "Q"}], tools=options.tools, enable_thinking=False)
    assert TOKENIZERS["qwen3"].decode(message.token_ids) == expected


def test_tools_that_move_with_the_last_message_are_refused() -> None:
    tokenizer = tokenizer_of("mistral")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        '{{- "[INST] "', '{{- ("[TOOLS]" + (tools | tojson) if tools and loop.last else "") + "[INST] "'
    )
    tokens = TransformersChatTokenizer(tokenizer)
    question = [PromptMessage(role="user", content="Q")]
    assert len(tokens.prompt(question, CHAT, ROOM)) == 1
    with pytest.raises(PromptRejected, match="moves the tools to the last message"):
        tokens.prompt(question, ChatOptions(tools=[{"type": "function"}]), ROOM)


@pytest.mark.parametrize(("family", "content", "kept"), [("llama3", "  abc  ", "ab"), ("gemma", "  abc  ", "ab")])
def test_a_cut_observation_shows_what_its_tokens_say_also_where_the_template_strips(
    family: str, content: str, kept: str
) -> None:
    observation: ChatMessage = {"role": "user", "content": content}
    tokens = CONVERSATIONS[family]
    whole = observed(tokens, observation, [], CHAT, ROOM).token_ids
    decoded = [TOKENIZERS[family].decode(whole[:room]) for room in range(len(whole))]
    room = next(place for place, text in enumerate(decoded) if text.endswith(kept))
    assert observed(tokens, observation, [], CHAT, room).content == kept


def test_an_end_of_turn_that_is_not_the_tokenizers_eos_is_not_doubled() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    unnamed = [AddedToken(text, special=True) for text in ("<start_of_turn>", "<end_of_turn>")]
    tokenizer.add_tokens(unnamed, special_tokens=True)
    tokenizer.chat_template = (TEMPLATES / "gemma.jinja").read_text()
    response = tokenizer("A<end_of_turn>", add_special_tokens=False)["input_ids"]
    observation = observed(TransformersChatTokenizer(tokenizer), {"role": "user", "content": "O"}, response, CHAT, ROOM)
    assert tokenizer.decode(response + observation.token_ids) == (
        "A<end_of_turn>\n<start_of_turn>user\nO<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_family_that_knows_no_tool_role_rejects_a_tools_observation() -> None:
    with pytest.raises(EnvironmentRejected, match="'tool' after an answer: only user and assistant may speak"):
        observed(CONVERSATIONS["mistral"], {"role": "tool", "content": "O"}, [], CHAT, ROOM)


def test_a_template_that_drops_what_follows_an_answer_is_refused_at_start() -> None:
    tokenizer = tokenizer_of("gemma")
    tokenizer.chat_template = "{% for m in messages[:2] %}{{ m.content }}{% endfor %}"
    with pytest.raises(UnsupportedTokenizer, match="drops messages of role 'user'"):
        TransformersChatTokenizer(tokenizer)
