"""What holds for every session: random agents that continue, retry, edit, compact, forget, and call in parallel."""

import asyncio
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.sessions.message_comparison import drift_report
from deployments.sessions.records import ChatContext, OpenSession
from deployments.sessions.samples import samples_of
from deployments.sessions.session_record import SessionRecord
from deployments.sessions.session_table import SessionsSettings
from deployments.sessions.store import SessionStore
from rollout_client.contract.sessions import SessionRequest, SessionReward
from tests.deployments.chat.real_tokenizers import wanted
from tests.deployments.sessions.harness import FakeEngine, Prepared, Reply
from tests.deployments.sessions.renderer import PLAIN, real, small, tiny
from tests.endurance.session_laws.conversations import ACTIONS, SUBAGENT, Conversation, Moves
from tests.endurance.session_laws.forms import FORMS
from tests.fakes.storage import ScriptedStorage

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TAKE_ANY_ORDER = [name for name in wanted() if name not in {"gemma3", "mistral"}]
"""The real tokenizers whose templates take messages of one role one after another."""
CONTEXTS = [PLAIN, ChatContext(tools=[ADD]), ChatContext(chat_template_kwargs={"enable_thinking": False})]


class Agent:
    """Draws what an agent does. No two texts are the same, so that an origin says what a message continues."""

    def __init__(self, data: st.DataObject, engine: FakeEngine, has_tools: bool) -> None:
        self._data = data
        self.engine = engine
        self._has_tools = has_tools
        self._texts = 0
        self.conversations: list[Conversation[ChatContext]] = []
        self.said: dict[tuple[int, tuple[str, ...]], str] = {}
        """The id of what was generated at the end of a conversation, by its context and its origins."""
        self.stable = 0
        contexts, later_roles = (CONTEXTS, ["user", "tool"]) if has_tools else ([PLAIN], ["user"])
        self._moves = Moves(self.draw, self.new, contexts, later_roles)

    def draw(self, choices: Any) -> Any:
        return self._data.draw(choices if isinstance(choices, st.SearchStrategy) else st.sampled_from(choices))

    def text(self) -> str:
        self._texts += 1
        return f"{self.draw(['a', 'b b', ' c', 'd '])}{self._texts}"

    def new(self, role: str) -> dict[str, Any]:
        return {"role": role, "content": self.text()}

    def play(self) -> None:
        """One action, and one to three calls at the same time."""
        action = self.draw(ACTIONS) if self.conversations else SUBAGENT
        before = self.draw(self.conversations) if self.conversations else Conversation(PLAIN)
        asked = [self._moves.next(action, before) for _ in range(self.draw([1, 1, 1, 2, 3]))]
        calls = [(conversation, self._prepared(conversation)) for conversation in asked]
        for conversation, prepared in self.draw(st.permutations(calls)):
            self._finish(conversation, prepared)

    def _prepared(self, asked: Conversation[ChatContext]) -> Prepared:
        """Puts the prompt together, and checks it."""
        prepared = self.engine.prepare(asked.messages, asked.context)
        prompt = list(prepared.prompt.token_ids)
        fresh = self.engine.renderer.fresh(asked.messages, asked.context)
        continued = self._continued(asked)
        own = [] if continued is None else self.ids_up_to(continued)
        assert list(prepared.plan.token_ids) == own
        assert prompt[: len(own)] == own
        if fresh[: len(own)] == own:
            assert prompt == fresh
            self.stable += continued is not None
        return prepared

    def _continued(self, asked: Conversation[ChatContext]) -> str | None:
        """The id of the last generated message that the conversation continues."""
        for count in range(len(asked.origins) - 1, 0, -1):
            name = self.said.get((CONTEXTS.index(asked.context), tuple(asked.origins[:count])))
            if name is not None:
                return name
        return None

    def ids_up_to(self, name: str) -> list[int]:
        return [*self.engine.prompts[name], *self.engine.made[name].token_ids]

    def _finish(self, asked: Conversation[ChatContext], prepared: Prepared) -> None:
        replies = [self._reply() for _ in range(self.draw([1, 1, 1, 2]))]
        for made in self.engine.finish(prepared, *replies):
            origins = [*asked.origins, made.id]
            self.said[CONTEXTS.index(asked.context), tuple(origins)] = made.id
            self.conversations.append(asked.with_response(self.draw(FORMS)(dict(made.message)), made.id))

    def _reply(self) -> Reply:
        if not self._has_tools:
            return Reply(self.text(), is_cut=self.draw([False, False, True]))
        thought = self.draw([None, "", "think"])
        arguments = self.draw([None, f'{{"a": {self._texts}, "b": "x y"}}', f'{{"b":1,  "a":{self._texts}}}'])
        return Reply(self.text(), thought, arguments, self.draw([False, False, True]), self.draw([False, False, True]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "is_parsed"),
    [
        *[(small, True), (small, False), (tiny, False)],
        *(pytest.param(partial(real, name), name == "qwen3", marks=pytest.mark.tokenizers) for name in TAKE_ANY_ORDER),
    ],
)
@given(data=st.data())
def test_the_record_of_any_session_is_what_the_engine_did(model: Any, is_parsed: bool, data: st.DataObject) -> None:
    engine = FakeEngine(model(), is_parsed, includes=data.draw(st.booleans()))
    agent = Agent(data, engine, has_tools=is_parsed or model is small)
    for _ in range(data.draw(st.integers(1, 30))):
        if len(engine.made) < 30:
            agent.play()
    record = engine.record
    assert {one.id: one for one in record.generated} == engine.made
    assert len(record.generated) == len(engine.made)
    assert record.generated_tokens == sum(len(one.token_ids) for one in engine.made.values())
    for name, prompt in engine.prompts.items():
        assert list(record.prompt_ids(name)) == prompt
    samples = samples_of("s", record)
    for sample in samples:
        ids = [*chain.from_iterable(message.token_ids for message in sample.message_log)]
        assert ids == agent.ids_up_to(sample.branch)
        responses = [message for message in sample.message_log if message.generation_logprobs is not None]
        made = [engine.made[name] for name in sample.generation_ids]
        assert [list(one.token_ids) for one in responses] == [list(one.token_ids) for one in made]
        assert [one.generation_logprobs for one in responses] == [one.logprobs for one in made]
    replayed = SessionRecord()
    for call in pickle.loads(pickle.dumps(engine.calls)):
        replayed.add(call)
    assert samples_of("s", replayed) == samples
    assert (replayed.calls, replayed.size_bytes) == (record.calls, record.size_bytes)
    assert Counter(chain.from_iterable(own_generations(sample) for sample in samples)) == Counter(engine.made.keys())


