"""The page of `GET /ui` in a browser against the running service; its other tests are those of `npm test`."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.paths import REPOSITORY

BROWSER_TESTS = REPOSITORY / "tests" / "service" / "ui" / "browser"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
TIMEOUT_S = 200
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not ((BROWSER_TESTS / "node_modules").exists() and shutil.which("node") and shutil.which(CHROMIUM)),
        reason="needs what `npm ci` sets up",
    ),
]


def test_the_page_shows_the_service_plays_a_sample_and_reads_its_tokens(service_url: str) -> None:
    command = ["node", str(BROWSER_TESTS / "live_service.mjs"), service_url]
    environment = {**os.environ, "PYTHON": sys.executable}
    played = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    assert played.returncode == 0, played.stderr
