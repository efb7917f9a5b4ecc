"""The numbers beside the tokens of a session: those that a rollout of the same tokens has, whatever became of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.protocols.generation import Generation, GenerationRequest, IncludedColumns
from deployments.protocols.token_columns import EXPERTS, packed_rows
from deployments.sessions.codec import call_entry, call_of
from deployments.sessions.samples import samples_of
from deployments.sessions.session_record import SessionRecord
from rollout_client.contract.messages import COLUMN_FIELDS, Message, PackedNumbers
from tests.deployments.sessions.harness import NEXT, QUESTION, FakeEngine, Reply, columns_after
from tests.deployments.sessions.renderer import small, tiny
from tests.deployments.sessions.test_session_laws import Agent
from tests.service.rollouts.playing import play
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator, outcome

ALL = IncludedColumns(sampling_mask=True, entropy=True, routed_experts=True)


class ReplayingGenerator(ScriptedGenerator):
    """Generates these tokens, with the columns of the fake engine of sessions."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__([])
        self._token_ids = token_ids

    async def generate(self, request: GenerationRequest) -> Generation:
        columns = columns_after(request.prompt_token_ids, self._token_ids, request.experts_from)
        return Generation(self._token_ids, [-0.5] * len(self._token_ids), "stop", columns=columns)


def played(log: Sequence[Message]) -> list[Message]:
    """The log of rollouts that have these tokens: each one generates a response, and the next one goes on with it."""
    so_far: list[Message] = []
    for message in log:
        if message.generation_logprobs is None:
            so_far.append(Message(role="user", content="", token_ids=list(message.token_ids)))
            continue
        posted = list(so_far)
        recipe = EpisodeRecipe(message_log=lambda _, posted=posted: posted, include=ALL, max_seq_len=10**6)  # type: ignore[misc]
        judge = ScriptedEnvironment([outcome(terminated=True)])
        result = play(replace(recipe, max_rollout_turns=len(log)), ReplayingGenerator(message.token_ids), judge)
        so_far = result.message_log[: len(posted) + 1]
    return so_far


def columns_of(log: Sequence[Message]) -> list[dict[str, Any]]:
    return [{name: getattr(message, name) for name in COLUMN_FIELDS} for message in log]


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=30)
def test_the_columns_of_any_session_are_those_of_rollouts_with_its_tokens(data: st.DataObject) -> None:
    engine = FakeEngine(tiny(), is_parsed=False, includes=True)
    agent = Agent(data, engine, has_tools=False)
    for _ in range(data.draw(st.integers(1, 8))):
        agent.play()
    for sample in samples_of("s", engine.record):
        assert columns_of(sample.message_log) == columns_of(played(sample.message_log))


def branching() -> FakeEngine:
    """One answer with two continuations."""
    engine = FakeEngine(small(), includes=True)
    first = engine.call([QUESTION], Reply("3"))
    engine.call([QUESTION, first.message, NEXT], Reply("6"))
    engine.call([QUESTION, first.message, {"role": "user", "content": "Sure?"}], Reply("Yes"))
    return engine


def test_a_response_whose_experts_are_of_another_model_adds_none() -> None:
    engine = FakeEngine(small(), includes=True)
    first = engine.call([QUESTION], Reply("3"))
    known = engine.record.plan([QUESTION, first.message, NEXT], engine.calls[0].context).experts_from
    other: PackedNumbers = packed_rows([1] * 3, "uint8", [3, 1])
    prepared = engine.prepare([QUESTION, first.message, NEXT])
    [second] = engine.finish(prepared, Reply("6"))
    changed = replace(engine.calls[1], generated=[replace(second, columns={EXPERTS: other})])
    record = SessionRecord()
    record.add(engine.calls[0])
    record.add(changed)
    assert record.plan([QUESTION, first.message, NEXT, second.message, NEXT], prepared.context).experts_from == known
    [sample] = samples_of("s", record)
    assert sample.message_log[-1].routed_experts is None


def test_an_entry_of_a_call_without_columns_has_its_json_alone() -> None:
    with_columns = branching().calls[0]
    without = replace(with_columns, generated=[replace(one, columns={}) for one in with_columns.generated])
    entry = call_entry(without)
    assert b"\n" not in entry
    assert call_of(entry).generated == without.generated
    assert call_of(call_entry(with_columns)).generated == with_columns.generated
    assert len(call_entry(with_columns)) < len(entry) + 300 + sum(
        len(column.data) for one in with_columns.generated for column in one.columns.values()
    )


def test_the_record_counts_the_bytes_of_its_columns() -> None:
    engine, plain = branching(), SessionRecord()
    for call in engine.calls:
        plain.add(replace(call, generated=[replace(one, columns={}) for one in call.generated]))
    numbers = [column.data for one in engine.made.values() for column in one.columns.values()]
    assert engine.record.size_bytes == plain.size_bytes + sum(map(len, numbers))
