"""These tests are slow: importing TRL's asynchronous trainer takes seconds in every test process.

A file that a marker deselects is imported all the same, so a run without slow tests does not collect it at all.
"""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    leaves_out_slow_tests = "not slow" in config.option.markexpr
    return True if leaves_out_slow_tests and collection_path.name == "test_worker.py" else None
