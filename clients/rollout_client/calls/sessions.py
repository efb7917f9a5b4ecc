"""The calls of `/sessions`: what each sends and how its response is read. No I/O."""

from typing import Any
from urllib.parse import quote

from pydantic_core import to_json

from rollout_client.calls.rollouts import Call, parsed
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
    """Raises `ValueError` if the fields are not those of `SessionRequest`."""
    body = SessionRequest.model_validate(request).model_dump_json(exclude_unset=True)
    return Call("POST", SESSIONS, info_in, body=body.encode())


def session_list_call() -> Call[list[SessionInfo]]:
    return Call("GET", SESSIONS, lambda body: parsed(SessionList, "The response of GET /sessions", body).sessions)


def session_call(session_id: str) -> Call[SessionInfo]:
    return Call("GET", path_of(session_id), info_in)


def samples_call(session_id: str) -> Call[SessionSamples]:
    return Call(
        "GET", f"{path_of(session_id)}/samples", lambda body: parsed(SessionSamples, "The samples of a session", body)
    )


def drift_call(session_id: str) -> Call[DriftReport]:
    return Call("GET", f"{path_of(session_id)}/drift", lambda body: parsed(DriftReport, "A drift report", body))


def reward_call(session_id: str, reward: SessionReward) -> Call[SessionInfo]:
    body = to_json(reward.model_dump(exclude_unset=True))
    return Call("POST", f"{path_of(session_id)}/reward", info_in, body=body)


def end_call(session_id: str) -> Call[SessionInfo]:
    return Call("DELETE", path_of(session_id), info_in)


def path_of(session_id: str) -> str:
    return f"{SESSIONS}/{quote(session_id, safe='')}"


def info_in(body: bytes) -> SessionInfo:
    return parsed(SessionInfo, "The response of /sessions", body)
