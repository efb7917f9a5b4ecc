"""Builds the images, runs the containers of compose.yaml for real, and takes everything down.

It waits until the service is ready, posts rollouts, runs locust in containers of its own against it, asks Prometheus
for the metrics of the service and, unless `--without grafana`, Grafana for its dashboard. The exit code is 0 if all
of that worked. Whatever happens, no container, network or volume of the test is left.

It needs Python and Docker with compose alone. Images other than the public ones come in through the variables of
compose.yaml: `BASE_IMAGE`, `PROMETHEUS_IMAGE`, `PIP_NO_INDEX` (docker/README.md).
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

COMPOSE_FILE = Path(__file__).with_name("compose.yaml")
PROJECT = "rollout-test"
PROFILES = ("cpu", "gpu", "cluster", "load", "observability")
SERVICES = {"cpu": ["cpu"], "cluster": ["ray-head", "ray-worker"]}
WATCHERS = ("prometheus", "grafana")
WORKERS = 2
READY_WITHIN_S = 300.0
SCRAPED_WITHIN_S = 90.0
ANSWER_WITHIN_S = 120.0
POLL_S = 2.0
SHOWN_LINES = 40
ROLLOUTS = 4
QUERY = "sum(ray_rollout_rollouts_total)"


class Failed(Exception):
    """A step did not do what it should; the message says which and why."""


class Containers:
    """The containers of one run, under names, ports and volumes that no other run of compose.yaml has."""

    def __init__(self) -> None:
        self.ports = {name: free_port() for name in ("ROLLOUT_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "LOAD_PORT")}
        self._environment = {
            **os.environ,
            **{name: str(port) for name, port in self.ports.items()},
            "ROLLOUT_VOLUMES": PROJECT,
            "LOAD_WORKERS": str(WORKERS),
            # docker-compose before version 2 builds by the old builder unless told otherwise.
            "DOCKER_BUILDKIT": "1",
            "COMPOSE_DOCKER_CLI_BUILD": "1",
            # Some storage drivers copy the whole image for each container.
            "COMPOSE_HTTP_TIMEOUT": "600",
        }
        self._command = [*compose_command(), "--ansi", "never", "--project-name", PROJECT, "--file", str(COMPOSE_FILE)]

    def compose(self, *arguments: str, is_quiet: bool = False) -> str:
        """Runs compose and returns what it prints, which is shown too unless `is_quiet`. Raises `Failed`."""
        said: list[str] = []
        with subprocess.Popen(
            [*self._command, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if not is_quiet:
                    sys.stdout.write(f"    {line}")
                    sys.stdout.flush()
        if process.returncode:
            raise Failed(f"compose {' '.join(arguments)} ended with {process.returncode}")
        return "".join(said)


def compose_command() -> list[str]:
    """`docker compose`, or the older `docker-compose`. Raises `Failed` without either."""
    if given := os.environ.get("COMPOSE"):
        return given.split()
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise Failed("neither docker compose nor docker-compose is there")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON of an answer on loopback; status 0 where nothing answers."""
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_WITHIN_S)
    try:
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, content, {} if body is None else {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    except (OSError, HTTPException, ValueError):
        return 0, None
    finally:
        connection.close()


def has_ended(containers: Containers, service: str) -> bool:
    """Whether the container of `service` has ended by itself."""
    found = containers.compose("ps", "-q", service, is_quiet=True).split()
    asked = ["docker", "inspect", "--format", "{{.State.Running}}", *found]
    return bool(found) and "false" in subprocess.run(asked, capture_output=True, text=True, check=False).stdout


def step(sentence: str) -> None:
    sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {sentence}\n")
    sys.stdout.flush()


def wait_until(what: str, within_s: float, holds: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise Failed(f"{what}: not within {within_s:g} s")
        time.sleep(POLL_S)
    step(f"  {what}, after {time.monotonic() - began:.0f} s")


def check_configs(containers: Containers) -> None:
    step("Reading compose.yaml with each profile")
    for profile in PROFILES:
        containers.compose("--profile", profile, "config", "--quiet", is_quiet=True)


def build(containers: Containers, service: str) -> None:
    step("Building the images")
    containers.compose("build", SERVICES[service][0], "load")


def start(containers: Containers, service: str, watchers: list[str]) -> None:
    step(f"Starting {', '.join(SERVICES[service] + watchers)}")
    containers.compose("up", "--detach", "--no-build", *SERVICES[service], *watchers)
    port = containers.ports["ROLLOUT_PORT"]

    def is_ready() -> bool:
        for each in SERVICES[service]:
            if has_ended(containers, each):
                raise Failed(f"the container {each} has ended")
        return ask(port, "/readyz")[0] == 200

    wait_until("The service is ready", READY_WITHIN_S, is_ready)


def play(containers: Containers) -> None:
    step(f"Posting {ROLLOUTS} rollouts")
    body = {"samples_from": [{"task_name": "math", "count": ROLLOUTS}], "sampling": {"max_new_tokens": 32}}
    status, answer = ask(containers.ports["ROLLOUT_PORT"], "/rollout", body)
    statuses = [sample["status"] for sample in answer["samples"]] if status == 200 else []
    if statuses != ["completed"] * ROLLOUTS:
        raise Failed(f"POST /rollout answered {status} with {statuses or answer}")


def check_walls(containers: Containers, service: str) -> None:
    step("Looking what a program in the container may do")
    name = SERVICES[service][0]
    said = containers.compose(
        "exec",
        "-T",
        name,
        "sh",
        "-c",
        "id -un; touch /app/new 2>&1 || true; grep -E 'CapEff|NoNewPrivs' /proc/self/status",
    )
    wanted = ("rollout", "Read-only file system", "CapEff:\t0000000000000000", "NoNewPrivs:\t1")
    if missing := [text for text in wanted if text not in said]:
        raise Failed(f"of the walls around it these are missing: {missing}")


def load(containers: Containers, seconds: int) -> None:
    step(f"Load of {seconds} s from {WORKERS} workers")
    containers.compose("up", "--detach", "--no-build", "load-worker")
    options = ("--headless", "-u", "4", "-r", "4", "-t", f"{seconds}s", "--only-summary")
    said = containers.compose("run", "--rm", "--use-aliases", "-T", "load", *options)
    line = json.loads(said.strip().splitlines()[-1])
    if not line["rollouts"] or line["exit_code"]:
        raise Failed(f"the load test has {line['rollouts']} rollouts and exit code {line['exit_code']}")


def ask_prometheus(containers: Containers) -> None:
    step(f"Asking Prometheus for {QUERY}")
    port = containers.ports["PROMETHEUS_PORT"]
    found: list[float] = []

    def has_rollouts() -> bool:
        _, answer = ask(port, f"/api/v1/query?query={quote(QUERY)}")
        found[:] = [float(each["value"][1]) for each in (answer or {}).get("data", {}).get("result", [])]
        return any(value > ROLLOUTS for value in found)

    wait_until("Prometheus has more rollouts than were posted by hand", SCRAPED_WITHIN_S, has_rollouts)
    step(f"  {found[0]:g} rollouts")


def ask_grafana(containers: Containers) -> None:
    step("Asking Grafana for its dashboard")
    port = containers.ports["GRAFANA_PORT"]

    def has_dashboard() -> bool:
        _, answer = ask(port, "/api/search?type=dash-db")
        return bool(answer)

    wait_until("Grafana has the dashboard", SCRAPED_WITHIN_S, has_dashboard)


def take_down(containers: Containers) -> None:
    step("Taking everything down")
    profiles = [argument for profile in PROFILES for argument in ("--profile", profile)]
    containers.compose(*profiles, "down", "--volumes", "--remove-orphans", "--timeout", "60")


def show_logs(containers: Containers) -> None:
    profiles = [argument for profile in PROFILES for argument in ("--profile", profile)]
    containers.compose(*profiles, "logs", "--tail", str(SHOWN_LINES))


def run(containers: Containers, given: argparse.Namespace) -> None:
    watchers = [name for name in WATCHERS if name not in given.without]
    check_configs(containers)
    if not given.no_build:
        build(containers, given.service)
    if given.build_only:
        return
    try:
        start(containers, given.service, watchers)
        play(containers)
        check_walls(containers, given.service)
        load(containers, given.seconds)
        for name, asked in {"prometheus": ask_prometheus, "grafana": ask_grafana}.items():
            if name in watchers:
                asked(containers)
    except Failed:
        show_logs(containers)
        raise
    finally:
        take_down(containers)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the containers of compose.yaml for real.")
    parser.add_argument("--service", choices=SERVICES, default="cpu", help="The profile that serves")
    parser.add_argument("--without", action="append", choices=WATCHERS, default=[], help="Not to be started")
    parser.add_argument("--seconds", type=int, default=20, help="Length of the load")
    built = parser.add_mutually_exclusive_group()
    built.add_argument("--no-build", action="store_true", help="The images are there")
    built.add_argument("--build-only", action="store_true", help="End when the images are built")
    given = parser.parse_args()
    # Ended from outside, it takes everything down too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(Containers(), given)
    except Failed as failure:
        step(f"Failed: {failure}")
        return 1
    step("All of it worked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
