"""The contract of every provider of sandboxes.

Held by real ones: bubblewrap, and a Docker engine where there is one. Docker and Kubernetes are held beside stand-ins
of the engine and of `kubectl`, behind which are sandboxes of bubblewrap. `tests/sockets/test_harbor_sandboxes.py` has
the provider `harbor`.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers import local
from deployments.sandbox.providers.docker import SOCKET
from deployments.sandbox.providers.interface import (
    OWNER_LABEL,
    ProviderUnusable,
    RunningSandbox,
    SandboxFile,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    open_provider,
)
from deployments.sandbox.providers.leftover import end_others, processes_of
from deployments.workers.cleanup import owner_of
from tests.deployments.sandbox.providers.opened import opened
from tests.deployments.sandbox.providers.stand_ins.docker_engine import engine
from tests.deployments.sandbox.providers.stand_ins.kubectl import cluster
from tests.deployments.sandbox.providers.stand_ins.world import KNOWN_IMAGE, WORLDS, World, world
from tests.paths import REPOSITORY
from tests.virtual_time import end_by_cancellation

# Sandboxes are started, and owners of some are killed.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
DOCKER_SOCKET = os.environ.get("ROLLOUT_TEST_DOCKER_SOCKET", SOCKET)
"""The images `debian:12-slim` and `python:3.12-slim` must be there."""
GONE_WITHIN_S = 60.0


def usable(name: str, options: dict[str, Any]) -> bool:
    try:
        open_provider(name, options).close()
    except ProviderUnusable:
        return False
    return name != "docker" or Path(DOCKER_SOCKET).exists()


OPTIONS: dict[str, dict[str, Any]] = {"local": {}, "docker": {"socket": DOCKER_SOCKET}}
ENGINE = "docker_stand_in"
STAND_INS = ("kubernetes", ENGINE)
WITHOUT_BUILDS = ("kubernetes",)


NEEDED = dict(zip(OPTIONS, OPTIONS, strict=True)) | dict.fromkeys(STAND_INS, "local")
"""By the name of each provider, the one that has to work here."""


@pytest.fixture(params=NEEDED)
def name(request: pytest.FixtureRequest) -> str:
    provider: str = request.param
    if not usable(needed := NEEDED[provider], OPTIONS[needed]):
        pytest.skip(f"{needed} is not here")
    return provider


@asynccontextmanager
async def standing(name: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Has a stand-in of what the provider needs within the block, if `name` is that of one. Yields name and options."""
    async with AsyncExitStack() as leaving:
        if name in STAND_INS:
            WORLDS.append(World())
            leaving.callback(lambda: WORLDS.pop().close())
        if name == "kubernetes":
            yield name, {"kubectl": str(await leaving.enter_async_context(cluster(world().folder)))}
        elif name == ENGINE:
            await leaving.enter_async_context(engine(world().folder / "docker.sock"))
            yield "docker", {"socket": str(world().folder / "docker.sock")}
        else:
            yield name, OPTIONS.get(name, {})


@asynccontextmanager
async def provided(name: str) -> AsyncIterator[SandboxProvider]:
    async with standing(name) as (provider_name, options):
        provider = open_provider(provider_name, options)
        if name in STAND_INS:
            # A reaper would look for a while after each test.
            provider.start_reaper = lambda: None  # type: ignore[attr-defined]
        with closing(provider):
            yield provider


def spec_of(name: str, folder: Path, dockerfile: str = "", **fields: Any) -> SandboxSpec:
    network = name != "local"
    if name in WITHOUT_BUILDS:
        return SandboxSpec(image=KNOWN_IMAGE, workdir="/app", network=network, **fields)
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(f"FROM debian:12-slim\nWORKDIR /app\n{dockerfile}")
    return SandboxSpec(folder=folder, workdir=None if name in OPTIONS else "/app", network=network, **fields)


@asynccontextmanager
async def standing_sandbox(name: str, spec: SandboxSpec) -> AsyncIterator[RunningSandbox]:
    async with provided(name) as provider, opened(provider, spec) as sandbox:
        yield sandbox


