"""Sandboxes on this machine, each a bubblewrap of its own: `local`.

There are no images: a sandbox sees the programs of this machine, to read, and all other files are its own, in memory of
a limited size. A folder's `Dockerfile` is carried out over that, in the part of its language that `dockerfile.py`
knows, and the files that came of it are kept as an image. Its network is empty but for a port that leads to the
service.

A sandbox ends with the process that created it, by the kernel: its first process (`programs/init.py`) ends when the
owner's end of their socket is closed. `reap` removes the images of dead owners, and processes of bubblewrap whose owner
died while they were starting: until it has the rights to, such a process does not end with its parent.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.dockerfile import BuildPlan, Copy, build_plan
from deployments.sandbox.providers.folder_state import FolderStates
from deployments.sandbox.providers.interface import (
    RunningSandbox,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    is_dead,
    owner_of_process,
)
from deployments.sandbox.providers.local_sandbox import LocalRunningSandbox
from deployments.sandbox.providers.local_walls import FIRST_VARIABLES, Processors, SandboxWalls, owners_of_processes

IMAGES_PREFIX = "rollout-sandbox-images-"
EMPTY_IMAGE = "scratch"
"""The name of the image without files of its own."""
MOST_IMAGES = 64
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class _Image:
    archive: Path | None = None
    """Its files; None for no files."""
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"


class LocalProvider(SandboxProvider):
    name = "local"
    has_network = False

    def __init__(self) -> None:
        """Checks that bubblewrap works. Raises `ProviderUnusable`."""
        self._walls = SandboxWalls()
        self._processors = Processors()
        self._images: OrderedDict[str, _Image] = OrderedDict()
        self._building: dict[str, asyncio.Lock] = {}
        self._folders = FolderStates()
        self._running: weakref.WeakSet[LocalRunningSandbox] = weakref.WeakSet()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{IMAGES_PREFIX}{owner_of_process(os.getpid())}-"))
        _reap_dead_owners()

    async def open(self, spec: SandboxSpec) -> RunningSandbox:
        if spec.network:
            raise SandboxRefused("The provider local gives no network but the service: ask for none, or use docker.")
        image, archive = await self._image(spec)
        return await self._started(spec, image, archive)

    async def reap(self) -> int:
        return await asyncio.to_thread(_reap_dead_owners)

    def close(self) -> None:
        for sandbox in list(self._running):
            sandbox.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _image(self, spec: SandboxSpec) -> tuple[_Image, BinaryIO | None]:
        if spec.image == EMPTY_IMAGE:
            return _Image(), None
        if spec.image is not None:
            raise SandboxRefused(
                f"The provider local has no image {spec.image!r}: it knows folders with a Dockerfile. Use a provider "
                "that has images, such as docker."
            )
        assert spec.folder is not None
        made_of = await self._folders.name_of(spec.folder), spec.read_only_folders
        key = hashlib.sha256(repr(made_of).encode()).hexdigest()
        async with self._building.setdefault(key, asyncio.Lock()):
            # While the sandbox of its build is destroyed, an image may be forgotten for newer ones.
            while (held := self._held(key)) is None:
                try:
                    async with asyncio.timeout(spec.build_timeout_s):
                        await self._build(key, await asyncio.to_thread(build_plan, spec.folder), spec)
                except TimeoutError as error:
                    limit = f"build_timeout_s of {spec.build_timeout_s:g} s"
                    raise SandboxRefused(f"{spec.folder} was not built within its {limit}.") from error
            return held

    def _held(self, key: str) -> tuple[_Image, BinaryIO] | None:
        """The image, and its archive open: what unlinks the file later takes nothing away. None if it is not kept."""
        image = self._images.get(key)
        if image is None:
            return None
        assert image.archive is not None
        try:
            archive = image.archive.open("rb")
        except FileNotFoundError:
            del self._images[key]
            return None
        self._images.move_to_end(key)
        return image, archive

    async def _build(self, key: str, plan: BuildPlan, spec: SandboxSpec) -> None:
        sandbox = await self._started(replace(spec, workdir=None, environment={}), _Image())
        try:
            for step in plan.steps:
                if isinstance(step, Copy):
                    await sandbox.write_files(step.files)
                    continue
                done = await sandbox.exec(step.argv, environment=step.environment, cwd=step.workdir)
                if done.exit_code == KILLED:
                    raise SandboxLost(f"{step.line} was killed.")
                if done.exit_code != 0:
                    said = (done.stderr.strip() or done.stdout.strip())[-500:]
                    raise SandboxRefused(
                        f"{step.line} of {spec.folder} ended with exit code {done.exit_code} over the programs of this "
                        f"machine, which are read-only in sandboxes without images: {said}"
                    )
            await self._keep(key, sandbox, plan.environment, plan.workdir)
        finally:
            await sandbox.close()

    async def _keep(self, key: str, sandbox: LocalRunningSandbox, variables: Mapping[str, str], workdir: str) -> None:
        archive = self._folder / f"{key}.tar"
        await sandbox.pack(archive)
        self._images[key] = _Image(archive, variables, workdir)
        while len(self._images) > MOST_IMAGES:
            _, oldest = self._images.popitem(last=False)
            assert oldest.archive is not None
            oldest.archive.unlink(missing_ok=True)

    async def _started(self, spec: SandboxSpec, image: _Image, archive: BinaryIO | None = None) -> LocalRunningSandbox:
        """A sandbox with the files of the archive, which is closed."""
        variables = {**FIRST_VARIABLES, **image.environment, **spec.environment}
        workdir = spec.workdir or image.workdir
        sandbox = LocalRunningSandbox(self._walls, self._processors, spec, variables, workdir)
        self._running.add(sandbox)
        try:
            with archive or contextlib.nullcontext():
                await sandbox.start()
                if archive is not None:
                    await sandbox.unpack(archive)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


def _reap_dead_owners() -> int:
    """Ends the processes and removes the images of dead owners, and returns how many of both there were."""
    known = Path(tempfile.gettempdir()).glob(f"{IMAGES_PREFIX}*")
    folders = [path for path in known if is_dead(path.name.removeprefix(IMAGES_PREFIX).rpartition("-")[0])]
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
    processes = [pid for pid, owner in owners_of_processes() if is_dead(owner)]
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(folders) + len(processes)
