"""Where the messages of a prompt end: where the first ones, rendered alone, end. It takes few renderings to find."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from deployments.chat.chat_template import MOST_PREFIXES, ChatTemplate
from deployments.protocols.chat import ChatOptions
from tests.paths import TINY_MODEL

PLAIN = ChatOptions()
LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
contents = st.text(alphabet="ab<>/ \n\ue0000\ue001", max_size=6)
roles = st.sampled_from(["system", "user", "assistant", "tool"])
chats = st.lists(st.builds(lambda role, content: {"role": role, "content": content}, roles, contents), min_size=1)
TEMPLATES = {
    "one loop": LOOP,
    "a loop that looks for the last question before": (
        "{% set ns = namespace(last=0) %}{% for m in messages %} {% if m.role == 'user' %}"
        "{% set ns.last = loop.index %}{% endif %}{% endfor %}{{ bos_token }}" + LOOP
    ),
    "the first message is written before the loop over the rest": (
        "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}{% endif %}"
        + LOOP
    ),
    "the next message writes the end of results": (
        "{% set ns = namespace(open=false) %}{% for m in messages %}"
        "{% if ns.open and m.role != 'tool' %}</results>{% set ns.open = false %}{% endif %}"
        "{% if m.role == 'tool' and not ns.open %}<results>{% set ns.open = true %}{% endif %}{{ m.content }};"
        "{% endfor %}{% if ns.open %}</results>{% endif %}{% if add_generation_prompt %}<a>{% endif %}"
    ),
    "only a message that is not the last ends its turn": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last %}</>{% endif %}{% endfor %}"
    ),
    "results are written with the calls that they answer": (
        "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}"
        "{% for n in messages[loop.index0 + 1:] %}{% if n.role != 'tool' %}{% break %}{% endif %}"
        "({{ n.content }}){% endfor %}</>{% endif %}{% endfor %}"
    ),
    "messages are found by their numbers": (
        "{% for i in range(messages | length) %}{% set m = messages[i] %}<{{ m.role }}>{{ m.content }}"
        "{% set n = messages[i - 1] %}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    ),
    "messages are put together first, as Mistral's": (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}"
        "{% set ns.all = ns.all + [m if m.role == 'tool' else {'role': m.role, 'content': m.content}] %}{% endfor %}"
        "{% for m in ns.all %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    ),
    "messages are counted": (
        "{% for i in range(messages | length) %}<{{ messages[i].role }}>{{ messages[i].content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    ),
}


class CountingTemplate(ChatTemplate):
    """Counts how many messages it renders, and how often."""

    def __init__(self, source: str) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
        tokenizer.chat_template = source
        super().__init__(tokenizer)
        self.renderings = self.messages = 0

    def render(self, chat: Any, options: ChatOptions, add_generation_prompt: bool = True) -> str:
        self.renderings += 1
        self.messages += len(chat)
        return super().render(chat, options, add_generation_prompt)


PREFIXED = ("messages are put together first, as Mistral's", "messages are counted")
COUNTING = {name: CountingTemplate(source) for name, source in TEMPLATES.items()}


def parts(template: ChatTemplate, chat: Sequence[dict[str, Any]]) -> list[str]:
    text = template.render(chat, PLAIN)
    return [text[start:end] for start, end in pairwise([0, *template.cuts(chat, text, PLAIN), len(text)])]


@pytest.mark.parametrize("name", TEMPLATES)
@given(chat=chats)
def test_the_parts_of_the_messages_are_the_whole_in_their_order(name: str, chat: list[dict[str, Any]]) -> None:
    each = parts(COUNTING[name], chat)
    assert len(each) == len(chat)
    assert "".join(each) == COUNTING[name].render(chat, PLAIN)


@pytest.mark.parametrize("name", ["one loop", *PREFIXED, "the next message writes the end of results"])
@given(chat=chats.filter(lambda chat: len(chat) <= MOST_PREFIXES))
def test_the_first_messages_end_where_their_own_rendering_ends(name: str, chat: list[dict[str, Any]]) -> None:
    template = COUNTING[name]
    text = template.render(chat, PLAIN)
    prefixes = [template.render(chat[:count], PLAIN, False) for count in range(1, len(chat))]
    shown = [text[:cut] for cut in template.cuts(chat, text, PLAIN)]
    assert [cut for cut, prefix in zip(shown, prefixes, strict=True) if text.startswith(prefix)] == [
        prefix for prefix in prefixes if text.startswith(prefix)
    ]


ROLES = {"system": "S", "user": "Q", "assistant": "A", "tool": "R"}
CHAT: list[dict[str, Any]] = [
    {"role": role, "content": ROLES[role]}
    for role in ("system", "user", "assistant", "tool", "tool", "assistant", "user")
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "the first message is written before the loop over the rest",
            ["[S]", "<user>Q</>", "<assistant>A</>", *["<tool>R</>"] * 2, "<assistant>A</>", "<user>Q</><a>"],
        ),
        (
            "only a message that is not the last ends its turn",
            ["<system>S", "</><user>Q", "</><assistant>A", "</><tool>R", "</><tool>R", "</><assistant>A", "</><user>Q"],
        ),
        (
            "results are written with the calls that they answer",
            ["<system>S</>", "<user>Q</>", "<assistant>A", "(R)", "(R)</>", "<assistant>A</>", "<user>Q</>"],
        ),
    ],
)
def test_each_message_has_what_the_template_writes_for_it(name: str, expected: list[str]) -> None:
    assert parts(COUNTING[name], CHAT) == expected


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in PREFIXED])
def test_the_number_of_renderings_does_not_grow_with_the_messages(name: str) -> None:
    assert renderings(name, 60) == renderings(name, 3) < 30


def renderings(name: str, rounds: int) -> int:
    template = CountingTemplate(TEMPLATES[name])
    parts(template, CHAT * rounds)
    return template.renderings


def test_messages_put_together_or_counted_take_few_renderings() -> None:
    together = "messages are put together first, as Mistral's"
    assert renderings(together, 60) == renderings(together, 20) < MOST_PREFIXES + 30
    template = CountingTemplate(TEMPLATES["messages are counted"])
    each = parts(template, CHAT * 20)
    assert template.renderings == MOST_PREFIXES + 1
    assert each[:MOST_PREFIXES] == parts(CountingTemplate(LOOP), CHAT * 20)[:MOST_PREFIXES]
    assert not any(each[MOST_PREFIXES:-1])
