"""What is said of the version spans of a rollout."""

import pytest

from rollout_client.contract.messages import Message, WeightVersionSpan
from tests.endurance.soak.span_check import span_problems
from tests.endurance.soak.version_times import VersionTimes


def message(tokens: int, *spans: tuple[int, int, int]) -> Message:
    return Message(
        role="assistant",
        content="",
        token_ids=list(range(tokens)),
        generation_logprobs=[-1.0] * tokens,
        weight_versions=[
            WeightVersionSpan(version=str(version), start=start, end=end) for version, start, end in spans
        ],
    )


def problems(*messages: Message, min_version: int = 0) -> list[str]:
    """Of a rollout from 0 to 10, in which version 1 was current, and version 2 from 5 on; version 3 came at 20."""
    times = VersionTimes()
    for version, sent in ((1, -5.0), (2, 5.0), (3, 20.0)):
        times.send(version, sent)
        times.acknowledge(version, sent + 1)
    return list(span_problems(messages, times, 0.0, 10.0, min_version))


def test_spans_that_cover_each_message_and_go_up_are_right() -> None:
    question = Message(role="user", content="", token_ids=[1, 2])
    assert problems(question, message(4, (1, 0, 4)), question, message(6, (1, 0, 2), (2, 2, 6)), min_version=1) == []


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([message(4, (1, 0, 3))], "message 0: spans to 3 and 4 log-probabilities for 4 tokens"),
        ([message(4)], "message 0: spans to 0 and 4 log-probabilities for 4 tokens"),
        ([message(4, (1, 0, 1), (2, 2, 4))], "message 0: a span from 2 to 4 follows one that ends at 1"),
        ([message(4, (1, 0, 4), (2, 4, 4))], "message 0: a span from 4 to 4 follows one that ends at 4"),
        ([message(2, (2, 0, 2)), message(2, (1, 0, 2))], "message 1: a token of version 1 after version 2"),
        ([message(2, (3, 0, 2))], "message 0: version 3 was not current while the rollout was played"),
    ],
)
def test_each_wrong_span_is_named(messages: list[Message], said: str) -> None:
    assert problems(*messages) == [said]


def test_no_token_is_older_than_the_version_that_was_demanded() -> None:
    assert problems(message(2, (1, 0, 2)), min_version=2) == ["message 0: a token of version 1 after version 2"]
