"""The examples of docs/command-line.md on a response in hand, as they stand there."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_client import RolloutResponse
from tests.clients.scripted_service import ScriptedService
from tests.paths import REPOSITORY

SECTION = "\n## Results elsewhere\n"
DOCUMENTED_URL = "http://127.0.0.1:8000"


def test_examples_of_files_tables_trackers_run(service: ScriptedService, capsys: pytest.CaptureFixture[str]) -> None:
    _, section = (REPOSITORY / "docs" / "command-line.md").read_text().split(SECTION)
    files, recipes = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    logged: list[tuple[dict[str, Any], int]] = []
    namespace: dict[str, Any] = {"wandb": SimpleNamespace(log=lambda figures, step: logged.append((figures, step)))}
    exec(files.replace(DOCUMENTED_URL, service.url), namespace)
    assert isinstance(namespace["response"], RolloutResponse)
    assert capsys.readouterr().out.splitlines()[-1] == "4"
    exec(recipes, namespace)
    assert namespace["frame"]["metrics.turn_count"].tolist() == [1] * 4
    assert namespace["dataset"]["total_reward"][:] == [1.0] * 4
    assert logged == [({"rollouts/mean_total_reward": 0.5, "rollouts/total_turns": 4.0}, 1)]
