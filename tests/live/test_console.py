"""What a user sees on the console of a service whose environment prints, raises, or cannot start."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_client import RolloutClient
from service.startup.config import free_port
from tests.live.service_process import lines_until, service_process
from tests.paths import REPOSITORY

pytestmark = pytest.mark.long


def config_of(folder: Path, **arguments: Any) -> str:
    """A config with a simulated engine and one environment, which is named under `environments` alone."""
    config = yaml.safe_load((REPOSITORY / "serve_config.scale.yaml").read_text())
    config["http_options"]["port"] = free_port()
    [application] = config["applications"]
    del application["deployments"]
    application["args"]["environments"] = {
        "talking": {"import_path": "tests.live.talking_environment:TalkingEnvironment", "arguments": arguments}
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def sample(**say: Any) -> dict[str, Any]:
    return {"task_name": "talking", "messages": [{"role": "user", "content": "Go."}], "extra_env_info": say}


def test_what_an_environment_prints_and_what_fails_reaches_the_console(tmp_path: Path) -> None:
    with service_process(config_of(tmp_path, greeting="hello")) as service:
        *greeting, ready = lines_until(service, "Ready after")
        assert [line for line in greeting if not line.startswith("Starting ")] == ["[talking] hello"]
        assert greeting[:2] == ["Starting Ray", greeting[1]]
        assert greeting[1].startswith("Starting Ray Serve (")
        url = ready.split()[-1]
        logs, *_ = lines_until(service, "Routes and their fields")
        folder = Path(logs.removeprefix("Logs of the replicas: "))
        assert len(list(folder.glob("rollout_talking_*.jsonl"))) == 1
        with RolloutClient(url) as client:
            [said] = client.rollout([sample(text="move [1]")], sampling={"max_new_tokens": 1}).samples
            assert said.status == "completed"
            assert lines_until(service, "as a warning") == [
                "[talking] move [1]",
                "[talking] move [1] on stderr",
                "[talking] warning: move [1] as a warning",
            ]
            failing = [sample(text="no such move", raises=True)]
            response = client.rollout(failing, sampling={"max_new_tokens": 1})
        [failed] = response.samples
        assert failed.status == "error"
        printed: list[str] = []
        # The environment's replica and the ingress write logs of their own, and either may be read first.
        while "ValueError: no such move" not in printed or not any(line.startswith("[Ingress]") for line in printed):
            printed += lines_until(service, "")
        assert sorted(line.partition(":")[0] for line in printed if line.startswith("[")) == [
            "[Ingress] warning",
            "[talking] warning",
        ]
        [warning] = [line for line in printed if line.startswith("[talking]")]
        assert warning.startswith("[talking] warning: A step of task talking failed: ")
        assert response.request_id in warning
        assert "Traceback (most recent call last):" in printed
        assert any("tests/live/talking_environment.py" in line for line in printed)
        service.terminate()
        rest, _ = service.communicate(timeout=120)
    assert rest.splitlines()[-2:] == ["Stopping the service", "The service has stopped."]


def test_an_environment_that_cannot_start_ends_the_start(tmp_path: Path) -> None:
    with service_process(config_of(tmp_path, greeting="hello", fails_to_start=True)) as service:
        printed, _ = service.communicate(timeout=280)
    assert service.returncode == 1
    assert "[talking] hello\n" in printed
    assert "talking failed to start. Traceback (most recent call last):\n" in printed
    assert 'raise OSError("no board to play on")\n' in printed
    assert "OSError: no board to play on\n" in printed
    assert "site-packages/ray/" not in printed
