"""Conversations through the embedded model's real tokenizer and template."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import normalizers
from transformers import AutoTokenizer

from deployments.chat.chat_template import RENDERING_ERRORS
from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.failures import PromptRejected
from deployments.protocols.chat import CONTEXT_TOKENS, ChatOptions, UnsupportedTokenizer
from rollout_client.contract.messages import PromptMessage
from rollout_env import ChatMessage
from tests.deployments.chat.observed import observed
from tests.paths import TINY_MODEL


def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


hf_tokenizer = load_tokenizer()
tokens = TransformersChatTokenizer(hf_tokenizer)
END = hf_tokenizer.convert_tokens_to_ids("<|end|>")
ROOM = 10_000
CHAT = ChatOptions()
RAW = ChatOptions(observation_format="raw")


def text(token_ids: list[int]) -> str:
    return str(hf_tokenizer.decode(token_ids, skip_special_tokens=False))


def test_a_response_without_its_end_of_turn_gets_it_from_the_bridge() -> None:
    cut_short = hf_tokenizer("abc", add_special_tokens=False)["input_ids"]
    bridge = observed(tokens, {"role": "user", "content": "O"}, cut_short, CHAT, ROOM)
    assert text(bridge.token_ids) == "<|end|>\n<|user|>\nO<|end|>\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("room", "ids_text", "content"),
    [(9, "\n<|user|>\nworld<", "world<"), (5, "\n<|user|>\nwo", "wo"), (2, "\n<|user|>", ""), (-3, "", "")],
)
def test_an_observation_that_does_not_fit_is_cut_in_ids_and_text(room: int, ids_text: str, content: str) -> None:
    cut = observed(tokens, {"role": "user", "content": "world<"}, [END], CHAT, room)
    assert (text(cut.token_ids), cut.content, cut.was_cut) == (ids_text, content, True)
    whole = observed(tokens, {"role": "user", "content": "world<"}, [END], CHAT, ROOM)
    fitting = observed(tokens, {"role": "user", "content": "world<"}, [END], CHAT, len(whole.token_ids))
    assert (fitting, whole.was_cut) == (whole, False)


def test_truncation_and_padding_of_the_tokenizer_are_switched_off() -> None:
    cutting = load_tokenizer()
    cutting.backend_tokenizer.enable_truncation(2)
    cutting.backend_tokenizer.enable_padding(length=1000)
    message = PromptMessage(role="user", content="Hi")
    [expected] = tokens.prompt([message], CHAT, ROOM)
    assert TransformersChatTokenizer(cutting).prompt([message], CHAT, ROOM) == [expected]


def test_a_character_of_which_bytes_are_cut_off_is_not_shown() -> None:
    observation: ChatMessage = {"role": "user", "content": "x漢y"}
    assert [observed(tokens, observation, [END], RAW, room).content for room in range(5)] == ["", "x", "x", "x", "x漢"]


@pytest.mark.parametrize("letter", ["e\u0301", "\u1112\u1161\u11ab", "a\u0306\u0300"])
def test_a_letter_that_the_tokenizer_composes_is_shown_whole_or_not_at_all(letter: str) -> None:
    composing = load_tokenizer()
    composing.backend_tokenizer.normalizer = normalizers.NFC()
    composing_tokens = TransformersChatTokenizer(composing)
    observation: ChatMessage = {"role": "user", "content": f"x{letter} {letter}y"}
    [whole] = composing_tokens.observations([observation], [], RAW, ROOM)
    for room in range(len(whole.token_ids)):
        cut = observed(composing_tokens, observation, [], RAW, room)
        shown = text(cut.token_ids).rstrip("\ufffd")
        assert unicodedata.normalize("NFC", cut.content) == shown


def test_a_tokenizer_that_cannot_carry_a_conversation_is_refused_at_start() -> None:
    forgetful = load_tokenizer()
    forgetful.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(UnsupportedTokenizer, match="does not keep an answer"):
        TransformersChatTokenizer(forgetful)
    forgetful.chat_template = "{% for m in messages[:2] %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    with pytest.raises(UnsupportedTokenizer, match="drops messages of role 'user'"):
        TransformersChatTokenizer(forgetful)
    without_template = load_tokenizer()
    without_template.chat_template = None
    with pytest.raises(UnsupportedTokenizer, match="no chat template"):
        TransformersChatTokenizer(without_template)


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("raise_exception('no')", TemplateError),
        ("1 + 'a'", TypeError),
        ("'{'.format()", ValueError),
        ("1 / 0", ArithmeticError),
        ("'{0}'.format()", LookupError),
    ],
)
def test_each_error_that_a_template_can_raise_rejects_the_prompt(expression: str, error: type[Exception]) -> None:
    assert error in RENDERING_ERRORS
    breaking = load_tokenizer()
    breaking.chat_template = (
        f"{{% if messages[0]['content'] == 'break' %}}{{{{ {expression} }}}}{{% endif %}}" + hf_tokenizer.chat_template
    )
    broken = TransformersChatTokenizer(breaking)
    assert broken.prompt([PromptMessage(role="user", content="hold")], CHAT, ROOM)
    with pytest.raises(PromptRejected, match=r"^The model's chat template refuses the messages: ") as raised:
        broken.prompt([PromptMessage(role="user", content="break")], CHAT, ROOM)
    assert isinstance(raised.value.__cause__, error)


def test_an_error_that_no_template_raises_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_arguments: Any, **_options: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(hf_tokenizer, "apply_chat_template", out_of_memory)
    with pytest.raises(MemoryError):
        tokens.prompt([PromptMessage(role="user", content="Hi")], CHAT, ROOM)


def test_pieces_are_the_texts_that_tokens_add_and_none_inside_a_character() -> None:
    ids = hf_tokenizer("aé漢", add_special_tokens=False)["input_ids"]
    assert tokens.pieces([*ids, END, *ids[:1]], before=ids) == ["a", None, "é", None, None, "漢", "", "a"]
    assert tokens.pieces([END], before=[]) == [""]
    assert tokens.pieces([ids[1], END, ids[2]], before=[]) == [None, None, "é"]


@given(
    before=st.text(alphabet="ab é漢", max_size=40), response=st.text(alphabet="ab é漢", max_size=40), cut=st.integers(0)
)
def test_pieces_together_are_the_decoded_text_wherever_they_begin(before: str, response: str, cut: int) -> None:
    context, ids = (hf_tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, response))
    assert "".join(piece or "" for piece in tokens.pieces(ids, context[-CONTEXT_TOKENS:])) == response
    whole = [place for place, piece in enumerate(tokens.pieces(ids, context)) if piece is not None]
    first = whole[cut % len(whole)] + 1 if whole else 0
    rest = tokens.pieces(ids[first:], [*context, *ids[:first]][-CONTEXT_TOKENS:])
    assert tokens.decode(ids[:first]) + "".join(piece or "" for piece in rest) == response


def test_call_markers_that_are_special_tokens_are_shown_on_request() -> None:
    """Of other special tokens, the end of a turn alone is left out."""
    marked = load_tokenizer()
    marked.add_tokens(["<call>", "</call>"], special_tokens=True)
    ids = marked.encode("<call>1</call>", add_special_tokens=False)
    [other_end] = marked.encode("</call>", add_special_tokens=False)
    shown = TransformersChatTokenizer(marked, skip_special_tokens=False)
    assert shown.decode([]) == ""
    assert shown.decode([*ids, END, END]) == "<call>1</call><|end|>"
    assert shown.decode(ids) == "<call>1</call>"
    assert TransformersChatTokenizer(marked, False, [other_end]).decode(ids) == "<call>1"
    assert TransformersChatTokenizer(marked).decode([*ids, END]) == "1"


def test_the_ends_of_a_turn_come_from_tokenizer_template_and_config() -> None:
    assert TransformersChatTokenizer.load(str(TINY_MODEL)).ends_of_turn == {END}
    assert TransformersChatTokenizer(hf_tokenizer, further_ends_of_turn=[7]).ends_of_turn == {7, END}
    assert tokens.ends_of_turn == {END}


def test_all_fields_of_a_prompts_messages_reach_the_template() -> None:
    reading = load_tokenizer()
    reading.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content or '' }}"
        "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
        "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}"
        "{% for call in m.tool_calls or [] %}[{{ call.name }}]{% endfor %}<|end|>{% endfor %}"
    )
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}], "reasoning_content": "Hm."},
        {"role": "tool", "content": "3", "tool_call_id": "x", "name": "add"},
    ]
    prompt = TransformersChatTokenizer(reading).prompt([*map(PromptMessage.model_validate, given)], CHAT, ROOM)
    written = [text(message.token_ids) for message in prompt]
    assert written == ["<|user|>(a)(b)<|end|>", "<|assistant|>Hm.[add]<|end|>", "<|tool|>3<|end|>"]
    assert [message.content for message in prompt] == ["ab", "", "3"]
    assert (prompt[1].tool_calls, prompt[1].reasoning_content) == ([{"name": "add"}], "Hm.")
    assert (prompt[2].name, prompt[2].tool_call_id) == ("add", "x")
