"""What needs an optional package is collected where `make test-bridges` has installed it: nothing is skipped."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEED_PACKAGES = [
    "test_reasoning_gym.py",
    "test_gymnasium.py",
    "test_textarena.py",
    "test_verifiers.py",
    "test_openenv.py",
]
collect_ignore = [] if "ROLLOUT_BRIDGES" in os.environ else NEED_PACKAGES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real packages and servers take seconds to start."""
    for item in items:
        if item.path.parent == HERE and item.path.name in NEED_PACKAGES:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(300))