def own_generations(sample: Any) -> list[str]:
    """The generated messages that no earlier sample has."""
    places = [place for place, one in enumerate(sample.message_log) if one.generation_logprobs is not None]
    named = zip(places, sample.generation_ids, strict=True)
    return [name for place, name in named if place not in sample.shared_messages]


@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data())
def test_a_record_is_the_same_wherever_its_store_dies(data: st.DataObject) -> None:
    """In memory alone, and of stores of which each begins with what the one before it has stored."""
    engine = FakeEngine(tiny(), is_parsed=False, includes=data.draw(st.booleans()))
    agent = Agent(data, engine, has_tools=False)
    for _ in range(data.draw(st.integers(1, 6))):
        agent.play()
    names = data.draw(st.lists(st.sampled_from([None, *engine.made]), max_size=3))
    asyncio.run(assert_survives(engine, agent, names, lambda *choices: agent.draw(list(choices))))


async def assert_survives(engine: FakeEngine, agent: Agent, rewarded: list[str | None], draw: Any) -> None:
    storage = ScriptedStorage()
    first = SessionStore(SessionsSettings(), storage)
    await first.open(OpenSession("s", "", "hash", "http://service", SessionRequest()))
    stores = [first]

    async def make(change: Callable[[SessionStore], Awaitable[object]]) -> None:
        """The store dies before it, after it is stored, or not; who has no answer asks again."""
        died = draw("no", "no", "before", "after")
        if died == "after":
            await change(stores[-1])
        if died != "no":
            stores.append(SessionStore(SessionsSettings(), ScriptedStorage(storage.kept)))
        await change(stores[-1])

    for call in engine.calls:
        await make(lambda store, call=call: store.add("s", call))  # type: ignore[misc]
    for number, name in enumerate(rewarded):
        reward = SessionReward(reward=number / 2, generation_id=name)
        engine.record.reward(reward.parts, name)
        await make(lambda store, reward=reward: store.reward("s", "", reward))  # type: ignore[misc]
    store = stores[-1]
    assert (await store.samples("s", "")).samples == samples_of("s", engine.record)
    assert await store.drift("s", "") == drift_report("s", engine.record.calls.values())
    asked = draw(*agent.conversations).with_new({"role": "user", "content": "more"})
    planned = engine.record.plan(asked.messages, asked.context)
    assert await store.plan("s", "next", asked.messages, asked.context) == planned
    info = await store.info("s", "")
    assert (info.generated_tokens, info.branches) == (engine.record.generated_tokens, len(engine.record.branches()))
    assert len(storage.kept.entries["s"]) == 1 + len(engine.calls) + len(set(rewarded))
