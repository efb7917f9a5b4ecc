"""Sandboxes on this machine, each a bubblewrap of its own: `local`.

There are no images: a sandbox sees the programs of this machine, to read, and all other files are its own, in memory of
a limited size. A folder's `Dockerfile` is carried out over that, in the part of its language that `dockerfile.py`
knows, and the files that came of it are kept as an image. Its network is empty but for a port that leads to the
service.

A sandbox ends with the process that created it, by the kernel: its first process (`programs/init.py`) ends when the
owner's end of their socket is closed. A new provider ends processes of bubblewrap whose owner died while they were
starting: until it has the rights to, such a process does not end with its parent.
"""

import asyncio
import contextlib
import itertools
import math
import os
import random
import shutil
import subprocess
import tempfile
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import psutil

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.launch import leased_uid
from deployments.sandbox.providers.dockerfile import BuildPlan, Copy, build_plan
from deployments.sandbox.providers.interface import (
    KILLED,
    MOST_SNAPSHOTS,
    OWNER_LABEL,
    ProviderUnusable,
    RunningSandbox,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    state_of,
)
from deployments.sandbox.providers.local_sandbox import (
    FIRST_VARIABLES,
    STARTS_WITHIN_S,
    LocalRunningSandbox,
    sandbox_launch,
)
from deployments.workers.cleanup import has_died

EMPTY_IMAGE = "scratch"
"""The name of the image without files of its own."""
MOST_IMAGES = 64


@dataclass(frozen=True, slots=True)
class _Image:
    archive: BinaryIO
    """Its files. It has no name, so that it is gone with this process."""
    environment: Mapping[str, str]
    workdir: str

    def opened(self) -> BinaryIO:
        """The archive at its start, which can be read also when the image is forgotten."""
        return Path(f"/proc/self/fd/{self.archive.fileno()}").open("rb")


class LocalProvider(SandboxProvider):
    name = "local"
    has_network = False

    def __init__(self) -> None:
        """Checks that bubblewrap works. Raises `ProviderUnusable`."""
        _check_bubblewrap()
        self._processors = _Processors()
        self._images: OrderedDict[tuple[str, tuple[str, ...]], _Image] = OrderedDict()
        """By what they are made of, the one that was used last at the end."""
        self._snapshots: OrderedDict[str, _Image] = OrderedDict()
        self._building: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: weakref.WeakSet[LocalRunningSandbox] = weakref.WeakSet()
        _end_dead_owners()

    async def open(self, spec: SandboxSpec) -> RunningSandbox:
        if spec.network:
            raise SandboxRefused("The provider local gives no network but the service: ask for none, or use docker.")
        if spec.image == EMPTY_IMAGE:
            return await self._start(spec)
        if spec.snapshot is not None:
            if (kept := self._snapshots.get(spec.snapshot)) is None:
                raise SandboxRefused(f"The snapshot {spec.snapshot} is gone, or was made on another replica.")
            return await self._start(spec, kept)
        return await self._start(spec, await self._image(spec))

    def close(self) -> None:
        for sandbox in list(self._running):
            sandbox.kill()
        for kept in (self._images, self._snapshots):
            while kept:
                _forget_oldest(kept)

    async def _image(self, spec: SandboxSpec) -> _Image:
        if spec.image is not None:
            raise SandboxRefused(
                f"The provider local has no image {spec.image!r}: it knows folders with a Dockerfile. Use a provider "
                "that has images, such as docker."
            )
        assert spec.folder is not None
        async with self._building[spec.folder]:
            key = await asyncio.to_thread(state_of, spec.folder), spec.read_only_folders
            if key not in self._images:
                try:
                    async with asyncio.timeout(spec.build_timeout_s):
                        image = await self._build(await asyncio.to_thread(build_plan, spec.folder), spec)
                except TimeoutError as error:
                    limit = f"build_timeout_s of {spec.build_timeout_s:g} s"
                    raise SandboxRefused(f"{spec.folder} was not built within its {limit}.") from error
                self._images[key] = image
                if len(self._images) > MOST_IMAGES:
                    _forget_oldest(self._images)
            self._images.move_to_end(key)
            return self._images[key]

    async def _keep(self, sandbox: LocalRunningSandbox) -> str:
        """Keeps the files of the sandbox under the name that it returns."""
        name = f"snapshot-{uuid4().hex}"
        self._snapshots[name] = _Image(await _packed(sandbox), sandbox.variables, sandbox.workdir)
        if len(self._snapshots) > MOST_SNAPSHOTS:
            _forget_oldest(self._snapshots)
        return name

    async def _build(self, plan: BuildPlan, spec: SandboxSpec) -> _Image:
        sandbox = await self._start(replace(spec, workdir=None, environment={}))
        try:
            for step in plan.steps:
                if isinstance(step, Copy):
                    await sandbox.write_files(step.files)
                    continue
                argv = ["/bin/sh", "-c", step.command]
                done = await sandbox.exec(argv, environment=step.environment, cwd=step.workdir)
                if done.exit_code == KILLED:
                    raise SandboxLost(f"{step.line} was killed.")
                if done.exit_code != 0:
                    said = (done.stderr.strip() or done.stdout.strip())[-500:]
                    raise SandboxRefused(
                        f"{step.line} of {spec.folder} ended with exit code {done.exit_code} over the programs of this "
                        f"machine, which are read-only in sandboxes without images: {said}"
                    )
            return _Image(await _packed(sandbox), plan.environment, plan.workdir)
        finally:
            await sandbox.close()

    async def _start(self, spec: SandboxSpec, image: _Image | None = None) -> LocalRunningSandbox:
        variables = {**FIRST_VARIABLES, **(image.environment if image else {}), **spec.environment}
        workdir = spec.workdir or (image.workdir if image else "/")
        sandbox = LocalRunningSandbox(self._processors.pinned(spec.cpus), spec, variables, workdir, self._keep)
        self._running.add(sandbox)
        with image.opened() if image else contextlib.nullcontext() as archive:
            try:
                await sandbox.start()
                if archive is not None:
                    await sandbox.unpack(archive.fileno())
            except BaseException:
                await sandbox.close()
                raise
        return sandbox


