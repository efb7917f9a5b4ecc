"""The server of an environment, without its socket."""

import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from rollout_env import ChatMessage, SampleRejected, Session, StartOutcome, StepOutcome
from rollout_env.records import with_read_images, with_written_images
from rollout_env.serve import EnvironmentServer, answering
from tests.clients.rollout_env.counting_environment import Count, CountingEnvironment
from tests.virtual_time import runs

ASKED = {"message_log": [{"role": "assistant", "content": "1"}], "extra_env_info": {"until": 2}}


class Numbered(Session):
    def __init__(self, number: int, closed: list[str]) -> None:
        self._number, self._closed = number, closed

    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        return StepOutcome({"role": "user", "content": ""}, 0.0, terminated=False)

    def close(self) -> None:
        self._closed.append(f"session {self._number}")
        if self._number == 1:
            raise OSError("The socket is gone.")


class NumberingEnvironment(CountingEnvironment):
    def __init__(self) -> None:
        self.opened = 0
        self.closed: list[str] = []

    def open_session(self, message_log: list[ChatMessage], extra_env_info: Count) -> Session:
        self.opened += 1
        return Numbered(self.opened - 1, self.closed)

    def close(self) -> None:
        self.closed.append("environment")


def test_all_are_closed_beside_a_session_that_cannot_be() -> None:
    environment = NumberingEnvironment()

    def serve_three_sessions() -> None:
        with TestClient(EnvironmentServer(environment).app()) as client:
            for _ in range(3):
                session = client.post("/sessions", json={}).json()
                client.post("/step", json={**ASKED, **session}).raise_for_status()

    with pytest.raises(OSError, match=r"The socket is gone\."):
        serve_three_sessions()
    assert sorted(environment.closed[:-1]) == ["session 0", "session 1", "session 2"]
    assert environment.closed[-1] == "environment"


@runs
async def test_what_it_raises_can_be_answered_whatever_the_message_holds() -> None:
    async def handler(asked: Any) -> Any:
        raise SampleRejected(asked)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps("\ud83d").encode()}

    response = await answering(handler)(Request({"type": "http", "headers": []}, receive))
    assert response.status_code == 409
    assert json.loads(bytes(response.body)) == {"kind": "rejected", "message": "\\ud83d"}


class PaintingEnvironment(CountingEnvironment):
    def start(self, message_log: list[ChatMessage], extra_env_info: Count) -> StartOutcome:
        return StartOutcome([{"role": "user", "content": "Look", "images": [b"\x89PNG"]}])

    async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        return StepOutcome({"role": "user", "content": "", "images": [b"\xff\xd8", "sha256:0"]}, 0.0, terminated=False)


def test_images_are_the_same_bytes_and_names_on_the_other_side() -> None:
    with TestClient(EnvironmentServer(PaintingEnvironment()).app()) as client:
        begun = client.post("/start", json=ASKED).json()
        step = client.post("/step", json={**ASKED, **client.post("/sessions", json={}).json()}).json()
    assert with_read_images(begun)["observation"] == [{"role": "user", "content": "Look", "images": [b"\x89PNG"]}]
    assert with_read_images(step)["observation"]["images"] == [b"\xff\xd8", "sha256:0"]
    nothing = {"observation": None, "reward": 0.0}
    assert with_read_images(with_written_images(nothing)) == nothing
