from pathlib import Path

import pytest

from tests.deployments.policy.weight_files import GOOD, written


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """A folder with one checkpoint, `step-1`."""
    folder = tmp_path / "roots"
    written(folder / "step-1" / "model.safetensors", GOOD)
    return folder
