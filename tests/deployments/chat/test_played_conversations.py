"""Whole conversations, turn by turn, through a family's template: the ids that the service has are the template's.

A conversation is played as a rollout plays it: its first messages are a prompt, each answer is sampled, and what
follows an answer is appended. The template renders the same messages at once. Where its rendering begins with all that
was there when an answer ended, what is appended is the rest of the rendering. Otherwise the conversation has something
that the family's template writes otherwise in a history, which `docs/deploy.md` lists.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.protocols.chat import ChatOptions
from tests.deployments.chat.test_vendor_templates import TOOL
from tests.deployments.chat.vendors import ALL, REAL, REAL_FAMILIES, Vendor, call, marked, result, vendor

pytestmark = pytest.mark.slow

ROOM = 100_000
PLAYED = [*(name for name in REAL_FAMILIES if name in ALL), *REAL]
texts = st.text(alphabet="ab 1é漢{<\n\U0001f642", max_size=8)
THOUGHT = "<think>\nThought.\n</think>\n\n"
THINKING = [{}, {"enable_thinking": False}]


class Game:
    """A conversation whose answers a model of the family samples."""

    def __init__(self, one: Vendor, options: ChatOptions) -> None:
        self.one = one
        self.options = options
        self.chat: list[Any] = []
        self.ids: list[int] = []
        self.is_canonical = True
        """Whether a tokenizer makes the same ids of their text."""

    def rendered(self) -> str:
        return self.one.rendered(self.chat, tools=self.options.tools, **(self.options.chat_template_kwargs or {}))

    def ask(self, messages: list[Any]) -> None:
        parts = self.one.tokens.prompt_ids(messages, self.options, ROOM)
        self.chat, self.ids = [*messages], [token_id for part in parts for token_id in part]
        assert self.one.text_of(self.ids) == self.rendered()
        assert self.one.ids_of(self.rendered()) == self.ids

    def answer(self, answer: dict[str, Any], ending: str, following: list[Any]) -> bool:
        """Samples an answer that ends with `ending`, and appends what follows it.

        Returns:
            Whether the template's rendering begins with all that was there when the answer ended.
        """
        before, calls = self.one.text_of(self.ids), answer.get("tool_calls", [])
        self.chat += [answer, *following]
        whole, end = self.rendered(), self.one.family.end_after(calls)
        sampled = (
            whole[len(before) :].partition(end)[0]
            if calls and whole.startswith(before)
            else self.one.family.answer.format(answer["content"] or "")
        )
        response = self.one.ids_of(sampled + ending)
        self.is_canonical &= self.one.ids_of(before + sampled + ending) == [*self.ids, *response]
        seen = self.one.tokens.observations(following, response, self.options, ROOM, calls)
        assert [each.content for each in seen] == [message["content"] for message in following]
        appended = [token_id for each in seen for token_id in each.token_ids]
        self.ids += [*response, *appended]
        is_written = (answer["content"] or "") in sampled and (not calls or "41" in sampled)
        if not is_written or not whole.startswith(before + sampled + end):
            return False
        after = whole[len(before + sampled + end) :]
        if self.one.text_of(appended) != (after if ending else end + after):
            return False
        if self.is_canonical and ending in {end, ""}:
            assert self.ids == self.one.ids_of(whole)
        return True


def calling(game: Game, count: int, beside: str | None) -> tuple[dict[str, Any], list[Any]]:
    """An answer of calls, and the first part of their results."""
    family = game.one.family
    first = sum(len(message.get("tool_calls", ())) for message in game.chat)
    calls = [call(first + place, "add", family.arguments) for place in range(count)]
    content = beside or (None if family.has_null_beside_calls else "")
    return {"role": "assistant", "content": content, "tool_calls": calls}, [
        result(first + place, "", "add") for place in range(count)
    ]


@st.composite
def games(draw: st.DrawFn, name: str) -> tuple[Game, set[str]]:
    """A conversation that goes on as long as the template does, and its traits if it does not."""
    one = vendor(name)
    family = one.family
    tools = [TOOL] if draw(st.booleans()) and not family.moves_instructions else None
    system = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    thinking = draw(st.sampled_from(THINKING))
    game, traits = Game(one, ChatOptions(tools=tools, chat_template_kwargs=thinking)), set()
    always = {*(["a system prompt"] if system else []), *(["thinking off"] if thinking else [])}
    game.ask([*system, {"role": "user", "content": draw(texts)}])
    for _ in range(draw(st.integers(1, 4))):
        now = {*always}
        if family.arguments and draw(st.booleans()):
            count = 1 if family.at_most_one_call else draw(st.integers(1, 2))
            beside = "" if family.refuses_text_beside_calls else draw(st.sampled_from(["", "Hm."]))
            now |= {"calls"} | ({"one call"} if count == 1 else set()) | ({"text beside calls"} if beside else set())
            now |= {"later calls"} if "calls" in traits else set()
            answer, following = calling(game, count, beside)
            following = [{**each, "content": draw(texts)} for each in following]
            further = [{"role": "user", "content": draw(texts)}] if draw(st.booleans()) else []
            ending = draw(st.sampled_from([family.end_after(answer["tool_calls"]), ""]))
            following += further
        else:
            content = draw(texts.filter(bool) if family.refuses_text_beside_calls else texts)
            if draw(st.booleans()):
                content, now = THOUGHT + content, {*now, "thoughts"}
            now |= {"white space around answers"} if content != content.strip() else set()
            answer, following = {"role": "assistant", "content": content}, [{"role": "user", "content": draw(texts)}]
            ending = draw(st.sampled_from([family.end, "", *family.further_ends]))
        traits |= now
        if not game.answer(answer, ending, following):
            return game, traits
        if ending in family.further_ends:
            break
    return game, set()


@pytest.mark.parametrize("name", marked(PLAYED))
@given(data=st.data())
def test_what_is_appended_is_the_templates_rendering_of_the_whole(name: str, data: st.DataObject) -> None:
    game, traits = data.draw(games(name))
    assert not traits or traits & vendor(name).family.departures, f"{traits} {game.chat}"
