import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.deployments.policy.weight_files import GOOD, written


@pytest.fixture(scope="module", autouse=True)
def flushes_nothing() -> Iterator[None]:
    """A flush takes milliseconds, and no test outlives its machine: what is flushed is asserted by `CrashingDisk`."""
    with patch.object(os, "fsync", lambda _descriptor: None):
        yield


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """A folder with one checkpoint, `step-1`."""
    folder = tmp_path / "roots"
    written(folder / "step-1" / "model.safetensors", GOOD)
    return folder
