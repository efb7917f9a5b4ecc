"""What the laws of sessions find in records that are not what was answered."""

from collections.abc import Callable

import pytest

from deployments.sessions.samples import samples_of
from rollout_client.contract.sessions import SessionInfo, SessionSample
from tests.deployments.sessions.harness import FakeEngine, Reply
from tests.deployments.sessions.renderer import tiny
from tests.endurance.session_laws.conversations import Conversation
from tests.endurance.session_laws.laws import record_problems
from tests.endurance.session_laws.random_agent import PLAIN, Call, Choice, PlayedSession, has_other_thought

ASKED = {"role": "user", "content": "What is 2 + 2?"}


def played() -> tuple[PlayedSession, list[SessionSample], SessionInfo]:
    """Two calls, the second of which goes on from the first, and their record."""
    engine = FakeEngine(tiny(), is_parsed=False)
    session = PlayedSession(0, {})
    messages, continues = [ASKED], list[str]()
    for text in ("first", "second"):
        made = engine.call(messages, Reply(text))
        ids, logprobs = list(made.token_ids), list(made.logprobs)
        choice = Choice(made.id, ids, logprobs, "stop", dict(made.message))
        fresh = engine.renderer.fresh(messages, engine.calls[-1].context)
        asked = Conversation(PLAIN, messages)
        session.calls.append(Call(asked, fresh, continues, list(engine.prompts[made.id]), [choice]))
        messages, continues = [*messages, dict(made.message), ASKED], [made.id]
    info = SessionInfo(id="s", base_url="", status="open", generated_tokens=engine.record.generated_tokens)
    return session, samples_of("s", engine.record), info


def test_a_record_that_is_what_was_answered_has_no_problem() -> None:
    assert record_problems(*played()) == []


def other_ids(session: PlayedSession) -> None:
    session.calls[0].choices[0].token_ids[0] += 1


def other_logprobs(session: PlayedSession) -> None:
    session.calls[1].choices[0].logprobs[0] -= 0.001  # type: ignore[index]


def other_prompt(session: PlayedSession) -> None:
    session.calls[1].prompt[-1] += 1


def other_beginning(session: PlayedSession) -> None:
    session.calls[1].prompt[0] += 1


def fresh_is_another(session: PlayedSession) -> None:
    session.calls[0].fresh[0] += 1


def not_recorded(session: PlayedSession) -> None:
    session.calls[1].choices[0].id = "another"


def ended_otherwise(session: PlayedSession) -> None:
    session.calls[1].choices[0].finish_reason = "length"


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (other_ids, "are recorded for"),
        (other_logprobs, "log-probabilities are not those of the answer"),
        (other_prompt, "its recorded prompt is not the engine's"),
        (other_beginning, "does not begin with the ids of"),
        (fresh_is_another, "is not the fresh rendering"),
        (not_recorded, "are not recorded"),
        (ended_otherwise, "it ended with length"),
    ],
)
def test_each_difference_is_found(breaks: Callable[[PlayedSession], None], said: str) -> None:
    session, samples, info = played()
    breaks(session)
    assert any(said in problem for problem in record_problems(session, samples, info))


def test_a_thought_that_was_cut_may_be_rendered_otherwise_than_it_was_generated() -> None:
    session, samples, info = played()
    session.calls[1].fresh[-1] += 1
    [problem] = record_problems(session, samples, info)
    assert "is not the fresh rendering" in problem
    first = session.calls[0].choices[0]
    first.finish_reason, first.message = "length", {"content": "", "reasoning_content": "first"}
    assert not any("fresh rendering" in problem for problem in record_problems(session, samples, info))


def test_a_response_that_is_recorded_twice_is_found() -> None:
    session, samples, info = played()
    problems = record_problems(session, [*samples, samples[0]], info)
    assert any("more than once" in problem for problem in problems)


def test_tokens_that_nobody_can_see_are_found() -> None:
    session, samples, info = played()
    info.generated_tokens += 1
    [problem] = record_problems(session, samples, info)
    assert problem.endswith(f"and the samples have {info.generated_tokens - 1}")


def test_a_response_to_a_call_that_was_left_may_be_the_one_that_is_continued() -> None:
    session, samples, info = played()
    first, second = session.calls
    [choice] = first.choices
    # The agent knows of another response to the same prompt, and of the recorded one only that it left it.
    answered = Call(first.asked, first.fresh, [], first.prompt, [Choice("other", [1], None, "stop", choice.message)])
    session.calls[:] = [Call(first.asked, first.fresh, [], left=[choice.id]), answered, second]
    second.continues = ["other"]
    assert record_problems(session, samples, info) == ["{'other'} are not recorded"]
    session.calls[0].left = []
    assert any("does not begin with the ids of ['other']" in one for one in record_problems(session, samples, info))


@pytest.mark.parametrize(
    ("thought", "is_other"), [("6 + 1", True), ("2 + 2", False), (None, False), ("", False)], ids=str
)
def test_a_message_with_the_thought_of_another_response_does_not_continue_this_one(
    thought: str | None, is_other: bool
) -> None:
    choice = Choice("one", [1], None, "stop", {"content": "", "reasoning_content": "2 + 2"})
    message = {"role": "assistant", "content": "", "reasoning_content": thought}
    assert has_other_thought(message, choice) == is_other
