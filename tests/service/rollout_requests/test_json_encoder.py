"""Responses as JSON and as lines of a stream: what was set and nothing else."""

import json
from array import array
from typing import Any

import pytest

from rollout_client.calls.ndjson import StreamLine
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from service.problems import internal_error
from service.rollout_requests import result_encoding
from service.rollout_requests.result_encoding import (
    JsonResponseEncoder,
    json_of,
    problem_line,
    sample_line,
    summary_line,
)
from tests.clients.scripted_service import SUMMARY, result

SUMMED_UP = RolloutSummary(**SUMMARY)


def sample(idx: int, **fields: Any) -> SampleResult:
    return SampleResult.model_validate(result(idx, **fields))


def parts(positions: list[int]) -> list[bytes]:
    encoder = JsonResponseEncoder()
    for position in positions:
        encoder.add(position, sample(position))
    return list(encoder.body(SUMMED_UP))


@pytest.mark.parametrize("positions", [[], [0], [2, 0, 1]])
def test_a_response_has_its_rollouts_in_order_of_their_positions(positions: list[int]) -> None:
    response = json.loads(b"".join(parts(positions)))
    assert response == {**SUMMARY, "samples": [result(position) for position in sorted(positions)]}


def test_a_response_comes_in_parts_of_at_most_part_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    [whole] = parts([0, 1, 2])
    monkeypatch.setattr(result_encoding, "PART_BYTES", 100)
    small = parts([0, 1, 2])
    assert b"".join(small) == whole
    assert max(map(len, small)) == 100
    assert len(small) < len(whole) // 50


def test_only_fields_that_were_set_are_written_and_nulls_survive() -> None:
    message = Message.model_construct(role="user", content="a", token_ids=array("i", [1, 2]), reward=None)
    assert json.loads(json_of(message)) == {"role": "user", "content": "a", "token_ids": [1, 2], "reward": None}


def test_lines_are_those_that_the_client_reads() -> None:
    lines = [
        sample_line(3, sample(3, content="a\nb\u2028c")),
        summary_line(SUMMED_UP),
        problem_line(internal_error(KeyError("x")), "mine"),
    ]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    read = [StreamLine.model_validate_json(line) for line in lines]
    assert (read[0].position, read[0].sample) == (3, sample(3, content="a\nb\u2028c"))
    assert read[1].summary == SUMMED_UP
    assert read[2].problem is not None
    assert (read[2].problem.status, read[2].problem.request_id) == (500, "mine")
    assert [line.model_fields_set for line in read] == [{"position", "sample"}, {"summary"}, {"problem"}]
