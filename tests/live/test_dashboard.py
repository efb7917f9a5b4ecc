"""Each query of the dashboard, asked of a real Prometheus that reads a running service."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_client import RequestRejected, RolloutClient
from rollout_client.contract.rollouts import SampleInput, Sampling
from service.startup.config import free_port
from tests.docker.test_dashboard import PANELS

pytestmark = pytest.mark.long
SHOWN_WITHIN_S = 120.0
POLL_S = 2.0
SCRAPE_INTERVAL = "2s"
INTERVAL = "1m"
"""Of the rates, in place of what Grafana computes."""


@pytest.fixture
def prometheus(service_url: str, tmp_path: Path) -> Iterator[str]:
    """The address of one that reads the service."""
    program = shutil.which("prometheus")
    assert program, "install Debian's package prometheus"
    targets = [{"targets": [service_url.removeprefix("http://")]}]
    config = {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL},
        "scrape_configs": [{"job_name": "rollout", "static_configs": targets}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def rows_of(prometheus: str, query: str) -> list[Any]:
    """None while Prometheus starts."""
    try:
        answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=10)
    except httpx.TransportError:
        return []
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return []
    assert answer.status_code == httpx.codes.OK, (query, answer.text)
    rows: list[Any] = answer.json()["data"]["result"]
    return [row for row in rows if row["value"][1] != "NaN"]


def play(client: RolloutClient) -> None:
    """Rollouts of two tasks, steps that fail, and a request that is refused."""
    samples = [*client.example_samples("math", 4, seed=3), *client.example_samples("sliding_puzzle", 4, seed=3)]
    client.rollout(samples, num_generations=16, sampling=Sampling(max_new_tokens=16), max_rollout_turns=3)
    failing = SampleInput.model_validate(
        {"task_name": "following", "messages": [{"role": "user", "content": "Fail."}], "extra_env_info": {"turns": []}}
    )
    client.rollout([failing], sampling=Sampling(max_new_tokens=4))
    with pytest.raises(RequestRejected):
        client.rollout(samples, max_seq_len=2**31)


@pytest.mark.timeout(400)
def test_each_query_of_the_dashboard_finds_what_a_load_has_left(prometheus: str, client: RolloutClient) -> None:
    queries = [target["expr"].replace("$__rate_interval", INTERVAL) for panel in PANELS for target in panel["targets"]]
    ends_at = time.monotonic() + SHOWN_WITHIN_S
    empty = queries
    while empty and time.monotonic() < ends_at:
        play(client)
        time.sleep(POLL_S)
        empty = [query for query in empty if not rows_of(prometheus, query)]
    assert empty == []
