"""The calls of `/sessions`: the request and the response of each. No I/O."""

from typing import Any
from urllib.parse import quote

from rollout_client.calls.call import Call, call_for
from rollout_client.calls.json_values import as_given, json_bytes, json_value
from rollout_client.contract.sessions import (
    DriftReport,
    SessionInfo,
    SessionList,
    SessionRequest,
    SessionReward,
    SessionSamples,
)

SESSIONS = "/sessions"


def open_call(request: dict[str, Any]) -> Call[SessionInfo]:
    """Raises `ValueError` if the fields are not those of `SessionRequest`, `NotJson` if one holds no JSON."""
    given = json_value({name: as_given(value) for name, value in request.items()})
    body = SessionRequest.model_validate(given).model_dump_json(exclude_unset=True)
    return call_for(SessionInfo, "POST", SESSIONS, body=body.encode())


def session_list_call() -> Call[list[SessionInfo]]:
    return call_for(SessionList, "GET", SESSIONS).picking(lambda found: found.sessions)


def session_call(session_id: str) -> Call[SessionInfo]:
    return call_for(SessionInfo, "GET", path_of(session_id))


def samples_call(session_id: str) -> Call[SessionSamples]:
    return call_for(SessionSamples, "GET", f"{path_of(session_id)}/samples")


def drift_call(session_id: str) -> Call[DriftReport]:
    return call_for(DriftReport, "GET", f"{path_of(session_id)}/drift")


def reward_call(session_id: str, reward: SessionReward) -> Call[SessionInfo]:
    body = json_bytes(reward.model_dump(exclude_unset=True))
    return call_for(SessionInfo, "POST", f"{path_of(session_id)}/reward", body=body)


def end_call(session_id: str) -> Call[SessionInfo]:
    return call_for(SessionInfo, "DELETE", path_of(session_id))


def path_of(session_id: str) -> str:
    return f"{SESSIONS}/{quote(session_id, safe='')}"
