"""Hooks of schemathesis: the service's own rules for every answer, and requests that get further into the service.

`schemathesis.toml` names this module.
"""

from collections.abc import Mapping
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response

from tests.endurance.fuzz.answers import answer_problems

LONGEST_WAIT_S = 0.05
"""Of valid values of the parameters that wait for something: what they do is tested elsewhere."""
WAITS = ("wait_s", "checksums_within_s")

# Schemathesis looks at the names of the arguments.


@schemathesis.check
def answers_as_the_service_does(ctx: CheckContext, response: Response, case: Case[Any]) -> None:  # noqa: ARG001
    body = response.request.body
    sent = body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else b""
    sent += str(response.request.url).encode()
    problems = list(answer_problems(response.status_code, response.content, sent))
    assert not problems, "; ".join(problems)


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
    if case.query:
        case.query = with_short_waits(case.query)


def with_short_waits(query: Mapping[str, Any]) -> dict[str, Any]:
    """The query with shorter waits, also of those that are numbers only as texts."""
    return {
        name: LONGEST_WAIT_S if name in WAITS and is_longer(value, LONGEST_WAIT_S) else value
        for name, value in query.items()
    }


def is_longer(value: Any, seconds: float) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return float(value) > seconds
    except (TypeError, ValueError, OverflowError):
        return False
