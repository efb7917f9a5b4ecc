"""Writes the lines of a streamed response of `POST /rollout`, which `rollout_client/ndjson.py` reads.

A stream (`application/x-ndjson`) has one line per rollout, in the order in which they end, then exactly one line with
the summary or with the problem that ended the request. Each line is one JSON object.
"""

from rollout_client.contract import RolloutSummary, SampleResult
from rollout_client.problem_contract import Problem
from service.rollout_requests.json_encoder import json_of

NDJSON = "application/x-ndjson"


def sample_line(position: int, result: SampleResult) -> bytes:
    """One rollout with its index in the response."""
    return b'{"position":%d,"sample":%s}\n' % (position, json_of(result))


def summary_line(summary: RolloutSummary) -> bytes:
    return b'{"summary":%s}\n' % json_of(summary)


def problem_line(problem: Problem) -> bytes:
    return b'{"problem":%s}\n' % json_of(problem)
