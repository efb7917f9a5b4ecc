"""Families of models on a real engine: pushed modules give the log-probabilities that transformers computes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.live.played_with_weights import LOGPROB_TOLERANCE
from tests.model_families import FAMILIES
from tests.paths import REPOSITORY

TIMEOUT_S = 240
PUSHES = ("initial", "full", "partial", "again")
ENVIRONMENT = {
    # The engine and its worker run in the process itself.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",
}
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def comparisons() -> Mapping[str, Any]:
    """By family; one process for all, which imports vLLM once."""
    searched = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "clients"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "tests.live.family_engines", *FAMILIES],
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": searched},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = map(json.loads, ended.stdout.splitlines())
    return {line.pop("family"): line for line in lines}


@pytest.mark.parametrize("weights", PUSHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_transformers(comparisons: Mapping[str, Any], family: str, weights: str) -> None:
    found = comparisons[family][weights]
    assert found["largest"] <= LOGPROB_TOLERANCE
    if weights != "initial":
        assert found["change"] > 3 * LOGPROB_TOLERANCE, "the test could not tell new weights from old ones"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checksum_of_an_engine_is_that_of_its_weights(comparisons: Mapping[str, Any], family: str) -> None:
    initial, full, partial, again = (comparisons[family][name]["checksum"] for name in PUSHES)
    assert initial == again
    assert len({initial, full, partial}) == 3
