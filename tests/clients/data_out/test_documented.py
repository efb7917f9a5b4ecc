"""The examples of docs/command-line.md on a response in hand, as they stand there."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from rollout_client import RolloutResponse
from tests.clients.scripted_service import ScriptedService
from tests.paths import REPOSITORY

SECTION = "\n## Results elsewhere\n"
DOCUMENTED_URL = "http://127.0.0.1:8000"


@pytest.fixture
def examples() -> list[str]:
    _, section = (REPOSITORY / "docs" / "command-line.md").read_text().split(SECTION)
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


def test_the_examples_of_tables_files_and_trackers_run_on_a_small_response(
    service: ScriptedService, examples: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[tuple[dict[str, Any], int]] = []
    run = SimpleNamespace(log=lambda figures, step: logged.append((figures, step)))
    wandb = SimpleNamespace(run=None, Histogram=list)
    wandb.init = lambda **_options: setattr(wandb, "run", run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    namespace: dict[str, Any] = {"wandb": wandb}
    tables, trackers = examples
    exec(tables.replace(DOCUMENTED_URL, service.url), namespace)
    response, frame = namespace["response"], namespace["frame"]
    assert isinstance(response, RolloutResponse)
    assert isinstance(frame, pd.DataFrame)
    assert (len(frame), namespace["table"].num_rows, namespace["dataset"].num_rows) == (4, 4, 4)
    assert capsys.readouterr().out.splitlines()[-1] == "4"
    exec(trackers, namespace)
    [(figures, step)] = logged
    assert (figures["rollouts/count"], figures["rollouts/status/completed"], step) == (4.0, 1.0, 1)
    assert figures["rollouts/histogram/total_reward"] == [1.0] * 4
