# ruff: noqa: ASYNC109 - the names are those of the SDKs
"""Modules in the place of `e2b`, `daytona`, `modal` and `prime_sandboxes`.

They have the names, arguments, answers and exceptions of e2b 2.63, daytona 0.226, modal 1.6 and prime-sandboxes 0.5
that `deployments/sandbox/providers/` uses, as their sources have them. Nothing of them was run against a company.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

from deployments.sandbox.providers.interface import SandboxRefused
from tests.deployments.sandbox.providers.stand_ins.world import ASKED, Gone, NoSuchImage, world


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


def e2b() -> dict[str, ModuleType]:
    class SandboxException(Exception):
        pass

    class NotFoundException(SandboxException):
        pass

    class InvalidArgumentException(SandboxException):
        pass

    class BuildException(Exception):
        pass

    class ServiceBusyException(Exception):
        pass

    @dataclass
    class CommandExitException(SandboxException):
        stderr: str
        stdout: str
        exit_code: int

    templates: dict[str, str | Path] = {}

    class Template:
        def __init__(self, file_context_path: str | None = None) -> None:
            self.source: str | Path = Path(file_context_path or ".")

        def from_dockerfile(self, dockerfile_content_or_path: str) -> "Template":
            assert dockerfile_content_or_path.startswith("FROM ")
            return self

        def from_image(self, image: str) -> "Template":
            self.source = image
            return self

    class AsyncTemplate:
        @staticmethod
        async def exists(name: str) -> bool:
            return name in templates

        @staticmethod
        async def build(
            template: Template, name: str, *, cpu_count: int | None = None, memory_mb: int | None = None
        ) -> None:
            ASKED.append({"cpu_count": cpu_count, "memory_mb": memory_mb})
            try:
                probe = await world().create(template.source, {}, {})
            except (NoSuchImage, SandboxRefused) as error:
                raise BuildException(str(error)) from error
            await world().destroy(probe)
            templates[name] = template.source

    class Pages:
        has_next = True

        async def next_items(self) -> list[Any]:
            self.has_next = False
            return [SimpleNamespace(sandbox_id=key, metadata=held.labels) for key, held in world().held.items()]

    class Commands:
        def __init__(self, sandbox_id: str) -> None:
            self._id = sandbox_id

        async def run(self, cmd: str, *, user: str, timeout: float) -> Any:
            assert (user, timeout) == ("root", 0)
            try:
                done = await world().run(self._id, cmd)
            except Gone as error:
                raise NotFoundException(str(error)) from error
            if done.exit_code != 0:
                raise CommandExitException(done.stderr, done.stdout, done.exit_code)
            return done

    class Files:
        def __init__(self, sandbox_id: str) -> None:
            self._id = sandbox_id

        async def write(self, path: str, data: bytes, user: str) -> None:
            assert user == "root"
            await world().put(self._id, path, data)

        async def read(self, path: str, format: str, user: str) -> Any:
            assert (format, user) == ("stream", "root")
            return aclosing(world().parts(self._id, path))

    class AsyncSandbox:
        def __init__(self, sandbox_id: str) -> None:
            self.sandbox_id = sandbox_id
            self.commands, self.files = Commands(sandbox_id), Files(sandbox_id)

        @classmethod
        async def create(
            cls,
            template: str,
            timeout: int,
            metadata: dict[str, str],
            envs: dict[str, str],
            allow_internet_access: bool,
        ) -> "AsyncSandbox":
            assert isinstance(timeout, int)
            ASKED.append({"allow_internet_access": allow_internet_access})
            return cls(await world().create(templates.get(template, template), envs, metadata))

        @staticmethod
        def list() -> Pages:
            return Pages()

        @staticmethod
        async def kill(sandbox_id: str) -> bool:
            try:
                await world().destroy(sandbox_id)
            except Gone:
                return False
            return True

        async def create_snapshot(self) -> Any:
            return SimpleNamespace(snapshot_id=await world().snapshot(self.sandbox_id, f"snap-{uuid4().hex}"))

    exceptions = module(
        "e2b.exceptions",
        BuildException=BuildException,
        InvalidArgumentException=InvalidArgumentException,
        NotFoundException=NotFoundException,
        SandboxException=SandboxException,
        ServiceBusyException=ServiceBusyException,
    )
    handle = module("e2b.sandbox.commands.command_handle", CommandExitException=CommandExitException)
    names = {"AsyncSandbox": AsyncSandbox, "AsyncTemplate": AsyncTemplate, "Template": Template}
    packages = {name: module(name) for name in ("e2b.sandbox", "e2b.sandbox.commands")}
    return {"e2b": module("e2b", **names), exceptions.__name__: exceptions, handle.__name__: handle, **packages}


def daytona() -> dict[str, ModuleType]:
    class DaytonaError(Exception):
        status_code: int | None = None

    class DaytonaNotFoundError(DaytonaError):
        status_code = 404

    class DaytonaBadRequestError(DaytonaError):
        status_code = 400

    @dataclass
    class CreateSandboxFromImageParams:
        image: Any
        resources: Any
        env_vars: dict[str, str]
        labels: dict[str, str]
        network_block_all: bool
        auto_stop_interval: int
        ttl_minutes: int

    @dataclass
    class CreateSandboxFromSnapshotParams:
        snapshot: str
        env_vars: dict[str, str]
        labels: dict[str, str]
        network_block_all: bool
        auto_stop_interval: int
        ttl_minutes: int

    @dataclass
    class Resources:
        cpu: int | None = None
        memory: int | None = None
        disk: int | None = None

    class Image:
        @staticmethod
        def from_dockerfile(path: Path) -> Path:
            return path.parent

    class Process:
        def __init__(self, sandbox_id: str) -> None:
            self._id = sandbox_id

        async def exec(self, command: str, timeout: int | None = None) -> Any:
            try:
                done = await world().run(self._id, command)
            except Gone as error:
                raise DaytonaNotFoundError(str(error)) from error
            return SimpleNamespace(exit_code=done.exit_code, result=done.stdout)

    class Files:
        def __init__(self, sandbox_id: str) -> None:
            self._id = sandbox_id

        async def upload_file(self, file: bytes, remote_path: str) -> None:
            await world().put(self._id, remote_path, file)

        async def download_file_stream(self, remote_path: str) -> AsyncIterator[bytes]:
            return world().parts(self._id, remote_path)

    class Sandbox:
        def __init__(self, sandbox_id: str, labels: dict[str, str]) -> None:
            self.id, self.labels = sandbox_id, labels
            self.process, self.fs = Process(sandbox_id), Files(sandbox_id)

        async def create_snapshot(self, name: str) -> None:
            await world().snapshot(self.id, name)

    class AsyncDaytona:
        async def create(self, params: Any, *, timeout: float) -> Sandbox:
            assert timeout > 0
            ASKED.append(
                {"network_block_all": params.network_block_all, **vars(getattr(params, "resources", Resources()))}
            )
            source = params.snapshot if isinstance(params, CreateSandboxFromSnapshotParams) else params.image
            try:
                return Sandbox(await world().create(source, params.env_vars, params.labels), params.labels)
            except (NoSuchImage, SandboxRefused) as error:
                raise DaytonaBadRequestError(str(error)) from error

        async def get(self, sandbox_id_or_name: str) -> Sandbox:
            if (held := world().held.get(sandbox_id_or_name)) is None:
                raise DaytonaNotFoundError(sandbox_id_or_name)
            return Sandbox(sandbox_id_or_name, held.labels)

        async def delete(self, sandbox: Sandbox, timeout: float = 60, wait: bool = False) -> None:
            assert wait
            await world().destroy(sandbox.id)

        async def list(self) -> AsyncIterator[Sandbox]:
            for sandbox_id, held in list(world().held.items()):
                yield Sandbox(sandbox_id, held.labels)

    public = (CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Resources, Image, AsyncDaytona)
    errors = (DaytonaError, DaytonaNotFoundError)
    return {"daytona": module("daytona", **{each.__name__: each for each in (*public, *errors)})}


def aio(call: Callable[..., Any]) -> Any:
    """A function as Modal's, whose asynchronous half is its `aio`."""
    return SimpleNamespace(aio=call)


