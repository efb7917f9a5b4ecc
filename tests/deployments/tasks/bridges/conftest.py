"""The bridges are tested by `python -m requirements.beside bridges --test`; elsewhere they are not collected."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REAL_PACKAGES = [
    "test_gymnasium.py",
    "test_mcp.py",
    "test_openenv.py",
    "test_reasoning_gym.py",
    "test_textarena.py",
    "test_verifiers.py",
    "test_verifiers_harness.py",
]
collect_ignore = [] if "ROLLOUT_BRIDGES" in os.environ else REAL_PACKAGES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real packages and servers take seconds to start."""
    for item in items:
        if item.path.parent == HERE and item.path.name in REAL_PACKAGES:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(300))
