"""Which failures may pass: the table of `rollout_client.retry`, line by line."""

import pytest
from tenacity import RetryCallState, Retrying, wait_none

from rollout_client.contract.base import Problem
from rollout_client.errors import (
    RequestRejected,
    ResponseNotUnderstood,
    RolloutTimeout,
    ServiceUnreachable,
    StreamBroken,
    error_of_problem,
)
from rollout_client.retry import chunk_may_pass, has_not_begun, may_pass, wait_s


def answered(status: int, name: str | None = None) -> Exception:
    type_ = "about:blank" if name is None else f"urn:rollout:problem:{name}"
    return error_of_problem(Problem(type=type_, title="", status=status, detail=""))


@pytest.mark.parametrize(
    ("error", "most_calls", "load_checkpoint", "chunk"),
    [
        (ServiceUnreachable("refused", may_have_arrived=False), True, True, True),
        (ServiceUnreachable("broke"), True, False, True),
        (StreamBroken("broke"), True, False, True),
        (answered(408), True, True, True),
        (answered(425), True, True, True),
        (answered(429), True, True, True),
        (answered(503), True, True, True),
        (answered(503, "not-ready"), True, False, True),
        (answered(500, "internal"), True, False, True),
        (answered(502), True, False, True),
        (answered(504), True, False, True),
        (answered(409), True, False, True),
        (answered(409, "version-refused"), False, False, False),
        (answered(409, "update-under-way"), False, False, False),
        (answered(409, "policy-not-current"), False, False, False),
        (answered(409, "chunk-misplaced"), False, False, True),
        (answered(400, "chunk-damaged"), False, False, True),
        (answered(502, "sample-failed"), False, False, False),
        (answered(502, "judgement-failed"), False, False, False),
        (answered(404), False, False, False),
        (answered(422, "invalid-request"), False, False, False),
        (RolloutTimeout("over"), False, False, False),
        (ResponseNotUnderstood("what"), False, False, False),
        (KeyError("ours"), False, False, False),
    ],
    ids=lambda value: f"{value}" if isinstance(value, bool) else f"{type(value).__name__} {value}".strip(),
)
def test_what_is_tried_again(error: Exception, most_calls: bool, load_checkpoint: bool, chunk: bool) -> None:
    assert (may_pass(error), has_not_begun(error), chunk_may_pass(error)) == (most_calls, load_checkpoint, chunk)


@pytest.mark.parametrize(("asked_s", "waited_s"), [(None, 0.0), (7.0, 7.0), (86_400.0, 60.0)])
def test_retry_after_is_waited_for_but_not_for_more_than_a_minute(
    asked_s: float | None, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_client.retry.BACKOFF", wait_none())
    problem = Problem(type="about:blank", title="", status=429, detail="")
    state = RetryCallState(Retrying(), None, (), {})
    state.set_exception((RequestRejected, error_of_problem(problem, asked_s), None))
    assert wait_s(state) == waited_s
