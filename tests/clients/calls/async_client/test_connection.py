"""Which calls are made again, when, and what failures say, against a scripted service and servers that break."""

import socket

import pytest
from fastapi.responses import PlainTextResponse

from rollout_client import RequestRejected, RolloutTimeout, ServiceFailed, ServiceUnreachable
from rollout_client.errors import ResponseNotUnderstood, StatusError
from tests.clients.client_calls import breaking_server, free_url, json_response, play
from tests.clients.scripted_service import (
    REJECTED,
    SUMMARY,
    Json,
    ScriptedService,
    overloaded,
    problem,
    result,
    sample,
    unavailable,
)


def test_a_status_that_may_pass_is_tried_again_and_no_other(service: ScriptedService, waits: list[float]) -> None:
    service.rollouts += [lambda _: PlainTextResponse("not now", 502), lambda _: PlainTextResponse("no", 413)]
    with pytest.raises(StatusError, match=r"\(413\): no$"):
        play(service.url, sample())
    assert (len(service.bodies), waits) == (2, [0.5])


def test_the_retries_last_67_seconds_at_most_and_33_at_least(
    service: ScriptedService, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.rollouts += [lambda _: unavailable()] * 34
    with pytest.raises(ServiceFailed):
        play(service.url, sample())
    assert waits == [0.5, 1, 2, 4] + [5] * 12
    waits.clear()
    monkeypatch.setattr("random.uniform", lambda low, _high: low)
    with pytest.raises(ServiceFailed):
        play(service.url, sample())
    assert waits == [0.25, 0.5, 1, 2] + [2.5] * 12
    assert len(service.bodies) == 34


def test_waiting_for_a_full_service_uses_up_no_retry(service: ScriptedService, waits: list[float]) -> None:
    full = [lambda _: overloaded(7)] * 20
    service.rollouts += [*full, lambda _: unavailable(), *full]
    assert len(play(service.url, sample(), retries=1).samples) == 1
    # The service spreads its callers itself: the wait does not grow, and 1 s at most is added.
    assert waits[:20] == [8.0] * 20
    assert waits[21:] == [8.0] * 20


def test_a_full_service_does_not_spare_a_call_its_failures(service: ScriptedService, waits: list[float]) -> None:
    service.rollouts += [lambda _: overloaded(7), lambda _: unavailable(), lambda _: overloaded(7)] * 2
    with pytest.raises(ServiceFailed, match="Not now"):
        play(service.url, sample(), retries=1)
    assert len(waits) == 4


@pytest.mark.parametrize("options", [{"timeout_s": 6}, {"retries": 0}])
def test_a_full_service_is_not_awaited_past_the_timeout_or_without_retries(
    service: ScriptedService, waits: list[float], options: Json
) -> None:
    service.rollouts.append(lambda _: overloaded(7))
    with pytest.raises(RequestRejected, match=r"^The service is full; nothing was started \(429\)"):
        play(service.url, sample(), **options)
    assert waits == []


@pytest.mark.usefixtures("waits")
def test_a_retry_is_logged_with_its_reason(service: ScriptedService, caplog: pytest.LogCaptureFixture) -> None:
    service.rollouts.append(lambda _: unavailable())
    play(service.url, sample())
    assert caplog.messages == ["Trying again in 0.5 s: Not now (503): No replica is ready."]


@pytest.mark.parametrize(
    ("client", "call_options", "attempts"),
    [({"retries": 2}, {}, 3), ({"retries": 2}, {"retries": 0}, 1), ({"retries": 0}, {"retries": 1}, 2)],
)
@pytest.mark.usefixtures("waits")
def test_the_retries_of_a_call_come_before_those_of_the_client(
    service: ScriptedService, client: Json, call_options: Json, attempts: int
) -> None:
    service.rollouts += [lambda _: unavailable()] * 5
    with pytest.raises(ServiceFailed, match=r"^Not now \(503\): No replica is ready\.$"):
        play(service.url, sample(), client=client, **call_options)
    assert len(service.bodies) == attempts


def test_no_attempt_starts_after_timeout_s(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: unavailable({"retry-after": "60"}))
    with pytest.raises(ServiceFailed) as failed:
        play(service.url, sample(), client={"timeout_s": 5})
    assert failed.value.retry_after_s == 60
    assert len(service.bodies) == 1


@pytest.mark.usefixtures("waits")
def test_a_connection_that_broke_before_or_within_the_answer_is_retried() -> None:
    answer = json_response({**SUMMARY, "samples": [result()]})
    with breaking_server([b"", answer[:-5], answer]) as (url, received):
        assert len(play(url, sample()).samples) == 1
    assert len(received) == 3


def test_nobody_listening_is_unreachable_names_the_url_and_is_tried_again(waits: list[float]) -> None:
    url = free_url()
    with pytest.raises(ServiceUnreachable, match=f"^{url} cannot be reached: ") as unreachable:
        play(url, sample(), retries=2)
    assert (waits, unreachable.value.may_have_arrived) == ([0.5, 1], False)


def test_several_field_problems_are_a_list_and_a_long_one_is_cut(service: ScriptedService) -> None:
    errors = [{"field": f"samples[{place}].seed", "message": "too small", "value": -1} for place in range(12)]
    service.rollouts.append(lambda _: problem({**REJECTED, "errors": errors}))
    with pytest.raises(RequestRejected) as rejected:
        play(service.url, sample())
    lines = str(rejected.value).split("\n")
    assert lines[0] == "The request is not valid; nothing was started (422):"
    assert lines[1] == "  - samples[0].seed: too small (got -1)"
    assert lines[-1] == "  - and 2 more"
    assert len(lines) == 12


def test_an_answer_that_is_not_of_the_contract_says_where(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: PlainTextResponse('{"samples": []}'))
    with pytest.raises(ResponseNotUnderstood, match="POST /rollout is not what this client knows at request_id: "):
        play(service.url, sample())


def test_silence_before_the_answer_counts_toward_timeout_s() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RolloutTimeout):
        play(f"http://127.0.0.1:{silent.getsockname()[1]}", sample(), client={"timeout_s": 0.2})
