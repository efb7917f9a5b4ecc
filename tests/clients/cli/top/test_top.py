"""The command `rollout top` over real sockets: what it prints, keys, services that go away, Ctrl-C."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from threading import Thread
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from typer.testing import CliRunner, Result

from rollout_client.cli.app import app
from service.startup.config import free_port
from tests.clients.cli.top.recorded import FIRST, GENERATOR, SECOND
from tests.clients.scripted_service import problem, served

QUICK = ("--interval-s", "0.1", "--window-s", "0.1")
POLICY = {"current": 0, "versions": [], "replicas": [{"replica_id": GENERATOR, "version": 0}]}
ENDS_WITHIN_S = 60


async def never() -> AsyncIterator[bytes]:
    """Sends nothing."""
    await asyncio.sleep(ENDS_WITHIN_S)
    yield b""


class Watched:
    """A service that answers with the recorded metrics, each of them once and then the last."""

    def __init__(self, key: str | None = None) -> None:
        self.metrics: deque[Response] = deque(map(PlainTextResponse, (FIRST, SECOND)))
        self.app = FastAPI()

        @self.app.get("/metrics")
        async def metrics(request: Request) -> Response:
            if key is not None and request.headers.get("authorization") != f"Bearer {key}":
                return problem({"type": "about:blank", "title": "No key", "status": 401, "detail": "Send one."})
            return self.metrics.popleft() if len(self.metrics) > 1 else self.metrics[0]

        @self.app.get("/policy")
        async def policy() -> Response:
            return JSONResponse(POLICY)

        @self.app.get("/readyz")
        async def readyz() -> Response:
            return JSONResponse({"status": "ready"})


@pytest.fixture
def url() -> Iterator[str]:
    with served(Watched().app) as url:
        yield url


def top(url: str, *options: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["top", *options, "--url", url], env={"COLUMNS": "80", **environment})


def documents(done: Result) -> list[Any]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_look_is_a_json_object_on_a_line_of_its_own(url: str) -> None:
    done = top(url, "--count", "2", "--json", *QUICK)
    first, second = documents(done)
    assert done.exit_code == 0
    assert (first["in_flight"], "turns_per_s" in first) == (64, False)
    assert second["turns_per_s"] == pytest.approx((5451 - 3356) / second["span_s"])
    assert second["generators"][0]["replica_id"] == GENERATOR


def test_once_looks_once_and_does_not_wait_for_rates() -> None:
    watched = Watched()
    with served(watched.app) as url:
        [found] = documents(top(url, "--once", "--json", "--interval-s", "3600", "--window-s", "3600"))
    assert (found["in_flight"], "turns_per_s" in found) == (64, False)
    assert len(watched.metrics) == 1


def test_on_80_columns_every_figure_is_shown(url: str) -> None:
    done = top(url, "--count", "2", *QUICK)
    assert max(map(len, done.stdout.splitlines())) <= 80
    for text in (
        "Generator 1, Ingress 1",
        "version 0 for 27 s",
        "64 in flight",
        "0 waiting",
        "0% clipped",
        "hits 49%",
        GENERATOR,
    ):
        assert text in done.stdout
    assert [name for name in ("math", "sliding_puzzle") if name not in done.stdout] == []


def test_the_key_is_sent_and_without_it_one_sentence_ends_the_command() -> None:
    with served(Watched(key="secret").app) as url:
        assert top(url, "--once", *QUICK, ROLLOUT_API_KEY="secret").exit_code == 0
        refused = top(url, *QUICK)
    assert (refused.exit_code, refused.stdout, refused.stderr) == (1, "", "No key (401): Send one.\n")


def test_metrics_that_are_not_there_or_fail_leave_the_rest() -> None:
    for failure in (404, 403, 500, 503):
        watched = Watched()
        watched.metrics = deque([problem({"type": "about:blank", "title": "No", "status": failure})])
        with served(watched.app) as url:
            done = top(url, "--once", "--json", *QUICK)
        [found] = documents(done)
        assert (done.exit_code, found["is_ready"], found["policies"]) == (0, True, [{"name": "", "version": 0}])
        assert "in_flight" not in found


@pytest.mark.slow
def test_metrics_that_do_not_come_in_time_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_client.cli.top.readings.ANSWER_WITHIN_S", 0.5)
    watched = Watched()
    watched.metrics = deque([StreamingResponse(never())])
    with served(watched.app) as url:
        [found] = documents(top(url, "--once", "--json", *QUICK))
    assert (found["is_answering"], found["is_ready"], "in_flight" in found) == (True, True, False)


def test_without_its_parser_it_says_what_to_install(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    done = top(url, "--once", *QUICK)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == 'rollout top needs prometheus_client: pip install "rollout-client[cli]"\n'


def test_what_is_no_page_of_metrics_is_one_sentence() -> None:
    watched = Watched()
    watched.metrics = deque([PlainTextResponse("ray_rollout_in_flight{ 1")])
    with served(watched.app) as url:
        done = top(url, "--once", *QUICK)
    assert done.exit_code == 1
    assert done.stderr.startswith("The response of GET /metrics is not in Prometheus' format: ")


def test_where_nothing_listens_the_exit_code_is_1_and_the_object_says_so() -> None:
    done = top(f"http://127.0.0.1:{free_port()}", "--once", "--json", *QUICK)
    [found] = documents(done)
    assert (done.exit_code, found["is_answering"], found["is_ready"]) == (1, False, False)
    assert "cannot be reached" in found["reason"]


def serve(app: FastAPI, port: int) -> tuple[uvicorn.Server, Thread]:
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", timeout_graceful_shutdown=1))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    return server, thread


def command(url: str, *options: str) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "rollout_client", "top", *QUICK, *options, "--url", url]
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def until(process: "subprocess.Popen[str]", is_answering: bool) -> Any:
    """The first object that says so."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if (found := json.loads(line))["is_answering"] is is_answering:
            return found
    raise AssertionError(f"the command has ended: {process.communicate()}")


