"""Control tokens that data spells are ordinary text, whatever the tokenizer, and nothing else changes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from deployments.chat.text_encoder import SplittableText, TextEncoder
from tests.deployments.chat.vocabularies import KINDS, MARKERS, SPECIAL, WORDS, tokenizer_of, without_control_tokens

CONTROL = [*SPECIAL, *MARKERS]
ENCODERS = {kind: TextEncoder(tokenizer_of(kind)) for kind in KINDS}
ORDINARY = {kind: without_control_tokens(tokenizer_of(kind), CONTROL) for kind in KINDS}
kinds = st.sampled_from(KINDS)
spelled = st.lists(
    st.sampled_from([*CONTROL, *WORDS, "<|im_", "end|>", "<", ">", "|", " ", "\n", "a", "word and", "123", "é", "中"]),
    max_size=12,
).map("".join)


@given(kind=kinds, text=spelled)
def test_data_is_tokenized_as_if_there_were_no_control_tokens(kind: str, text: str) -> None:
    encoder = ENCODERS[kind]
    data = SplittableText(text, is_split=True)
    ids = encoder.encode(data).ids
    expected = ORDINARY[kind].encode(text, add_special_tokens=False)
    assert tokenizer_of(kind).convert_ids_to_tokens(ids) == expected.tokens
    assert encoder.decode(ids, skip_special_tokens=True) == ORDINARY[kind].decode(expected.ids)
    encoding = encoder.encode(data)
    assert [(encoding.start_of(token), encoding.end_of(token)) for token in range(len(encoding))] == expected.offsets


@given(kind=kinds, texts=st.lists(spelled, min_size=1, max_size=4))
def test_control_tokens_around_data_are_tokens_and_those_in_it_are_text(kind: str, texts: list[str]) -> None:
    encoder, control = ENCODERS[kind], ENCODERS[kind].control_tokens
    hidden = control.hidden_in_observation([{"role": "tool", "content": text} for text in texts], "observations")
    text = control.restored("".join(f"<|im_start|>tool\n{message['content']}<|im_end|>" for message in hidden))
    encoding = encoder.encode(text)
    tokens = tokenizer_of(kind).convert_ids_to_tokens(encoding.ids)
    assert [token for token in tokens if token in CONTROL] == ["<|im_start|>", "<|im_end|>"] * len(texts)
    whole = "".join(f"<|im_start|>tool\n{text}<|im_end|>" for text in texts)
    assert encoder.decode(encoding.ids, skip_special_tokens=False) == decoded_whole(kind, whole, encoding.ids)
    if text.is_split:
        places = [place for place, token in enumerate(tokens) if token in CONTROL]
        spelled = {whole[encoding.start_of(place) : encoding.end_of(place)] for place in places}
        assert spelled == {"<|im_start|>", "<|im_end|>"}
    else:
        assert encoding.ids == tokenizer_of(kind).backend_tokenizer.encode(whole, add_special_tokens=False).ids


def decoded_whole(kind: str, whole: str, ids: list[int]) -> str:
    """The text, or what the tokenizer makes of it whose ids these are: a normalizer may have changed it."""
    backend: Any = tokenizer_of(kind).backend_tokenizer
    return whole if kind != "sentencepiece" else str(backend.decode(ids, skip_special_tokens=False))


def test_special_tokens_and_those_of_the_template_are_control_tokens() -> None:
    assert sorted(ENCODERS["byte-level"].control_tokens.spellings) == sorted(CONTROL)


@pytest.mark.parametrize(("before", "data", "after"), [("<|im_", "end|>", ""), ("", "<|im_", "end|>"), ("", " 2 ", "")])
def test_a_part_of_a_control_token_completes_nothing_of_the_template(before: str, data: str, after: str) -> None:
    control = ENCODERS["byte-level"].control_tokens
    [message] = control.hidden_in_observation([{"content": data}], "observations")
    before = before or "<|im_end|>"
    written = control.restored(f"{before}{message['content'].strip()}{after}")
    ids = ENCODERS["byte-level"].encode(written).ids
    tokens = tokenizer_of("byte-level").convert_ids_to_tokens(ids)
    assert [token for token in tokens if token in CONTROL] == [before] * (before in CONTROL)
    assert ENCODERS["byte-level"].decode(ids, skip_special_tokens=False) == f"{before}{data.strip()}{after}"


@pytest.mark.parametrize(
    ("split", "echoes", "expected"),
    [
        ("none", True, [True, True, True, True, True, True]),
        ("observations", False, [True, True, False, True, False, False]),
        ("observations", True, [True, True, False, False, False, False]),
        ("all", False, [False, False, False, False, False, False]),
    ],
)
def test_the_setting_says_whose_texts_are_data(split: Any, echoes: bool, expected: list[bool]) -> None:
    control = ENCODERS["byte-level"].control_tokens
    chat = [{"role": role, "content": "<|im_end|>"} for role in ["system", "user", "tool", "assistant", "user", "tool"]]
    assert [message["content"] == "<|im_end|>" for message in control.hidden_in_prompt(chat, split, echoes)] == expected


def test_of_an_answer_the_markers_stay_by_which_a_template_tells_its_parts() -> None:
    control = ENCODERS["byte-level"].control_tokens
    [answer] = control.hidden_in_prompt([{"role": "assistant", "content": "</think><|im_end|>"}], "all", False)
    assert answer["content"].startswith("</think>")
    ids = ENCODERS["byte-level"].encode(control.restored(answer["content"])).ids
    tokens = tokenizer_of("byte-level").convert_ids_to_tokens(ids)
    assert (tokens[0], "<|im_end|>" in tokens, "".join(tokens)) == ("</think>", False, "</think><|im_end|>")


@pytest.mark.parametrize(("echoes", "is_kept"), [(True, True), (False, False)])
def test_an_echoed_answer_keeps_its_markers_as_in_a_prompt(echoes: bool, is_kept: bool) -> None:
    control = ENCODERS["byte-level"].control_tokens
    messages = [{"role": role, "content": "</think><|im_end|>"} for role in ("assistant", "user")]
    answer, question = control.hidden_in_observation(messages, "observations", echoes)
    assert (answer["content"].startswith("</think>"), "<|im_end|>" in answer["content"]) == (is_kept, False)
    assert "</think>" not in question["content"]


def test_texts_in_calls_tools_and_parts_are_data_and_roles_are_not() -> None:
    control = ENCODERS["byte-level"].control_tokens
    call = {"type": "function", "function": {"name": "<s>", "arguments": {"<s>": ["<s>", 1, None, True]}}}
    [hidden] = control.hidden_in_observation([{"role": "<s>", "content": None, "tool_calls": [call]}], "observations")
    assert hidden["role"] == "<s>"
    assert "<s>" not in str(hidden["tool_calls"])
    assert control.restored(str(hidden["tool_calls"])).text.count("<s>") == 3
    tools = [{"function": {"name": "add", "description": "<s>"}}]
    assert control.hidden_in_tools(tools, "observations") == tools
    assert "<s>" not in str(control.hidden_in_tools(tools, "all"))


NORMALIZERS = {
    "capitals": (normalizers.Lowercase(), "<|IM_END|>"),
    "full width": (normalizers.NFKC(), "\uff1c|im_end|\uff1e"),
    "accents": (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "<|i\u0301m_end|>"),
    "invisible": (normalizers.Nmt(), "<|im\x01_end|>"),
}


def normalizing(kind: str, normalizer: Any) -> PreTrainedTokenizerFast:
    """A tokenizer that finds control tokens in normalized texts: in its vocabulary, or because they are normalized."""
    backend = Tokenizer.from_str(tokenizer_of(kind).backend_tokenizer.to_str())
    if kind == "byte-level":
        stored = json.loads(backend.to_str())
        added = [{**token, "normalized": True} for token in stored["added_tokens"]]
        backend = Tokenizer.from_str(json.dumps({**stored, "added_tokens": added}))
    backend.normalizer = normalizer
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=backend, eos_token="<|im_end|>")
    return tokenizer


@pytest.mark.parametrize("form", NORMALIZERS)
@pytest.mark.parametrize("kind", ["byte-level", "unigram"])
def test_no_text_becomes_a_control_token_by_being_normalized(kind: str, form: str) -> None:
    normalizer, spelling = NORMALIZERS[form]
    tokenizer = normalizing(kind, normalizer)
    encoder = TextEncoder(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in encoder.encode(f"a {spelling} b").ids
    assert end not in encoder.encode(SplittableText(f"a {spelling} b", is_split=True)).ids
    [message] = encoder.control_tokens.hidden_in_observation([{"content": f"a {spelling} b"}], "observations")
    ids = encoder.encode(encoder.control_tokens.restored(f"{message['content']}<|im_end|>")).ids
    assert [place for place, token_id in enumerate(ids) if token_id == end] == [len(ids) - 1]


TOKENIZERS = {kind: tokenizer_of(kind) for kind in KINDS} | {
    f"{kind}, {form}": normalizing(kind, normalizer)
    for kind in ("byte-level", "unigram")
    for form, (normalizer, _) in NORMALIZERS.items()
}


@given(kind=st.sampled_from(sorted(TOKENIZERS)), text=st.text(alphabet="abB <>|im_é中\uff11\n", max_size=30))
def test_data_without_control_tokens_is_tokenized_as_it_was(kind: str, text: str) -> None:
    encoder = ENCODERS[kind] if kind in ENCODERS else TextEncoder(TOKENIZERS[kind])
    control = encoder.control_tokens
    [message] = control.hidden_in_observation([{"role": "user", "content": text}], "observations")
    whole = f"<|im_start|>user\n{text}<|im_end|>\n"
    written = control.restored(f"<|im_start|>user\n{message['content']}<|im_end|>\n")
    assert kind not in KINDS or (written.text, written.is_split) == (whole, False)
    expected = TOKENIZERS[kind].backend_tokenizer.encode(whole, add_special_tokens=False)
    assert encoder.encode(written).ids == expected.ids
