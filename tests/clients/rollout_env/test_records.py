"""The records: named as the contract of the service names them, without importing it."""

import subprocess
import sys
from typing import get_args

import pytest

from rollout_client.contract import messages, rollouts
from rollout_env.records import Role, StopString

FOREIGN = ("ray", "torch", "numpy", "httpx", "fastapi", "vllm", "rollout_client", "deployments", "service")


def test_roles_and_stop_strings_are_those_of_the_contract() -> None:
    assert get_args(Role) == get_args(messages.Role)
    assert get_args(StopString)[1].metadata == get_args(rollouts.StopString)[1].metadata


@pytest.mark.slow
def test_the_package_loads_nothing_but_pydantic() -> None:
    program = f"import sys, rollout_env; print(sorted(set(sys.modules) & set({FOREIGN!r})))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"