def modal() -> dict[str, ModuleType]:
    class Error(Exception):
        pass

    class InvalidError(Error):
        pass

    class NotFoundError(Error):
        pass

    class ImageBuildError(Error):
        pass

    class Image:
        def __init__(self, source: str | Path) -> None:
            self.source = source
            self.object_id = str(source)

        @classmethod
        def from_dockerfile(cls, path: Path, *, context_dir: Path) -> "Image":
            assert path.parent == context_dir
            return cls(context_dir)

        @classmethod
        def from_registry(cls, tag: str) -> "Image":
            return cls(tag)

        @classmethod
        def from_id(cls, image_id: str) -> "Image":
            return cls(image_id)

    class Process:
        def __init__(self, sandbox_id: str, line: str) -> None:
            self._running = asyncio.ensure_future(world().run(sandbox_id, line))
            self.stdout, self.stderr = self._parts("stdout"), self._parts("stderr")
            self.wait = aio(lambda: self._part("exit_code"))

        async def _parts(self, name: str) -> AsyncIterator[str]:
            text = await self._part(name)
            for start in range(0, len(text), 1000):
                yield text[start : start + 1000]

        async def _part(self, name: str) -> Any:
            try:
                return getattr(await asyncio.shield(self._running), name)
            except Gone as error:
                raise NotFoundError(str(error)) from error

    class Sandbox:
        def __init__(self, sandbox_id: str) -> None:
            self.object_id = sandbox_id
            self.exec = aio(self._exec)
            self.terminate = aio(self._terminate)
            self.get_tags = aio(self._get_tags)
            self.snapshot_filesystem = aio(self._snapshot)
            write = aio(lambda data, remote_path: world().put(sandbox_id, remote_path, data))
            self.filesystem = SimpleNamespace(write_bytes=write)

        async def _exec(self, *args: str, timeout: int | None) -> Process:
            assert args[:2] == ("sh", "-c")
            if self.object_id not in world().held:
                raise NotFoundError(self.object_id)
            return Process(self.object_id, args[2])

        async def _terminate(self, *, wait: bool) -> int:
            assert wait
            await world().destroy(self.object_id)
            return 137

        async def _get_tags(self) -> dict[str, str]:
            tags: dict[str, str] = world().held[self.object_id].labels
            return tags

        async def _snapshot(self) -> Image:
            return Image(await world().snapshot(self.object_id, f"im-{uuid4().hex}"))

    async def create(
        *,
        app: Any,
        image: Image,
        tags: dict[str, str],
        env: dict[str, str],
        timeout: int,
        cpu: tuple[float, float] | None,
        memory: tuple[int, int] | None,
        block_network: bool,
    ) -> Sandbox:
        ASKED.append({"cpu": cpu, "memory": memory, "block_network": block_network})
        assert app.app_id == "ap-rollout-sandboxes"
        assert isinstance(timeout, int)
        try:
            return Sandbox(await world().create(image.source, env, tags))
        except (NoSuchImage, SandboxRefused) as error:
            raise ImageBuildError(str(error)) from error

    async def from_id(sandbox_id: str) -> Sandbox:
        if sandbox_id not in world().held:
            raise NotFoundError(sandbox_id)
        return Sandbox(sandbox_id)

    async def listed(*, app_id: str) -> AsyncIterator[Sandbox]:
        assert app_id == "ap-rollout-sandboxes"
        for sandbox_id in list(world().held):
            yield Sandbox(sandbox_id)

    async def lookup(name: str, *, create_if_missing: bool) -> Any:
        assert create_if_missing
        return SimpleNamespace(app_id=f"ap-{name}")

    calls: dict[str, Callable[..., Any]] = {"create": create, "from_id": from_id, "list": listed}
    for name, call in calls.items():
        setattr(Sandbox, name, aio(call))
    app = SimpleNamespace(lookup=aio(lookup))
    errors = {each.__name__: each for each in (Error, InvalidError, NotFoundError, ImageBuildError)}
    return {
        "modal": module("modal", App=app, Image=Image, Sandbox=Sandbox),
        "modal.exception": module("modal.exception", **errors),
    }


