"""Stand-ins for the models and servers that some tasks ask, so that a demo needs no other server and no download.

The judge counts words, and the reward model has random weights: what they say means nothing. The servers are those of
`examples/bridged`.
"""

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from ray.serve.schema import ServeDeploySchema
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from examples.reward_model import write_reward_model
from examples.task_configs import BRIDGED, python_of
from service.startup.config import free_port

STAND_IN = "stand-in"
"""The host of a judge or of a server, and the name of a reward model, in whose place a stand-in is served."""
SERVERS = {"openenv_server": python_of("openenv")}
"""The interpreters of the servers in `examples/bridged`."""
SERVER_START_S = 300.0
WORDS_OF_FULL_SCORE = 20


class JudgeHandler(BaseHTTPRequestHandler):
    """Answers `POST /chat/completions`: the more words the judged reply has, the higher is its score, up to 10."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][0]["content"]
        data, _ = json.JSONDecoder().raw_decode(question, question.index("{\n"))
        words = len(data["reply"].split())
        verdict = {"score": min(10 * words / WORDS_OF_FULL_SCORE, 10), "reason": f"It has {words} words."}
        message = {"role": "assistant", "content": json.dumps(verdict)}
        answer = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def stand_in_judge() -> Iterator[str]:
    """Yields its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), JudgeHandler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def stand_in_server(name: str) -> Iterator[str]:
    """Runs one of `SERVERS` and yields its URL."""
    port = free_port()
    with subprocess.Popen([str(SERVERS[name]), str(BRIDGED / f"{name}.py"), str(port)]) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_it_answers(url)
            yield url
        finally:
            process.kill()


@retry(
    retry=retry_if_exception_type(httpx.TransportError),
    stop=stop_after_delay(SERVER_START_S),
    wait=wait_fixed(0.05),
    reraise=True,
)
def wait_until_it_answers(url: str) -> None:
    """Any answer will do. Raises `httpx.TransportError` without one in `SERVER_START_S`."""
    httpx.get(url, trust_env=False)


@contextmanager
def stand_ins(config: ServeDeploySchema) -> Iterator[ServeDeploySchema]:
    """The config, whose judges, reward models and servers that are to be stand-ins run for the length of the block."""
    [application] = config.applications
    with ExitStack() as running:
        for environment in application.args["environments"].values():
            for model in environment.get("models", {}).values():
                if f"//{STAND_IN}/" in model["base_url"]:
                    model["base_url"] = running.enter_context(stand_in_judge())
            arguments = environment.get("arguments", {})
            if arguments.get("url", "").startswith(f"http://{STAND_IN}/"):
                arguments["url"] = running.enter_context(stand_in_server(arguments["url"].rpartition("/")[2]))
            if STAND_IN in environment.get("reward_models", ()):
                folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
                write_reward_model(folder, hidden_size=32, layers=2)
                application.args.setdefault("reward_models", {})[STAND_IN] = {"model": str(folder)}
        yield config