async def test_a_snapshot_has_the_files_of_its_moment_and_outlives_its_sandbox(name: str, tmp_path: Path) -> None:
    made = "mkdir -m 700 d; echo 1 > d/a; ln -s a d/b; chmod 640 d/a; export LEFT=1; sleep 60 &"
    seen = ["sh", "-c", "pwd; echo $A; cat d/a d/b; stat -c %a d d/a; ls; ps ax | grep -c '[s]leep 60'"]
    async with provided(name) as provider:
        async with opened(provider, spec_of(name, tmp_path, "ENV A=x\n")) as sandbox:
            if name != "local":
                with pytest.raises(SandboxRefused, match=f"{provider.name} keeps no snapshots: use the provider local"):
                    await sandbox.snapshot()
                return
            await sandbox.exec(["sh", "-c", made])
            snapshot = await sandbox.snapshot()
            await sandbox.exec(["sh", "-c", "echo 2 > d/a; touch later"])
        for _ in range(2):
            async with opened(provider, SandboxSpec(snapshot=snapshot)) as fork:
                assert (await fork.exec(seen)).stdout.split() == ["/app", "x", "1", "1", "700", "640", "d", "0"]
                await fork.exec(["sh", "-c", "echo 3 > d/a"])
        with pytest.raises(SandboxRefused, match=r"The snapshot none is gone, or was made on another replica\."):
            await provider.open(SandboxSpec(snapshot="none"))


async def test_only_the_last_snapshots_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MOST_SNAPSHOTS", 2)
    async with provided("local") as provider, opened(provider, SandboxSpec(image="scratch")) as sandbox:
        first, *others = [await sandbox.snapshot() for _ in range(3)]
        with pytest.raises(SandboxRefused, match=first):
            await provider.open(SandboxSpec(snapshot=first))
        for kept in others:
            async with opened(provider, SandboxSpec(snapshot=kept)):
                pass


async def test_a_dockerfile_is_carried_out(name: str, tmp_path: Path) -> None:
    if name in STAND_INS:
        pytest.skip("The stand-ins build by the provider local.")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run.sh").chmod(0o755)
    spec = spec_of(
        name,
        tmp_path,
        "ENV A=1 B=${A}2\nCOPY data /data\nCOPY run.sh .\nRUN echo $A$B$OF_TASK > built \\\n && mkdir sub",
        environment={"OF_TASK": "x"},
    )
    async with standing_sandbox(name, spec) as sandbox:
        done = await sandbox.exec(["sh", "-c", "pwd; cat built /data/a.txt; ./run.sh; echo $A$OF_TASK"])
    assert (done.exit_code, done.stdout.splitlines()) == (0, ["/app", "12", "aran", "1x"]), done


