"""Walls around a sandbox of the provider `local`, which commands in it try to get over."""

import asyncio
import os
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import MOST_PROCESSES, ExecResult, OutOfMemory, SandboxRefused, SandboxSpec
from deployments.sandbox.providers.local import LocalProvider, _Processors
from tests.deployments.sandbox.providers.opened import opened
from tests.virtual_time import runs

# Sandboxes are started.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
FORKS = """
import os, signal, time
children = []
try:
    while True:
        if (pid := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        children.append(pid)
except BlockingIOError:
    print(len(children))
for pid in children:
    os.kill(pid, signal.SIGKILL)
"""

BUSY = """
import os, resource, subprocess, sys, time
print(",".join(map(str, sorted(os.sched_getaffinity(0)))))
try:
    os.sched_setaffinity(0, range(os.cpu_count()))
except OSError as error:
    print(type(error).__name__)
begun = time.monotonic()
spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
time.sleep(1)
for process in spinning:
    process.kill()
    process.wait()
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print((used.ru_utime + used.ru_stime) / (time.monotonic() - begun))
"""

LONG_ENOUGH_S = 300
"""On a busy machine, to start some processes in a sandbox."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
    return tmp_path


@runs
async def tried(provider: LocalProvider, folder: Path, *lines: str, memory_mb: int = 512) -> list[ExecResult]:
    async with opened(provider, SandboxSpec(folder=folder, memory_mb=memory_mb, storage_mb=32)) as sandbox:
        return [await sandbox.exec(["bash", "-c", line], timeout_s=LONG_ENOUGH_S) for line in lines]


REFUSED = {
    "ls SECRET; ls /home; ls /work; ls /opt; cat /etc/shadow": "No such file.*" * 5,
    "touch /usr/bin/x || touch /lib/x || touch /proc/x": "",
    "exec 3<>/dev/tcp/1.1.1.1/80": "unreachable",
    "echo x > /proc/1/mem || cat /proc/1/fd/* || ls -l /proc/1/fd": "Permission denied",
    "python3 -c 'import ctypes; raise SystemExit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) != 0)'": "",
    "unshare -r true": "",
    "mount -t tmpfs none /mnt": "",
}
"""Commands that fail, and a pattern of what they write to stderr."""
ORPHANS = "for i in 1 2 3; do (sleep 0.1 &); done; sleep 1; (sleep 0.1 &); sleep 1; ps -eo stat,comm"
ANSWERED = {
    "(env; cat /proc/1/environ) | grep -c SECRET_OF_SERVICE": "0\n",
    "ls / | grep -cE '^(home|work|opt)$'": "0\n",
    "test $(ls /proc | grep -c '^[0-9]') -lt 8; echo $?": "0\n",
    # No service answers before there is a session.
    "exec 3<>/dev/tcp/127.0.0.1/8000; echo GET >&3; timeout 5 cat <&3; echo ended": "ended\n",
    "for name in KILL STOP TERM INT HUP CHLD; do kill -$name 1; done; pkill -9 python3; sleep 0.2; echo on": "on\n",
    "for name in TERM HUP; do sleep 60 & kill -$name $!; wait $!; echo $?; done": "143\n129\n",
    f"{ORPHANS} | grep -cE 'sleep|^Z'": "0\n",
}


def test_commands_get_over_no_wall_and_the_sandbox_goes_on(
    provider: LocalProvider, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_SERVICE", "x")
    (folder / "secret").write_text("x")
    lines = [line.replace("SECRET", f"{folder}/secret") for line in REFUSED]
    outcomes = tried(provider, folder, *lines, *ANSWERED)
    for done, (line, pattern) in zip(outcomes, REFUSED.items(), strict=False):
        assert done.exit_code != 0, line
        assert re.search(pattern, done.stderr, re.DOTALL), (line, done)
    assert dict(zip(ANSWERED, [done.stdout for done in outcomes[len(lines) :]], strict=True)) == ANSWERED


def test_processes_and_files_are_bounded(provider: LocalProvider, folder: Path) -> None:
    fill = "head -c 100000000 /dev/zero > /app/big; rm /app/big"
    files, forks, after = tried(provider, folder, fill, f"python3 -c '{FORKS}'", "echo after", memory_mb=8192)
    assert "No space left" in files.stderr
    assert MOST_PROCESSES - 10 < int(forks.stdout) < MOST_PROCESSES
    assert after.stdout == "after\n"


def test_memory_of_all_processes_together_is_bounded(provider: LocalProvider, folder: Path) -> None:
    line = "for i in 1 2 3 4; do python3 -c 'x = b\"1\" * 50_000_000; import time; time.sleep(600)' & done; wait"
    with pytest.raises(OutOfMemory, match="more than its memory of 128 MiB"):
        tried(provider, folder, line, memory_mb=128)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="This machine has one processor.")
async def test_processes_have_the_processors_of_its_cpus_and_no_others(provider: LocalProvider, folder: Path) -> None:
    async with AsyncExitStack() as leaving:
        specs = [SandboxSpec(folder=folder, cpus=cpus) for cpus in (0.5, 1, None, 4096)]
        sandboxes = [await leaving.enter_async_context(opened(provider, spec)) for spec in specs]
        said = [(await sandbox.exec(["python3", "-c", BUSY])).stdout.split() for sandbox in sandboxes]
    (half, *half_says), (one, *one_says), (free, *_), (many, *_) = said
    # The second has not the processor that the first one has.
    assert {half, one} <= {str(processor) for processor in os.sched_getaffinity(0)}
    assert half != one
    assert free == many == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for refused, used in (half_says, one_says):
        assert refused == "PermissionError"
        assert float(used) < 1.1


def test_sandboxes_take_the_processors_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 7})
    processors = _Processors()

    def taken(cpus: float | None) -> list[int]:
        command = processors.pinned(cpus)
        assert command[:2] == ["taskset", "--cpu-list"][: len(command)]
        return [int(number) for number in "".join(command[2:]).split(",") if number]

    first, second, third = taken(2), taken(1), taken(1.5)
    assert {*first, *second} == {3, 5, 7}
    assert third == first
    assert [taken(cpus) for cpus in (3, 2.5, None)] == [[]] * 3


async def test_closing_the_provider_ends_what_runs(provider: LocalProvider, folder: Path) -> None:
    sandbox = await provider.open(SandboxSpec(folder=folder))
    running = asyncio.ensure_future(sandbox.exec(["sleep", "300"]))
    await asyncio.sleep(0.3)
    provider.close()
    with pytest.raises(SandboxLost):
        await running
    await sandbox.close()


def test_a_network_is_refused(provider: LocalProvider, folder: Path) -> None:
    with pytest.raises(SandboxRefused, match="gives no network but the service"):
        asyncio.run(provider.open(SandboxSpec(folder=folder, network=True)))


@pytest.mark.parametrize("line", ["echo \0", "echo \ud800"], ids=["a null byte", "a lone surrogate"])
def test_an_impossible_command_fails_and_the_sandbox_goes_on(provider: LocalProvider, folder: Path, line: str) -> None:
    failed, after = tried(provider, folder, line, "echo here")
    assert (failed.exit_code, failed.stdout, failed.stderr != "") == (127, "", True)
    assert after.stdout == "here\n"
