"""The provider `harbor` over Harbor's own `BaseEnvironment`, with a backend that runs commands on this machine.

`python -m requirements.beside harbor` installs Harbor, which needs Python 3.13. `harbor_sandboxes_program.py` runs
there. No vendor's backend is met.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.paths import REPOSITORY

PROGRAM = Path(__file__).with_name("harbor_sandboxes_program.py")
PYTHON = Path(os.environ["ROLLOUT_EVALUATORS"], "bin", "python")
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no Python 3.13, which Harbor needs")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    results = tmp_path_factory.mktemp("harbor") / "results.json"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([PYTHON, PROGRAM, results], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(results.read_text())


def test_the_backend_gets_what_the_task_asks_for(found: Any) -> None:
    assert found["asked"] == {"cpus": 1.5, "image": "debian"}


def test_commands_and_files_are_those_of_the_contract(found: Any) -> None:
    assert found["done"] == [3, "given xy z\nFOLDER\n", "err\n"]
    assert (found["read"], found["missing"]) == (True, True)
    assert found["timed_out"] is True
    assert found["reach"] == "https://service"


def test_a_sandbox_is_destroyed_though_the_backend_first_fails(found: Any) -> None:
    assert found["left"] == []
    assert found["lost"] == "on-this-machine: ConnectionError: no such sandbox"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("folders", "SandboxRefused: The provider harbor is not on this machine"),
        ("memory_mb", "SandboxRefused: memory_mb is 100, and the backend harbor_sandboxes_program:OnThisMachine of"),
        ("storage_mb", "SandboxRefused: storage_mb is 100, and the backend"),
        ("network", "SandboxRefused: harbor_sandboxes_program:OnThisMachine refuses the sandbox: "),
        ("no Dockerfile", "SandboxRefused: harbor_sandboxes_program:OnThisMachine refuses the sandbox: "),
        ("slow", "SandboxLost: harbor_sandboxes_program:OnThisMachine did not start a sandbox within 0.2 s."),
    ],
)
def test_what_the_backend_does_not_enforce_or_make_is_refused(found: Any, asked: str, sentence: str) -> None:
    assert found["refused"][asked].startswith(sentence)


def test_a_backend_without_its_key_or_a_name_is_refused_at_the_start(found: Any) -> None:
    for name, sentence in found["unusable"].items():
        assert sentence.startswith(f"the backend {None if name == 'none' else name} of harbor cannot be used: "), name
    assert "E2B_API_KEY" in found["unusable"]["e2b"]