def prime() -> dict[str, ModuleType]:
    class APIError(Exception):
        pass

    class CommandTimeoutError(RuntimeError):
        pass

    class SandboxNotRunningError(RuntimeError):
        pass

    class SandboxOOMError(SandboxNotRunningError):
        pass

    class SandboxImagePullError(SandboxNotRunningError):
        pass

    class CreateSandboxRequest(SimpleNamespace):
        pass

    class AsyncSandboxClient:
        def __init__(self) -> None:
            self._not_pulled: set[str] = set()

        async def create(self, request: CreateSandboxRequest) -> Any:
            assert request.name.startswith("rollout-")
            ASKED.append(vars(request))
            checkpoint = getattr(request, "checkpoint_id", None)
            try:
                key = await world().create(checkpoint or request.docker_image, request.environment_vars, request.labels)
            except NoSuchImage:
                key = uuid4().hex
                self._not_pulled.add(key)
            return SimpleNamespace(id=key)

        async def wait_for_creation(self, sandbox_id: str) -> None:
            if sandbox_id in self._not_pulled:
                raise SandboxImagePullError(f"nowhere: {sandbox_id}")

        async def execute_command(self, sandbox_id: str, command: str, *, timeout: int, user: str) -> Any:
            assert (isinstance(timeout, int), user) == (True, "root")
            try:
                return await world().run(sandbox_id, command)
            except Gone as error:
                raise SandboxNotRunningError(str(error)) from error

        async def upload_bytes(self, sandbox_id: str, file_path: str, file_bytes: bytes, filename: str) -> None:
            assert file_path.endswith(filename)
            try:
                await world().put(sandbox_id, file_path, file_bytes)
            except Gone as error:
                raise SandboxNotRunningError(str(error)) from error

        async def checkpoint(self, sandbox_id: str) -> Any:
            return SimpleNamespace(id=await world().snapshot(sandbox_id, uuid4().hex))

        async def wait_for_checkpoint(self, checkpoint_id: str) -> None:
            assert checkpoint_id in world().snapshots

        async def delete(self, sandbox_id: str) -> None:
            try:
                await world().destroy(sandbox_id)
            except Gone as error:
                raise APIError(f"HTTP 404: {error}") from error

        async def list(self, *, page: int, exclude_terminated: bool) -> Any:
            assert exclude_terminated
            found = sorted(world().held.items())
            here = [
                SimpleNamespace(id=key, labels=held.labels, status="RUNNING") for key, held in found[page - 1 : page]
            ]
            return SimpleNamespace(sandboxes=here, has_next=page < len(found))

    public = (APIError, AsyncSandboxClient, CommandTimeoutError, CreateSandboxRequest)
    errors = (SandboxImagePullError, SandboxNotRunningError, SandboxOOMError)
    return {
        "prime_sandboxes": module("prime_sandboxes", **{each.__name__: each for each in public}),
        "prime_sandboxes.exceptions": module("prime_sandboxes.exceptions", **{each.__name__: each for each in errors}),
    }


SDKS: Mapping[str, Callable[[], dict[str, ModuleType]]] = {
    "e2b": e2b,
    "daytona": daytona,
    "modal": modal,
    "prime": prime,
}


def installed(name: str) -> dict[str, ModuleType]:
    """Puts the stand-in of an SDK in its place, and has our module import it anew. Returns what was put there."""
    modules = SDKS[name]()
    sys.modules.update(modules)
    sys.modules.pop(f"deployments.sandbox.providers.{name}", None)
    return modules