@pytest.mark.slow
def test_a_service_may_go_away_and_come_back_and_ctrl_c_ends_it_without_a_word() -> None:
    port = free_port()
    server, thread = serve(Watched().app, port)
    with command(f"http://127.0.0.1:{port}", "--json") as watching:
        assert until(watching, True)["is_ready"]
        server.should_exit = True
        thread.join()
        assert until(watching, False)["silent_s"] > 0
        server, thread = serve(Watched().app, port)
        assert until(watching, True)["in_flight"] == 64
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=ENDS_WITHIN_S)
        assert (watching.returncode, errors) == (0, "")
    server.should_exit = True
    thread.join()


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_it_without_a_word(url: str) -> None:
    with command(url, "--json") as watching:
        assert until(watching, True)
        assert watching.stdout is not None
        assert watching.stderr is not None
        watching.stdout.close()
        assert watching.wait(ENDS_WITHIN_S) == 1
        assert watching.stderr.read() == ""


@pytest.mark.slow
def test_on_a_terminal_the_view_is_redrawn_in_place_and_ctrl_c_brings_the_cursor_back(url: str) -> None:
    screen, terminal = os.openpty()
    line = [sys.executable, "-m", "rollout_client", "top", *QUICK, "--url", url]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    with subprocess.Popen(line, stdout=terminal, stderr=terminal, env=environment) as watching:
        os.close(terminal)
        shown = b""
        while shown.count(b"64 in flight") < 3:
            shown += os.read(screen, 65536)
        watching.send_signal(signal.SIGINT)
        # Reading fails once the other end is closed.
        try:
            while chunk := os.read(screen, 65536):
                shown += chunk
        except OSError:
            pass
        assert watching.wait(ENDS_WITHIN_S) == 0
    os.close(screen)
    assert b"\x1b[1A" in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert b"Traceback" not in shown
