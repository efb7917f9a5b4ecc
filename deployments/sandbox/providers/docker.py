"""Sandboxes that are containers of a Docker Engine, by its HTTP API (1.41 and newer): `docker`.

A folder is built as Docker builds it, once for each content; an image is used as it is, and never pulled here. The
containers have the network of this machine, or that of `network`: commands in them reach the service at its address.
One without a network has none at all. What the engine does not enforce is refused before a container is made.
"""

import asyncio
import io
import json
import struct
import tarfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from deployments.sandbox.interface import MIB, SandboxLost
from deployments.sandbox.providers.interface import (
    DEFAULT_MEMORY_MB,
    KILLED,
    LARGEST_FILE_BYTES,
    LARGEST_OUTPUT_BYTES,
    MOST_PROCESSES,
    OWNER_LABEL,
    ExecResult,
    OutOfMemory,
    RunningSandbox,
    SandboxFile,
    SandboxRefused,
    SandboxSpec,
    files_below,
    state_of,
    tar_of,
)
from deployments.sandbox.providers.leftover import FIRST
from deployments.sandbox.providers.shell import ReapedProvider, RemoteSandbox

SOCKET = "/var/run/docker.sock"
_API = "http://docker/v1.41"
_ANSWERS_WITHIN_S = 30.0
_MOST_ARCHIVE_BYTES = LARGEST_FILE_BYTES + MIB
"""The largest file in its archive."""
_BETWEEN_CHECKS_S = 1.0
_CHECKS, _CHECK_EVERY_S = 4, 0.2


