"""Importing the package."""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.slow
def test_importing_the_client_needs_nothing_heavy() -> None:
    program = """
        import sys
        absent = ["rich", "typer", "ray", "vllm", "torch", "numpy", "transformers", "fastapi", "service", "deployments"]
        sys.modules.update(dict.fromkeys(absent))
        import rollout_client
        try:
            with rollout_client.RolloutClient() as client:
                client.rollout([], progress=True)
        except ModuleNotFoundError as error:
            sys.exit(str(error))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stderr == 'A progress bar needs rich: pip install "rollout-client[cli]"\n'
