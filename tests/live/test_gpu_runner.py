"""The tests of the engine and of scores once more, by vLLM's GPU runner under Triton's interpreter."""

import os
import subprocess
import sys

import pytest

from benchmarks.gpu_check.__main__ import ON_THE_RIG
from tests.paths import REPOSITORY

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
FILES = (
    "tests/live/test_engine.py",
    "tests/live/test_engine_adapters.py",
    "tests/live/test_score.py",
    "tests/live/test_token_columns.py",
)


@pytest.mark.parametrize("file", FILES)
def test_what_holds_of_an_engine_and_its_scores_holds_on_vllms_gpu_runner(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:randomly", "--hypothesis-profile=fast", file]
    ended = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **ON_THE_RIG}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