class DockerProvider(ReapedProvider):
    name = "docker"
    has_network = True

    def __init__(self, socket: str = SOCKET, network: str = "host", runtime: str | None = None) -> None:
        """Opens no connection yet.

        Args:
            socket: path of the engine's socket.
            network: the containers' network mode.
            runtime: the engine's runtime, such as `runsc`; by default its own.
        """
        super().__init__({"socket": socket, "network": network, "runtime": runtime})
        self._engine = f"The Docker engine at {socket}"
        self._network = network
        self._runtime = runtime
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None))
        # A compressed answer would grow beyond what is read of it.
        headers = {"accept-encoding": "identity"}
        self._client = httpx.AsyncClient(transport=transport, base_url=_API, headers=headers, timeout=_ANSWERS_WITHIN_S)
        self._building: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, read_s: float | None = None, **options: Any
    ) -> AsyncIterator[httpx.Response]:
        """A streamed answer of the engine, each part within `read_s`. Raises `SandboxLost`."""
        timeout = httpx.Timeout(_ANSWERS_WITHIN_S, read=read_s)
        try:
            async with self._client.stream(method, path, timeout=timeout, **options) as answer:
                yield answer
        except httpx.HTTPError as error:
            raise SandboxLost(f"{self._engine} does not answer: {error!r}.") from error

    async def call(self, method: str, path: str, *also: int, **options: Any) -> httpx.Response:
        """An answer that is a success, or has one of the statuses in `also`.

        Raises:
            SandboxLost: it has another status, or there is none.
        """
        try:
            answer = await self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise SandboxLost(f"{self._engine} does not answer: {error!r}.") from error
        if not (answer.is_success or answer.status_code in also):
            raise SandboxLost(f"{self._engine} answered {answer.status_code} to {method} {path}: {answer.text[:500]}")
        return answer

    async def open(self, spec: SandboxSpec) -> RunningSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_limits("a Docker engine bounds no files of a container with most storage drivers", "storage_mb")
        self.start_reaper()
        image = spec.image or await self._built(spec)
        sandbox = _DockerSandbox(self, f"rollout-{uuid4().hex}", spec)
        creating = asyncio.ensure_future(self._create(sandbox.id, image, spec))
        try:
            await asyncio.shield(creating)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(_close_after(creating, sandbox)))
            raise
        return sandbox

    async def _create(self, name: str, image: str, spec: SandboxSpec) -> None:
        memory = (spec.memory_mb or DEFAULT_MEMORY_MB) * MIB
        host: dict[str, Any] = {
            "NetworkMode": self._network if spec.network else "none",
            "Init": False,
            "Binds": [f"{folder}:{folder}:ro" for folder in spec.read_only_folders],
            "SecurityOpt": ["no-new-privileges"],
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": MOST_PROCESSES,
        }
        if self._runtime is not None:
            host["Runtime"] = self._runtime
        if spec.cpus is not None:
            host["NanoCpus"] = round(spec.cpus * 1e9)
        body = {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c"],
            "Cmd": [FIRST],
            "Env": [f"{key}={value}" for key, value in spec.environment.items()],
            "Labels": {OWNER_LABEL: self.owner},
            "HostConfig": host,
            **({"WorkingDir": spec.workdir} if spec.workdir is not None else {}),
        }
        answer = await self.call("POST", f"/containers/create?name={name}", 400, 404, json=body)
        if not answer.is_success:
            raise SandboxRefused(f"{self._engine} cannot make a container of {image}: {answer.text}.")
        # An engine without the controllers of control groups leaves limits out.
        if warnings := [said for said in answer.json().get("Warnings") or () if "discarded" in said]:
            raise SandboxRefused(f"{self._engine} bounds no container: {' '.join(warnings)}")
        await self.call("POST", f"/containers/{name}/start")

    async def _built(self, spec: SandboxSpec) -> str:
        assert spec.folder is not None
        async with self._building[spec.folder]:
            tag = f"rollout-sandbox:{(await asyncio.to_thread(state_of, spec.folder))[:32]}"
            if (await self.call("GET", f"/images/{tag}/json", 404)).is_success:
                return tag
            context = await asyncio.to_thread(lambda folder: tar_of(files_below(folder, "/")), spec.folder)
            try:
                async with asyncio.timeout(spec.build_timeout_s):
                    await self._build(tag, context, spec)
            except TimeoutError as error:
                raise SandboxRefused(f"{spec.folder} was not built within {spec.build_timeout_s:g} s.") from error
        return tag

    async def _build(self, tag: str, context: bytes, spec: SandboxSpec) -> None:
        headers = {"content-type": "application/x-tar"}
        query = {"t": tag, "rm": "1", "forcerm": "1", "networkmode": "host"}
        async with self.stream("POST", "/build", params=query, content=context, headers=headers) as answer:
            async for line in answer.aiter_lines():
                said = json.loads(line) if line.strip() else {}
                if problem := said.get("error") or said.get("message"):
                    raise SandboxRefused(f"{spec.folder} cannot be built: {problem.strip()}.")

    async def ids_of(self, owner: str) -> list[str]:
        """See `ReapedProvider.ids_of`."""
        query = {"all": "1", "filters": json.dumps({"label": [f"{OWNER_LABEL}={owner}"]})}
        return [container["Id"] for container in (await self.call("GET", "/containers/json", params=query)).json()]

    async def remove(self, sandbox_id: str) -> None:
        """See `RemoteProvider.remove`."""
        # 409: it is being removed already.
        answer = await self.call("DELETE", f"/containers/{sandbox_id}?force=1&v=1", 404, 409)
        is_left = answer.status_code == httpx.codes.CONFLICT
        while is_left:
            await asyncio.sleep(_BETWEEN_CHECKS_S)
            is_left = (await self.call("GET", f"/containers/{sandbox_id}/json", 404)).is_success


async def _close_after(creating: "asyncio.Future[None]", sandbox: RunningSandbox) -> None:
    """Destroys a sandbox that nobody waits for any longer: the engine may make it even so."""
    await asyncio.wait([creating])
    await sandbox.close()


