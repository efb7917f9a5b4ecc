"""The tests of the engine and of scores once more: by vLLM's GPU runner under Triton's interpreter, and with drafts."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu_check.__main__ import ON_THE_RIG
from tests.live.engines import NGRAM
from tests.paths import REPOSITORY

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
FILES = (
    "tests/live/test_engine.py",
    "tests/live/test_engine_adapters.py",
    "tests/live/test_offloading.py",
    "tests/live/test_score.py",
    "tests/live/test_token_columns.py",
)
WITH_DRAFTS = {"ENGINE_ARGUMENTS": json.dumps({"speculative_config": NGRAM}), "PYTEST_ADDOPTS": "-k 'not min_p'"}
# Scores are those of a service, which the variable does not reach; drafts change which tokens are cached.
DRAFTING = [*(file for file in FILES if not file.endswith(("score.py", "offloading.py"))), "tests/live/test_images.py"]
CASES = [(ON_THE_RIG, file) for file in FILES] + [(WITH_DRAFTS, file) for file in DRAFTING]
CASES += [({**ON_THE_RIG, **WITH_DRAFTS}, "tests/live/test_token_columns.py")]


@pytest.mark.parametrize(("variables", "file"), CASES)
def test_what_holds_of_an_engine_and_its_scores_holds_on_vllms_gpu_runner_and_with_drafts(
    variables: dict[str, str], file: str
) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:randomly", "--hypothesis-profile=fast", file]
    ended = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
