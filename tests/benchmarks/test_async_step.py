"""`make bench-async`: what it compares a step with, and how its loop runs ahead."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import async_step
from benchmarks.async_step import Steps, report, train

pytestmark = pytest.mark.slow


def test_a_step_is_compared_with_the_longer_of_training_and_generating(capsys: pytest.CaptureFixture[str]) -> None:
    report([Steps(2.0, 1.0, 2.1, 0.1, 0.0), Steps(2.0, 4.0, 4.4, 0.2, 0.25)])
    assert json.loads(capsys.readouterr().out) == {
        "generating_s": [2.0, 2.0],
        "training_s": [1.0, 4.0],
        "step_over_longer": [1.05, 1.1],
        "push_s": [0.1, 0.2],
        "stale_rate": [0.0, 0.25],
    }


class ScriptedClient:
    """Notes in which order the loop plays and pushes."""

    def __init__(self) -> None:
        self.version = 3
        self.demanded: list[dict[str, int]] = []

    def policy(self) -> Any:
        return SimpleNamespace(current=self.version)

    def rollout(self, samples: list[Any], policy: dict[str, int], **_options: Any) -> Any:
        self.demanded.append(policy)
        return SimpleNamespace(metrics={"stale_rate": 0.5})

    def push_weights(self, _model: Path) -> Any:
        self.version += 1
        return SimpleNamespace(version=self.version)


def test_the_rollouts_of_a_step_begin_with_the_weights_from_before_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept = list[float]()
    monkeypatch.setattr(async_step, "time", SimpleNamespace(sleep=slept.append, perf_counter=time.perf_counter))
    client = ScriptedClient()
    unchecked: Any = client
    steps = train(unchecked, Path("model"), generating_s=1.0, training_s=2.0, steps=3)
    assert [demand["min_version"] for demand in client.demanded] == [3, 3, 4, 5]
    assert {demand["max_staleness"] for demand in client.demanded} == {1}
    assert (slept, client.version) == ([2.0] * 3, 6)
    assert (steps.training_s, steps.stale_rate) == (2.0, 0.5)