async def test_commands_share_files_and_processes_and_tell_how_they_ended(name: str, tmp_path: Path) -> None:
    async with standing_sandbox(name, spec_of(name, tmp_path, environment={"Y": "1"})) as sandbox:
        first = await sandbox.exec(["sh", "-c", "cat > in; sleep 300 & echo out; echo err >&2; exit 3"], stdin=b"given")
        assert (first.exit_code, first.stdout, first.stderr) == (3, "out\n", "err\n")
        assert (await sandbox.read_file("/app/in")) == b"given"
        assert (await sandbox.exec(["sh", "-c", "ps ax | grep -c '[s]leep 300'"])).stdout == "1\n"
        changed = await sandbox.exec(["sh", "-c", "pwd; echo $X"], cwd="/tmp", environment={"X": "a b"})
        assert changed.stdout == "/tmp\na b\n"
        assert (await sandbox.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137
        assert (await sandbox.exec(["no-such-program"])).exit_code in (126, 127)


async def test_a_command_that_takes_too_long_or_that_nobody_waits_for_is_ended(name: str, tmp_path: Path) -> None:
    async with standing_sandbox(name, spec_of(name, tmp_path)) as sandbox:
        with pytest.raises(TimeoutError):
            await sandbox.exec(["sleep", "301"], timeout_s=0.5)
        waiting = asyncio.ensure_future(sandbox.exec(["sh", "-c", "sleep 302; true"]))
        while not (await sandbox.exec(["sh", "-c", "ps ax | grep '[s]leep 302$'"])).stdout:
            await asyncio.sleep(0.1)
        await end_by_cancellation(waiting)
        for _ in range(600):
            left = (await sandbox.exec(["sh", "-c", "ps ax | grep '[s]leep 30'; true"])).stdout
            if not left:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(left)


async def test_what_commands_have_left_is_ended_and_the_rest_goes_on(name: str, tmp_path: Path) -> None:
    async with standing_sandbox(name, spec_of(name, tmp_path)) as sandbox:
        left = "nohup sleep {0}1 >/dev/null 2>&1 & setsid sleep {0}2 >/dev/null 2>&1 &"
        await sandbox.exec(["sh", "-c", left.format(310)])
        kept = await processes_of(sandbox)
        await sandbox.exec(["sh", "-c", left.format(320)])
        await end_others(sandbox, kept)
        listed = (await sandbox.exec(["sh", "-c", "ps axo args | grep '^sleep 3[12]0'"])).stdout
        assert sorted(listed.splitlines()) == ["sleep 3101", "sleep 3102"]


async def test_files_are_written_and_read(name: str, tmp_path: Path) -> None:
    async with standing_sandbox(name, spec_of(name, tmp_path)) as sandbox:
        content = bytes(range(256)) * 5000
        files = {"/deep/er/a": SandboxFile(content), "/app/x.sh": SandboxFile(b"#!/bin/sh\necho x", executable=True)}
        await sandbox.write_files(files)
        assert await sandbox.read_file("/deep/er/a") == content
        assert (await sandbox.exec(["/app/x.sh"])).stdout == "x\n"
        assert await sandbox.read_file("/deep/er/b") is None
        with pytest.raises(SandboxRefused, match="not a file"):
            await sandbox.read_file("/deep/er")


async def test_after_its_end_a_sandbox_is_lost(name: str, tmp_path: Path) -> None:
    async with standing_sandbox(name, spec_of(name, tmp_path)) as sandbox:
        running = asyncio.ensure_future(sandbox.exec(["sleep", "303"]))
        await asyncio.sleep(0.5)
        await sandbox.close()
        with pytest.raises(SandboxLost):
            await running
        with pytest.raises(SandboxLost):
            await sandbox.exec(["true"])


async def test_what_cannot_be_built_is_refused_with_what_was_said(name: str, tmp_path: Path) -> None:
    async with provided(name) as provider:
        with pytest.raises(SandboxRefused, match="builds no folders" if name in WITHOUT_BUILDS else "code.?:? 7"):
            await provider.open(replace(spec_of("local", tmp_path, "RUN exit 7"), network=name != "local"))
        with pytest.raises(SandboxRefused, match="nowhere"):
            await provider.open(SandboxSpec(image="nowhere:1", network=name != "local"))
        if name in STAND_INS and name != ENGINE:
            with pytest.raises(SandboxRefused, match=r"shows none of its folders: .* what is in /opt/agent"):
                await provider.open(replace(spec_of(name, tmp_path), read_only_folders=("/opt/agent",)))


OWNER = """
import asyncio, json, pathlib, sys
from deployments.sandbox.providers.interface import SandboxSpec, open_provider

async def main(name, options, spec, seconds):
    provider = open_provider(name, json.loads(options))
    fields = json.loads(spec)
    if "folder" in fields:
        fields["folder"] = pathlib.Path(fields["folder"])
    sandboxes = [await provider.open(SandboxSpec(**fields)) for _ in range(2)]
    print(getattr(provider, "owner", "none"), flush=True)
    await sandboxes[0].exec(["sleep", seconds])

asyncio.run(main(*sys.argv[1:]))
"""


async def test_of_an_owner_that_is_killed_nothing_is_left_after_ten_seconds(name: str, tmp_path: Path) -> None:
    seconds = str(3040 + [*OPTIONS, *STAND_INS].index(name))
    spec = {"image": KNOWN_IMAGE} if name in WITHOUT_BUILDS else {"folder": str(tmp_path)}
    spec_of(name, tmp_path)

    async def left() -> bool:
        return await asyncio.to_thread(running, seconds) or (name in STAND_INS and bool(world().held))

    async with standing(name) as (provider_name, options), AsyncExitStack() as leaving:
        paths = [str(REPOSITORY), *sys.path]
        asked = json.dumps({**spec, "network": name != "local"})
        owner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", OWNER, provider_name, json.dumps(options), asked, seconds),
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert owner.stdout is not None
        label = (await owner.stdout.readline()).decode().strip()
        assert label
        if name != "local":
            leaving.callback(end_reapers, label)
        while not running(seconds):
            assert owner.returncode is None
            await asyncio.sleep(0.05)
        assert name not in STAND_INS or len(world().held) == 2
        owner.kill()
        killed_at = time.monotonic()
        await owner.wait()
        while await left():
            assert time.monotonic() - killed_at < GONE_WITHIN_S
            await asyncio.sleep(0.1)


def running(seconds: str) -> bool:
    listed = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    return f"sleep {seconds}" in listed


def end_reapers(label: str) -> None:
    """A reaper looks for a while whether anything comes yet."""
    for pid in subprocess.run(["pgrep", "-f", f"main.* {label}$"], check=False, capture_output=True).stdout.split():
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.skipif(not usable("local", {}), reason="bubblewrap does not work on this machine")
def test_what_bubblewrap_leaves_of_a_dead_owner_is_ended() -> None:
    argv, mine = ["sh", "-c", "while :; do sleep 1; done"], owner_of(os.getpid())
    with (
        subprocess.Popen([*argv, f"{OWNER_LABEL}={mine}1"]) as left,
        subprocess.Popen([*argv, f"{OWNER_LABEL}={mine}"]) as kept,
    ):
        try:
            open_provider("local", {}).close()
            assert left.wait(GONE_WITHIN_S) == -signal.SIGKILL
            assert kept.poll() is None
        finally:
            left.kill()
            kept.kill()
