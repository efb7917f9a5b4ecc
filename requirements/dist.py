"""Builds the wheels of the service, the client and environments into `dist/`, and tries them: `make dist`.

Tried is what a user would do outside of any checkout, in a fresh environment: install the wheels beside the packages of
`image-cpu.lock`, then `rollout demo`, then `rollout serve` and a call of it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from requirements.image_locks import REPOSITORY, entries

PROJECTS = (".", "clients", "clients/rollout_env")
LOCK = REPOSITORY / "requirements" / "image-cpu.lock"
READY = re.compile(r"^Ready after .*: (http\S+)$", re.MULTILINE)
START_S = 300
KEPT_VARIABLES = re.compile("PATH|HOME|LANG|PIP_.*|SSL_.*|.*_CA_BUNDLE|TMPDIR")
"""Of the caller's environment: none by which Python would find the checkout."""


def main() -> int:
    wheels = build(REPOSITORY / "dist")
    with TemporaryDirectory(prefix="rollout-dist-") as folder:
        try_wheels(wheels, Path(folder))
    return 0


def build(folder: Path) -> list[Path]:
    """The three wheels, made of the tracked files alone: what an earlier build left would get into them."""
    shutil.rmtree(folder, ignore_errors=True)
    with TemporaryDirectory(prefix="rollout-build-") as sources:
        copy_tracked(Path(sources))
        for project in PROJECTS:
            options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
            run(sys.executable, "-m", "pip", "wheel", *options, str(Path(sources) / project))
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        say(f"{wheel.relative_to(REPOSITORY)} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return wheels


def copy_tracked(to: Path) -> None:
    """Links are kept as links, as in a checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(REPOSITORY / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, to / name, follow_symlinks=False)


def try_wheels(wheels: Sequence[Path], folder: Path) -> None:
    """Raises `subprocess.CalledProcessError` if a command fails, and `RuntimeError` if the service does not serve."""
    say("A fresh environment")
    venv.create(folder / "venv", with_pip=True)
    commands = folder / "venv" / "bin"
    pip = (str(commands / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    torch = entries(LOCK.read_text())["torch"]
    (folder / "torch.lock").write_text(torch + "\n")
    run(*pip, "--no-deps", "--require-hashes", "-r", str(folder / "torch.lock"), at=folder)
    run(*pip, re.match(r"torch==[0-9.]*", torch)[0], at=folder)  # type: ignore[index]  # An entry begins so.
    run(*pip, "--no-deps", "--require-hashes", "-r", str(LOCK), at=folder)
    run(*pip, "--no-deps", *map(str, wheels), at=folder)
    rollout = str(commands / "rollout")
    run(rollout, "--version", at=folder)
    say("rollout demo")
    run(rollout, "demo", at=folder)
    say("rollout serve")
    with served(rollout, folder) as url:
        run(rollout, "play", "math", "--count", "2", "--url", url, at=folder)


@contextmanager
def served(rollout: str, folder: Path) -> Iterator[str]:
    """`rollout serve`, from its start until Ctrl-C has ended it; yields its address."""
    log = folder / "serve.log"
    with log.open("w") as output:
        command = [rollout, "serve", "--port", "18431", "--gpus", "0"]
        process = subprocess.Popen(command, cwd=folder, env=clean_environment(), stderr=output)
    try:
        yield ready_address(process, log)
    finally:
        process.send_signal(signal.SIGINT)
        if (code := process.wait()) != 130:
            say(log.read_text())
            raise RuntimeError(f"rollout serve ended with {code} after Ctrl-C, not 130.")


def ready_address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    for _ in range(START_S):
        if (ready := READY.search(log.read_text())) is not None:
            return ready[1]
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise RuntimeError(f"rollout serve did not start:\n{log.read_text()}")


def run(*command: str, at: Path = REPOSITORY) -> None:
    subprocess.run(command, cwd=at, check=True, env=clean_environment())


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if KEPT_VARIABLES.fullmatch(name)}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