async def _packed(sandbox: LocalRunningSandbox) -> BinaryIO:
    """An archive without a name of the sandbox's own files."""
    with contextlib.ExitStack() as closing:
        archive = closing.enter_context(tempfile.TemporaryFile())
        await sandbox.pack(archive.fileno())
        closing.pop_all()
    return archive


def _forget_oldest(images: OrderedDict[Any, _Image]) -> None:
    _, oldest = images.popitem(last=False)
    oldest.archive.close()


def _check_bubblewrap() -> None:
    """Raises `ProviderUnusable` unless a sandbox can be launched on this machine."""
    if shutil.which("bwrap") is None:
        raise ProviderUnusable("the provider local needs bubblewrap: apt-get install bubblewrap.")
    with contextlib.ExitStack() as held, leased_uid() as uid:
        launch = sandbox_launch(SandboxSpec(image="none"), uid, 0, 2, "/", held)
        tried = subprocess.run(
            [*launch.command[: launch.command.index("prlimit")], "/usr/bin/env", "true"],
            check=False,
            capture_output=True,
            pass_fds=launch.pass_fds,
            timeout=STARTS_WITHIN_S,
            text=True,
        )
    if tried.returncode != 0:
        said = tried.stderr.strip()
        raise ProviderUnusable(f"the provider local: bubblewrap does not work on this machine: {said}")


class _Processors:
    """Spreads sandboxes over the processors that this process may use, by taking these in turn."""

    def __init__(self) -> None:
        known = os.sched_getaffinity(0)
        self._count = len(known)
        # Other replicas of the machine choose among the same ones.
        self._in_turn = itertools.cycle(random.sample(sorted(known), len(known)))

    def pinned(self, cpus: float | None) -> list[str]:
        """The beginning of a command that may use so many of them, rounded up; empty for one that may use all."""
        if cpus is None or math.ceil(cpus) >= self._count:
            return []
        chosen = itertools.islice(self._in_turn, math.ceil(cpus))
        return ["taskset", "--cpu-list", ",".join(map(str, chosen))]


def _end_dead_owners() -> None:
    """Ends processes that were making a sandbox when their owner died.

    Until bubblewrap has the rights to, such a process does not end with its parent. The label is among its arguments.
    """
    for process in psutil.process_iter(["cmdline"]):
        labels = [part for part in process.info["cmdline"] or () if part.startswith(f"{OWNER_LABEL}=")]
        if labels and has_died(labels[0].partition("=")[2]):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
