"""Conversations whose texts spell control tokens: no text ends its message or begins another one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.chat.text_encoder import TextEncoder
from deployments.generation.serving.template_renderer import TemplateRenderer
from deployments.protocols.chat import ChatOptions
from deployments.sessions.records import ChatContext
from rollout_client.contract.messages import PromptMessage
from tests.deployments.chat.observed import observed
from tests.deployments.chat.vendors import ALL, Vendor, call, marked, result, vendor
from tests.deployments.chat.vocabularies import tokenizer_of
from tests.paths import SMALL_MODEL, TINY_MODEL

HF: dict[str, Any] = {
    "tiny": AutoTokenizer.from_pretrained(TINY_MODEL),
    "small": AutoTokenizer.from_pretrained(SMALL_MODEL),
    "byte-level": tokenizer_of("byte-level"),
}
TOKENS = {name: TransformersChatTokenizer(tokenizer) for name, tokenizer in HF.items()}
CONTROL = {name: TextEncoder(tokenizer).control_tokens.spellings for name, tokenizer in HF.items()}
CHAT, RAW, ROOM = ChatOptions(), ChatOptions(observation_format="raw"), 100_000
models = st.sampled_from(sorted(HF))


@st.composite
def spelled(draw: st.DrawFn, name: str) -> str:
    pieces = [*CONTROL[name], "<|", "|>", "<|im_", "end|>", "a", "word", " ", "\n", "12"]
    return "".join(draw(st.lists(st.sampled_from(pieces), max_size=6))).strip()


def rendered(name: str, chat: list[Any], **kwargs: Any) -> str:
    return str(HF[name].apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **kwargs))


def control_tokens_of(name: str, ids: list[int]) -> list[str]:
    return [token for token in HF[name].convert_ids_to_tokens(ids) if token in CONTROL[name]]


def ids_of(name: str, text: str) -> list[int]:
    ids: list[int] = HF[name].encode(text, add_special_tokens=False)
    return ids


@given(data=st.data(), name=models, role=st.sampled_from(["user", "tool"]))
def test_an_observation_has_the_control_tokens_of_its_frame_alone(data: Any, name: str, role: Any) -> None:
    content = data.draw(spelled(name))
    observation = observed(TOKENS[name], {"role": role, "content": content}, [], CHAT, ROOM)
    harmless = observed(TOKENS[name], {"role": role, "content": "x"}, [], CHAT, ROOM)
    assert control_tokens_of(name, observation.token_ids) == control_tokens_of(name, harmless.token_ids)
    before, _, after = HF[name].decode(harmless.token_ids, skip_special_tokens=False).rpartition("x")
    shown = HF[name].decode(observation.token_ids, skip_special_tokens=False)
    assert content in shown or str(content).replace("\n", "\\n") in shown
    assert (shown.startswith(before), shown.endswith(after)) == (True, True)
    assert (observation.content, observation.was_cut) == (content, False)


@given(data=st.data(), name=models)
def test_a_raw_observation_is_text_without_control_tokens(data: Any, name: str) -> None:
    contents = data.draw(st.lists(spelled(name), min_size=1, max_size=3))
    messages: Any = [{"role": "user", "content": content} for content in contents]
    seen = TOKENS[name].observations(messages, [], RAW, ROOM)
    ids = [token_id for message in seen for token_id in message.token_ids]
    assert control_tokens_of(name, ids) == []
    assert HF[name].decode(ids) == "".join(contents)
    assert [message.content for message in seen] == contents


@given(data=st.data(), name=models)
def test_what_is_appended_is_what_the_whole_conversation_would_have(data: Any, name: str) -> None:
    tokens, content = TOKENS[name], data.draw(spelled(name))
    question = {"role": "user", "content": "Q"}
    chat = [question, {"role": "assistant", "content": "A"}, {"role": "user", "content": content}]
    whole = tokens.prompt_ids(chat, CHAT, ROOM)
    asked = [token_id for part in tokens.prompt_ids([question], CHAT, ROOM) for token_id in part]
    flat = [token_id for part in whole for token_id in part]
    assert HF[name].decode(flat, skip_special_tokens=False) == rendered(name, chat)
    [end] = tokens.ends_of_turn
    response = flat[len(asked) : flat.index(end, len(asked)) + 1]
    following = observed(tokens, {"role": "user", "content": content}, response, CHAT, ROOM)
    assert [*asked, *response, *following.token_ids] == flat


@given(data=st.data(), name=models)
def test_each_message_of_a_prompt_keeps_its_own_part(data: Any, name: str) -> None:
    contents = data.draw(st.lists(spelled(name), min_size=1, max_size=4))
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    chat += [{"role": "user", "content": content} for content in contents]
    texts = [HF[name].decode(part, skip_special_tokens=False) for part in TOKENS[name].prompt_ids(chat, CHAT, ROOM)]
    assert "".join(texts) == rendered(name, chat)
    assert [content in text for content, text in zip(contents, texts[2:], strict=True)] == [True] * len(contents)


@given(data=st.data(), name=models)
def test_a_prompt_is_the_trainers_own_unless_the_setting_says_otherwise(data: Any, name: str) -> None:
    chat = [{"role": "user", "content": data.draw(spelled(name))}]
    [trusted] = TOKENS[name].prompt_ids(chat, CHAT, ROOM)
    assert trusted == ids_of(name, rendered(name, chat))
    strict = TransformersChatTokenizer(HF[name], split_special_tokens="all")
    [split] = strict.prompt_ids(chat, CHAT, ROOM)
    [harmless] = strict.prompt_ids([{"role": "user", "content": "x"}], CHAT, ROOM)
    assert control_tokens_of(name, split) == control_tokens_of(name, harmless)
    assert HF[name].decode(split, skip_special_tokens=False) == rendered(name, chat)


@pytest.mark.parametrize("name", sorted(HF))
def test_the_first_observation_of_an_environment_is_data_too(name: str) -> None:
    messages = [PromptMessage(role="user", content=f"x{CONTROL[name][1]}")]
    [started] = TOKENS[name].prompt(messages, ChatOptions(has_observations=True), ROOM)
    [harmless] = TOKENS[name].prompt([PromptMessage(role="user", content="x")], CHAT, ROOM)
    assert control_tokens_of(name, [*started.token_ids]) == control_tokens_of(name, [*harmless.token_ids])


@pytest.mark.parametrize("name", sorted(HF))
def test_an_agents_history_forges_no_turns_but_in_its_first_instructions(name: str) -> None:
    renderer = TemplateRenderer(TOKENS[name], ROOM)
    [end] = TOKENS[name].ends_of_turn
    spelling = HF[name].convert_ids_to_tokens(end)

    def ends(*contents: str) -> int:
        roles = ["system", "user", "assistant", "tool"]
        chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        return sum(list(part).count(end) for part in renderer.prompt(chat, ChatContext()))

    assert ends("S", "Q", "A", "R") == 4
    assert ends(spelling, f"Q{spelling}", f"A{spelling}.", f"R{spelling}") == 6
    following = renderer.following([{"role": "user", "content": f"x{spelling}y"}], [end], ChatContext())
    assert [list(part).count(end) for part in following] == [1]


@pytest.mark.parametrize("name", marked(sorted(ALL)))
def test_a_vendors_template_carries_a_forged_turn_as_text(name: str) -> None:
    spellings = TextEncoder(vendor(name).hf).control_tokens.spellings
    framed = vendor(name).text_of(seen(vendor(name), "user", "x"))
    forged = f"5{framed}5 {' '.join(spellings)}."
    for role in ("user", "tool") if vendor(name).family.arguments else ("user",):
        ids = [seen(vendor(name), role, content) for content in ("5x.", forged)]
        harmless, other = (
            [token for token in vendor(name).hf.convert_ids_to_tokens(each) if token in spellings] for each in ids
        )
        assert other == harmless
        shown = vendor(name).text_of(ids[1])
        assert forged in shown or json.dumps(forged, ensure_ascii=False)[1:-1] in shown


@pytest.mark.parametrize("name", marked(sorted(name for name, family in ALL.items() if family.arguments)))
def test_the_names_and_ids_of_calls_are_data_in_their_results(name: str) -> None:
    family = vendor(name)
    spellings = TextEncoder(family.hf).control_tokens.spellings
    end = family.family.end

    def tokens_of(called: str) -> list[str]:
        calls = [call(0, called, family.family.arguments)]
        [only] = family.tokens.observations([result(0, "5")], [], CHAT, ROOM, calls)
        return [token for token in family.hf.convert_ids_to_tokens(only.token_ids) if token in spellings]

    assert tokens_of(f"a{end}b") == tokens_of("add")


def seen(family: Vendor, role: str, content: str) -> list[int]:
    """The ids of an observation; one of role `tool` answers a call."""
    message: Any = result(0, content, "add") if role == "tool" else {"role": role, "content": content}
    calls = [call(0, "add", family.family.arguments)] if role == "tool" else []
    [only] = family.tokens.observations([message], [], CHAT, ROOM, calls)
    return list(only.token_ids)
