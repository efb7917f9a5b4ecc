"""Python environments beside the service's own, below `.bridges/`: `python -m requirements.beside NAME...`.

With `--test` the tests that need an environment run in the end. Without a name it lists the environments. What users
install, and what has to fit beside the engine's packages, is locked with hashes; of the rest the releases are named
here, and pip chooses what they need.
"""

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / ".bridges"
QUIET = ("-qq", "--disable-pip-version-check", "install")


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    help: str
    lock: str = ""
    only: str = ""
    """One package of the lock; by default all."""
    packages: tuple[str, ...] = ()
    """In place of a lock."""
    sees_service: bool = False
    """Has the packages of the service too."""
    runs_tests: bool = False
    """Its own Python runs the tests; otherwise that of the service."""
    python: str = ""
    """The version of Python, if another one than the service's is needed."""
    tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Further environments of the tests."""
    variable: str = ""
    """Of the tests, which says that the environments are there."""


ENVIRONMENTS = {
    "tools": Environment("uv, pip-audit and cyclonedx-bom, for the locks", lock="tools"),
    "bridges": Environment(
        "reasoning-gym, Gymnasium and TextArena (docs/tasks.md)",
        lock="bridges",
        sees_service=True,
        runs_tests=True,
        tests=("tests/deployments/tasks/bridges",),
        needs=("verifiers", "openenv"),
        variable="ROLLOUT_BRIDGES",
    ),
    "verifiers": Environment("verifiers (docs/tasks.md)", lock="verifiers"),
    "openenv": Environment("a server of OpenEnv, for demos", packages=("openenv-core==0.3.0",)),
    "agents": Environment(
        "frameworks for agents (docs/agents.md)",
        lock="agents",
        sees_service=True,
        runs_tests=True,
        tests=("tests/examples/test_framework_agents.py",),
        variable="ROLLOUT_AGENTS",
    ),
    "tinker": Environment(
        "Tinker's own client (docs/other-apis.md)",
        lock="tinker",
        sees_service=True,
        tests=("tests/sockets/test_tinker.py",),
        variable="ROLLOUT_TINKER",
    ),
    "harbor": Environment(
        "Harbor's backends for sandboxes (docs/sandboxes.md)",
        packages=("harbor==0.26.0",),
        python="3.13",
        tests=("tests/sockets/test_harbor_sandboxes.py",),
        variable="ROLLOUT_EVALUATORS",
    ),
    "torchvision": Environment(
        "processors of most models that see (docs/images.md)",
        lock="gpu",
        only="torchvision",
        sees_service=True,
        runs_tests=True,
        tests=("-m", "long", "tests/live/test_images_families.py"),
    ),
}


def set_up(name: str) -> Path:
    """Makes the environment unless it is current; returns its Python."""
    wanted, folder = ENVIRONMENTS[name], FOLDER / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    pins = requirements_of(wanted)
    if ready.exists() and ready.read_text() == pins:
        return python
    sys.stdout.write(f"Setting up {folder.relative_to(REPOSITORY)} (once)\n")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python_of(wanted.python), "-m", "venv", str(folder)], check=True)
    if wanted.sees_service:
        sites = "import site; print(site.getsitepackages()[0])"
        own = subprocess.run([python, "-c", sites], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        Path(own, "service.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
    (folder / "requirements.txt").write_text(pins)
    hashed = ("--no-deps", "--require-hashes") if wanted.lock else ()
    subprocess.run([python, "-m", "pip", *QUIET, *hashed, "-r", str(folder / "requirements.txt")], check=True)
    ready.write_text(pins)
    return python


def requirements_of(wanted: Environment) -> str:
    if not wanted.lock:
        return "\n".join(wanted.packages)
    content = Path(__file__).with_name(f"{wanted.lock}.lock").read_text()
    entries = re.split(r"\n(?=\S)", content)
    return "\n".join(entry for entry in entries if entry.startswith(f"{wanted.only}==")) if wanted.only else content


def python_of(version: str) -> str:
    """An interpreter of the version; by default this one. Raises `SystemExit` without one."""
    if not version:
        return sys.executable
    at_home = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    found = shutil.which(f"python{version}") or next(map(str, at_home), None)
    if found is None:
        raise SystemExit(f"There is no Python {version} here.")
    return found


def run_tests(name: str) -> int:
    """The exit code of pytest."""
    wanted = ENVIRONMENTS[name]
    python = set_up(name) if wanted.runs_tests else Path(sys.executable)
    # The bridges look for each of their environments below the folder of all.
    folder = FOLDER if wanted.needs else FOLDER / name
    variables = {wanted.variable: str(folder)} if wanted.variable else {}
    command = [str(python), "-m", "pytest", "-rs", *wanted.tests]
    return subprocess.run(command, cwd=REPOSITORY, env=os.environ | variables, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--test", action="store_true", help="Run the tests that need the environments.")
    given = parser.parse_args()
    if unknown := set(given.names) - ENVIRONMENTS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if not given.names:
        sys.stdout.writelines(f"{name:<13}{each.help}\n" for name, each in ENVIRONMENTS.items())
    code = 0
    for name in given.names:
        for each in (name, *(ENVIRONMENTS[name].needs if given.test else ())):
            set_up(each)
        if given.test and ENVIRONMENTS[name].tests:
            code = max(code, run_tests(name))
    return code


if __name__ == "__main__":
    sys.exit(main())
