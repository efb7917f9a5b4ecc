"""Errors from responses, without a connection."""

import pickle

import pytest

from rollout_client.contract.base import Problem
from rollout_client.errors import (
    NotJson,
    RequestRejected,
    ServiceUnreachable,
    TokenizerDiffers,
    error_of_problem,
    seconds_until,
)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), (" 0 ", 0.0), ("soon", None), (None, None), ("Wed, 21 Oct 2015 07:28:00 GMT", None)],
)
def test_retry_after_is_a_number_of_seconds(header: str | None, seconds: float | None) -> None:
    assert seconds_until(header) == seconds


def test_an_error_survives_pickling() -> None:
    problem = Problem(type="about:blank", title="Not now", status=429, detail="later", request_id="abc")
    error = pickle.loads(pickle.dumps(error_of_problem(problem, 7.0)))
    assert (type(error), error.problem, error.retry_after_s) == (RequestRejected, problem, 7.0)
    unreachable = pickle.loads(pickle.dumps(ServiceUnreachable("refused", may_have_arrived=False)))
    assert (str(unreachable), unreachable.may_have_arrived) == ("refused", False)
    differs = pickle.loads(pickle.dumps(TokenizerDiffers(["a", "b"])))
    assert (differs.differences, str(differs)) == (["a", "b"], "The tokenizer is not the service's: a; b.")
    not_json = pickle.loads(pickle.dumps(NotJson("samples[3].idx", "<object>", "object", 3)))
    assert (not_json.field, not_json.sample) == ("samples[3].idx", 3)
    assert str(not_json).startswith(
        "samples[3].idx: a value of type object cannot be sent as JSON (got <object>). Send"
    )