class _DockerSandbox(RemoteSandbox):
    """One container."""

    _provider: DockerProvider

    async def _call(self, method: str, path: str, *also: int, **options: Any) -> httpx.Response:
        """A call of this container. Raises `SandboxLost` if it has ended."""
        answer = await self._provider.call(method, f"/containers/{self.id}{path}", 404, 409, *also, **options)
        if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT):
            raise SandboxLost("The container has ended.")
        return answer

    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:  # noqa: ARG002
        """See `ShellSandbox.run_shell`."""
        return await self._run(["/bin/sh", "-c", line], {})

    async def run_command(
        self,
        start: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float | None,  # noqa: ARG002
    ) -> ExecResult:
        """See `RemoteSandbox.run_command`. No list of processes, and no event of the engine, has the variables."""
        return await self._run(["/bin/sh", "-c", f'{start} && exec "$@"', "sh", *argv], environment)

    async def _run(self, argv: Sequence[str], environment: Mapping[str, str]) -> ExecResult:
        variables = [f"{name}={value}" for name, value in environment.items()]
        body = {"AttachStdout": True, "AttachStderr": True, "Env": variables, "Cmd": argv}
        exec_id = (await self._call("POST", "/exec", json=body)).json()["Id"]
        output = {1: bytearray(), 2: bytearray()}
        await self._read_output(exec_id, output)
        ended = await self._provider.call("GET", f"/exec/{exec_id}/json", 404)
        code = ended.json().get("ExitCode")
        if code in (None, KILLED):
            # The engine notices the end of a container a little after that of its processes.
            for _ in range(_CHECKS):
                await self._check()
                await asyncio.sleep(_CHECK_EVERY_S)
        if code is None:
            raise SandboxLost("The engine does not know how a command has ended.")
        stdout, stderr = (bytes(kept).decode(errors="replace") for kept in output.values())
        return ExecResult(code, stdout, stderr)

    async def _read_output(self, exec_id: str, output: Mapping[int, bytearray]) -> None:
        """Reads the frames of a command until it has ended: the stream in a byte, a length in bytes 4 to 8, bytes."""
        start, pending = {"Detach": False, "Tty": False}, bytearray()
        async with self._provider.stream("POST", f"/exec/{exec_id}/start", json=start) as answer:
            if not answer.is_success:
                raise SandboxLost(f"The command was not started: the engine answered {answer.status_code}.")
            async for part in answer.aiter_raw():
                pending += part
                while len(pending) >= 8 and len(pending) >= 8 + (length := struct.unpack(">I", pending[4:8])[0]):
                    kept = output[pending[0]]
                    kept += pending[8 : 8 + length]
                    del kept[:-LARGEST_OUTPUT_BYTES], pending[: 8 + length]

    async def _check(self) -> None:
        """Raises `SandboxLost` or `OutOfMemory` if the container does not run."""
        state = (await self._call("GET", "/json")).json()["State"]
        if state.get("OOMKilled"):
            raise OutOfMemory("The container used more than its memory.")
        if not state.get("Running") or state.get("Dead") or state.get("Status") == "removing":
            raise SandboxLost("The container has ended.")

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        """See `RunningSandbox.write_files`."""
        headers, archive = {"content-type": "application/x-tar"}, await asyncio.to_thread(tar_of, files)
        answer = await self._call("PUT", "/archive?path=/", 400, 403, content=archive, headers=headers)
        if not answer.is_success:
            raise SandboxRefused(f"The files cannot be written in the container: {answer.text}.")

    async def read_file(self, path: str) -> bytes | None:
        """See `RunningSandbox.read_file`.

        The engine reads it: who is root in the container can replace each of its programs, and have them say anything.
        It does not follow a link.
        """
        url, content = f"/containers/{self.id}/archive", bytearray()
        async with self._provider.stream("GET", url, _ANSWERS_WITHIN_S, params={"path": path}) as answer:
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > _MOST_ARCHIVE_BYTES:
                    raise self._unreadable(path)
        if answer.status_code == httpx.codes.NOT_FOUND and b"No such container" not in content:
            return None
        if answer.status_code == httpx.codes.BAD_REQUEST:
            raise self._unreadable(path)
        if not answer.is_success:
            raise SandboxLost(f"{path} was not read: the engine answered {answer.status_code}: {content[:500]!r}.")
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                member = archive.next()
                if member is None or not member.isreg() or member.size > LARGEST_FILE_BYTES:
                    raise self._unreadable(path)
                file = archive.extractfile(member)
                assert file is not None
                return file.read()
        except tarfile.TarError as error:
            raise SandboxLost(f"The engine's archive of {path} cannot be read: {error}.") from error
