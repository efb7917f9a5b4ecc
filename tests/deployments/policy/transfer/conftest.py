from pathlib import Path
from typing import Any

import pytest

from deployments.policy.settings import PolicySettings
from deployments.policy.store import PolicyStore
from tests.deployments.policy.scripted_replicas import ScriptedCluster
from tests.deployments.policy.transfer.transfers import TRANSFER, MakeStore
from tests.paths import TINY_MODEL


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    def make(**settings: Any) -> PolicyStore:
        return PolicyStore(
            PolicySettings(folder=str(tmp_path), **{"transfer": TRANSFER, **settings}),
            model=str(TINY_MODEL),
            cluster=ScriptedCluster(),
            settle_s=0.0,
        )

    return make
