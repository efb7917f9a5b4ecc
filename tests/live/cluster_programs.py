"""Programs that run a cluster of their own: Ray and Serve read their environment when they are imported."""

import json
import os
import subprocess
import sys
from typing import Any

from dotenv import dotenv_values

from tests.paths import REPOSITORY


def findings_of(module: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """Runs the module with the variables of `serve.env` and returns the JSON of its last line."""
    environment = {name: value or "" for name, value in dotenv_values(REPOSITORY / "serve.env").items()} | os.environ
    assert environment["RAY_allow_out_of_band_object_ref_serialization"] == "0"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))))
    program = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    found: dict[str, Any] = json.loads(program.stdout.splitlines()[-1])
    return found
