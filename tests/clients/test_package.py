"""Importing the package."""

import subprocess
import sys
import textwrap

import pytest

import rollout_client


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


@pytest.mark.slow
def test_a_client_is_imported_with_at_most_30_modules_of_the_package() -> None:
    program = """
        import sys
        from rollout_client import RolloutClient
        print(len([name for name in sys.modules if name.partition(".")[0] == "rollout_client"]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 30


def test_each_name_of_the_package_is_there_and_no_other() -> None:
    assert all(hasattr(rollout_client, name) for name in rollout_client.__all__)
    assert len(set(rollout_client.__all__) - {"__version__"}) == 26
    with pytest.raises(AttributeError, match="module 'rollout_client' has no attribute 'Nothing'"):
        _ = rollout_client.Nothing
