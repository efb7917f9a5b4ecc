"""Hooks of schemathesis: the service's own rules for every answer, and requests that get further into the service.

`schemathesis.toml` names this module.
"""

from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response

from tests.endurance.fuzz.adjusted_requests import with_short_waits
from tests.endurance.fuzz.answers import answer_problems

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
