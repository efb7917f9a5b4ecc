import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from deployments.policy.settings import PolicySettings
from deployments.policy.store import PolicyStore
from tests.deployments.policy.scripted_replicas import ScriptedCluster
from tests.deployments.policy.transfers import TRANSFER, MakeStore
from tests.deployments.policy.weight_files import GOOD, written
from tests.paths import TINY_MODEL


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


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    def make(**settings: Any) -> PolicyStore:
        return PolicyStore(
            PolicySettings(folder=str(tmp_path), **{"transfer": TRANSFER, **settings}),
            model=str(TINY_MODEL),
            cluster=ScriptedCluster(),
        )

    return make
