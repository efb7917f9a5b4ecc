"""What a command has left in a sandbox is ended, however it was started."""

import asyncio
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers import leftover, shell
from deployments.sandbox.providers.interface import ExecResult, RunningSandbox, SandboxFile, SandboxSpec
from deployments.sandbox.providers.leftover import FIRST, ProcessesLeft, end_others, processes_of
from deployments.sandbox.providers.local import LocalProvider
from deployments.sandbox.providers.shell import RemoteSandbox
from tests.deployments.sandbox.providers.opened import opened

# Sandboxes are started.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
ALONE = "import os\nif os.fork():\n    os._exit(0)\nos.setsid()\nif os.fork():\n    os._exit(0)\n"
BEAT = "open('/app/beat', 'a').write('.')"


def by_python(source: str) -> list[str]:
    """A program that has left its parent, and its session."""
    return ["python3", "-c", ALONE + source]


KINDS = {
    "two forks and a session": by_python(f"while True: {BEAT}"),
    "each forks the next one and ends": by_python(f"while True:\n    os.fork() and os._exit(0)\n    {BEAT}"),
    "many that fork": by_python(
        f"for _ in range(5): os.fork()\nwhile True:\n    os.fork() or os._exit(0)\n    os.wait()\n    {BEAT}"
    ),
    "its first thread has ended": by_python(
        f"import ctypes, threading\ndef work():\n    while True: {BEAT}\n"
        "threading.Thread(target=work).start()\nctypes.CDLL(None).syscall(60, 0)"
    ),
    "its name looks like a state": by_python(f"open('/proc/self/comm', 'w').write('x) Z 1\\n2 (')\nwhile True: {BEAT}"),
    "it is stopped": ["sh", "-c", "(sleep 1000 & kill -STOP $!) > /dev/null 2>&1; echo . > /app/beat"],
}


def spec(folder: Path) -> SandboxSpec:
    (folder / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
    return SandboxSpec(folder=folder)


async def listed(sandbox: RunningSandbox) -> list[str]:
    """The command lines of the processes beside the first one and those that list them."""
    said = (await sandbox.exec(["ps", "-eo", "pid,args", "--no-headers"])).stdout.splitlines()
    return [line.split(None, 1)[1] for line in said if line.split()[0] != "1" and "ps -eo" not in line]


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_that_a_command_has_left_goes_on(provider: LocalProvider, tmp_path: Path, kind: str) -> None:
    async with opened(provider, spec(tmp_path)) as sandbox:
        kept = await processes_of(sandbox)
        assert (await sandbox.exec(KINDS[kind])).exit_code == 0
        while not await sandbox.read_file("/app/beat"):
            await asyncio.sleep(0.02)
        assert await end_others(sandbox, kept) >= 1
        assert await listed(sandbox) == []
        assert await end_others(sandbox, kept) == 0
        beats = await sandbox.read_file("/app/beat")
        await asyncio.sleep(0.2)
        assert await sandbox.read_file("/app/beat") == beats


class Answering:
    """A sandbox whose commands end as they are told."""

    def __init__(self, *answers: ExecResult | Exception) -> None:
        self._answers = list(answers)

    async def exec(self, *_argv: Any, **_options: Any) -> ExecResult:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


LEFT = ExecResult(0, "17 (python3)\n", "")


@pytest.mark.parametrize(
    ("answers", "failure", "message"),
    [
        ([LEFT], ProcessesLeft, r"^Processes of the sandbox cannot be ended: 17 \(python3\)\.$"),
        ([LEFT, ExecResult(3, "", "no /proc\n")], ProcessesLeft, "are not known: exit code 3: no /proc$"),
        ([TimeoutError()], ProcessesLeft, "were not listed within 60 s"),
        ([ExecResult(137, "", "")], SandboxLost, "was killed"),
    ],
)
def test_what_cannot_be_ended_or_is_not_known_is_an_error(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], failure: type[Exception], message: str
) -> None:
    monkeypatch.setattr(leftover, "TRY_EVERY_S", 0.0)
    with pytest.raises(failure, match=message):
        asyncio.run(end_others(Answering(*answers), frozenset()))  # type: ignore[arg-type]


class Container:
    """A namespace of processes whose first one runs `FIRST`; commands come into it from outside, as an engine's do."""

    def __init__(self, pid: int, shell: Sequence[str]) -> None:
        self._pid, self._shell = pid, shell

    async def exec(
        self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, **_options: Any
    ) -> ExecResult:
        told = [*self._shell, *argv[1:]] if argv[0] == "/bin/sh" else argv
        enter = ["nsenter", "--target", str(self._pid), "--user", "--preserve-credentials", "--pid", "--mount"]
        done = await asyncio.to_thread(
            subprocess.run,
            [*enter, "setsid", "--wait", *told],
            capture_output=True,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        return ExecResult(done.returncode, done.stdout, done.stderr)


@contextmanager
def container(shell: Sequence[str]) -> Iterator[Container]:
    walls = ["--die-with-parent", "--unshare-user", "--unshare-pid", "--as-pid-1"]
    files = ["--dev-bind", "/", "/", "--proc", "/proc"]
    with subprocess.Popen(["bwrap", *walls, *files, *shell, "-c", FIRST], stderr=subprocess.DEVNULL) as started:
        try:
            while len(found := psutil.Process(started.pid).children(recursive=True)) < 2:
                assert started.poll() is None
            yield Container(found[0].pid, shell)
        finally:
            started.kill()


@pytest.mark.parametrize("shell", [["dash"], ["bash"], ["bash", "--posix"]], ids=" ".join)
@pytest.mark.usefixtures("provider")
async def test_the_first_process_of_a_container_reaps_what_others_have_left(shell: list[str]) -> None:
    # Bubblewrap works: there is a provider.
    with container(shell) as started:
        sandbox: Any = started
        kept = await processes_of(sandbox)
        assert {process.partition(":")[0] for process in kept} == {"1", "2"}
        left = "exec > /dev/null 2>&1; sleep 1000 & (sleep 1001 &) ; kill -9 2; for _ in 1 2 3; do (true &); done"
        await sandbox.exec(["sh", "-c", left])
        await end_others(sandbox, kept)
        # In the place of the one that was killed there is soon another fork of the first one.
        while not (processes := await listed(sandbox)):
            pass
        assert [line.split()[0] for line in processes] == [shell[0]]


def ran(line: str) -> ExecResult:
    return ExecResult(subprocess.run(["sh", "-c", line], check=False).returncode, "", "")


class LateShell(RemoteSandbox):
    """Its first command is under way until the caller runs it."""

    lines: tuple[str, ...] = ()

    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:
        self.lines = *self.lines, line
        if len(self.lines) == 1:
            await asyncio.Event().wait()
        return ran(line)

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        raise NotImplementedError


def test_a_command_that_begins_after_its_end_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shell, "_FOLDER", str(tmp_path / "commands"))
    provider: Any = None
    sandbox = LateShell(provider, "x", SandboxSpec(image="any"))
    for made, timeout_s in ((tmp_path / "late", 0.01), (tmp_path / "in_time", None)):
        with suppress(TimeoutError):
            asyncio.run(sandbox.exec(["touch", str(made)], timeout_s=timeout_s))
    ran(sandbox.lines[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["commands", "in_time"]
