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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx

from deployments.sandbox.interface import MIB, SandboxLost
from deployments.sandbox.providers.folder_state import FolderStates
from deployments.sandbox.providers.interface import (
    DEFAULT_MEMORY_MB,
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
    context_of,
    read_bounded,
    tar_of,
    unreadable,
)
from deployments.sandbox.providers.leftover import FIRST
from deployments.sandbox.providers.owned import FOLDER, OwnedSandbox, OwningProvider

SOCKET = "/var/run/docker.sock"
API = "http://docker/v1.41"
ANSWERS_WITHIN_S = 30.0
MOST_ANSWER_BYTES = LARGEST_FILE_BYTES + MIB
"""The largest file in its archive."""
BETWEEN_CHECKS_S = 1.0
KILLED = 128 + 9
BOUNDED_BY = ("overlay2", "btrfs", "zfs")
"""Storage drivers that bound a container's files, or refuse to. With containerd's the engine leaves the bound out."""
CHECKS, CHECK_EVERY_S = 4, 0.2
STARTED = f'mkdir -p {FOLDER}; echo $$ > "$1"; exec < "$2"; shift 2; exec "$@"'
"""The engine ends no command of a container, so each writes the id of its process group."""


class _AnswerTooLong(SandboxLost):
    """An answer of the engine has more than `MOST_ANSWER_BYTES`, and was read no further."""


class DockerProvider(OwningProvider):
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
        self._socket = socket
        self.network = network
        self._runtime = runtime
        self._clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self._building: dict[str, asyncio.Lock] = {}
        self._engine: dict[str, Any] | None = None
        """The engine's own description, once it was asked for."""
        self._folders = FolderStates()

    @asynccontextmanager
    async def asked(
        self, method: str, path: str, limit_s: float | None = ANSWERS_WITHIN_S, **options: Any
    ) -> AsyncIterator[httpx.Response]:
        """A streamed answer of the engine. Raises `SandboxLost` if it cannot be had."""
        loop = asyncio.get_running_loop()
        if (client := self._clients.get(loop)) is None:
            transport = httpx.AsyncHTTPTransport(uds=self._socket, limits=httpx.Limits(max_connections=None))
            headers = {"accept-encoding": "identity"}
            client = self._clients[loop] = httpx.AsyncClient(transport=transport, base_url=API, headers=headers)
        timeout = httpx.Timeout(ANSWERS_WITHIN_S, read=limit_s)
        try:
            async with client.stream(method, path, timeout=timeout, **options) as answer:
                yield answer
        except httpx.HTTPError as error:
            raise SandboxLost(f"The Docker engine at {self._socket} does not answer: {error!r}.") from error

    async def call(
        self, method: str, path: str, *also: int, limit_s: float | None = ANSWERS_WITHIN_S, **options: Any
    ) -> tuple[int, Any]:
        """The status and the content of an answer that is a success, or has one of the statuses in `also`.

        Raises:
            SandboxLost: it has another status, or is too long (`_AnswerTooLong`).
        """
        async with self.asked(method, path, limit_s, **options) as answer:
            body = await _body_of(answer)
            if not (answer.is_success or answer.status_code in also):
                raise SandboxLost(
                    f"The Docker engine answered {answer.status_code} to {method} {path}: {body[:500]!r}."
                )
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return answer.status_code, json.loads(body) if is_json and body else body

    async def open(self, spec: SandboxSpec) -> RunningSandbox:
        """See `SandboxProvider.open`."""
        self.watched()
        await self._refuse_unenforced(spec)
        image = spec.image or await self._built(spec)
        if spec.storage_mb is not None:
            await self._refuse_volumes(image, spec)
        name = f"rollout-{uuid4().hex}"
        creating = asyncio.ensure_future(self._created(name, image, spec))
        try:
            await asyncio.shield(creating)
        except BaseException:
            # The engine may make it even so.
            await asyncio.shield(asyncio.ensure_future(self._removed_after(creating, name)))
            raise
        return DockerSandbox(self, name, spec)

    async def _created(self, name: str, image: str, spec: SandboxSpec) -> None:
        memory = (spec.memory_mb or DEFAULT_MEMORY_MB) * MIB
        host: dict[str, Any] = {
            "NetworkMode": self.network if spec.network else "none",
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
        if spec.storage_mb is not None:
            host["StorageOpt"] = {"size": f"{spec.storage_mb}m"}
        body = {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c"],
            "Cmd": [FIRST],
            "Env": [f"{key}={value}" for key, value in spec.environment.items()],
            "Labels": {OWNER_LABEL: self.owner},
            "HostConfig": host,
            **({"WorkingDir": spec.workdir} if spec.workdir is not None else {}),
        }
        status, answer = await self.call("POST", f"/containers/create?name={name}", 400, 404, 500, json=body)
        if status in (400, 500) and b"storage-opt" in _dumped(answer):
            spec.refuse_limits(f"the Docker engine at {self._socket} bounds no files: {answer}", "storage_mb")
        if status == httpx.codes.INTERNAL_SERVER_ERROR:
            raise SandboxLost(f"The Docker engine made no container of {image}: {answer}.")
        if status in (400, 404):
            raise SandboxRefused(f"The Docker engine cannot make a container of {image}: {answer}.")
        await self.call("POST", f"/containers/{name}/start")

    async def _refuse_unenforced(self, spec: SandboxSpec) -> None:
        """Raises `SandboxRefused` for what the engine would leave out in silence."""
        if self._engine is None:
            _, self._engine = await self.call("GET", "/info")
        limits = {"MemoryLimit": "memory", "PidsLimit": "processes"}
        if missing := [limit for name, limit in limits.items() if not self._engine.get(name)]:
            raise SandboxRefused(
                f"The Docker engine at {self._socket} bounds no {' and no '.join(missing)} of a container: give it the "
                "controllers of control groups, or use the provider local."
            )
        if (driver := self._engine.get("Driver")) not in BOUNDED_BY:
            reason = f"the storage driver {driver} of the Docker engine at {self._socket} bounds no files"
            spec.refuse_limits(f"{reason} ({', '.join(BOUNDED_BY)} do)", "storage_mb")

    async def _refuse_volumes(self, image: str, spec: SandboxSpec) -> None:
        """Raises `SandboxRefused` for an image with volumes, whose files are not the container's."""
        status, found = await self.call("GET", f"/images/{image}/json", 404)
        volumes = None if status == httpx.codes.NOT_FOUND else (found.get("Config") or {}).get("Volumes")
        if volumes:
            spec.refuse_limits(f"it bounds no files of the volumes of {image}, {', '.join(volumes)}", "storage_mb")

    async def _removed_after(self, creating: "asyncio.Future[None]", name: str) -> None:
        await asyncio.wait([creating])
        await self.remove(name)

    async def _built(self, spec: SandboxSpec) -> str:
        assert spec.folder is not None
        tag = f"rollout-sandbox:{(await self._folders.name_of(spec.folder))[:32]}"
        async with self._building.setdefault(tag, asyncio.Lock()):
            status, _ = await self.call("GET", f"/images/{tag}/json", 404)
            if status != httpx.codes.NOT_FOUND:
                return tag
            try:
                async with asyncio.timeout(spec.build_timeout_s):
                    await self._build(tag, await context_of(spec.folder), spec)
            except TimeoutError as error:
                raise SandboxRefused(f"{spec.folder} was not built within {spec.build_timeout_s:g} s.") from error
        return tag

    async def _build(self, tag: str, context: bytes, spec: SandboxSpec) -> None:
        headers, query = (
            {"content-type": "application/x-tar"},
            {"t": tag, "rm": "1", "forcerm": "1", "networkmode": "host"},
        )
        async with self.asked("POST", "/build", None, params=query, content=context, headers=headers) as answer:
            async for line in answer.aiter_lines():
                said = json.loads(line) if line.strip() else {}
                if problem := said.get("error") or said.get("message"):
                    raise SandboxRefused(f"{spec.folder} cannot be built: {problem.strip()}.")

    async def owned(self) -> dict[str, str | None]:
        """See `OwningProvider.owned`."""
        query = {"all": "1", "filters": json.dumps({"label": [OWNER_LABEL]})}
        _, containers = await self.call("GET", "/containers/json", params=query)
        return {container["Id"]: container["Labels"][OWNER_LABEL] for container in containers}

    async def remove(self, sandbox_id: str) -> None:
        """See `OwningProvider.remove`."""
        # 409: it is being removed already.
        status, _ = await self.call("DELETE", f"/containers/{sandbox_id}?force=1&v=1", 404, 409)
        while status == httpx.codes.CONFLICT:
            await asyncio.sleep(BETWEEN_CHECKS_S)
            status, _ = await self.call("GET", f"/containers/{sandbox_id}/json", 404)
            if status == httpx.codes.NOT_FOUND:
                return
            status = httpx.codes.CONFLICT


class DockerSandbox(OwnedSandbox):
    """One container."""

    _provider: DockerProvider

    async def _call(self, method: str, path: str, *also: int, **options: Any) -> tuple[int, Any]:
        """A call of this container. Raises `SandboxLost` or `OutOfMemory` if it has ended."""
        status, answer = await self._provider.call(method, f"/containers/{self.id}{path}", 404, 409, *also, **options)
        if status == httpx.codes.CONFLICT or (
            status == httpx.codes.NOT_FOUND and b"No such container" in _dumped(answer)
        ):
            raise SandboxLost("The container has ended.")
        return status, answer

    async def exec(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """See `RunningSandbox.exec`."""
        path, stdin_path = await self.with_stdin(stdin)
        body = {
            "AttachStdout": True,
            "AttachStderr": True,
            "Env": [f"{name}={value}" for name, value in (environment or {}).items()],
            "Cmd": ["/bin/sh", "-c", STARTED, "sh", path, stdin_path, *argv],
            **({"WorkingDir": cwd} if cwd is not None else {}),
        }
        _, made = await self._call("POST", "/exec", json=body)
        output = {1: bytearray(), 2: bytearray()}
        async with self.ended_early(path, timeout_s):
            await self._read_output(made["Id"], output)
        _, ended = await self._provider.call("GET", f"/exec/{made['Id']}/json", 404)
        if not isinstance(ended, dict) or ended.get("ExitCode") in (None, KILLED):
            # The engine notices the end of a container a little after that of its processes.
            for _ in range(CHECKS):
                await self._check()
                await asyncio.sleep(CHECK_EVERY_S)
        code = ended.get("ExitCode") if isinstance(ended, dict) else None
        if code is None:
            raise SandboxLost("The engine does not know how a command has ended.")
        stdout, stderr = (bytes(kept).decode(errors="replace") for kept in output.values())
        return ExecResult(code, stdout, stderr)

    async def _read_output(self, exec_id: str, output: Mapping[int, bytearray]) -> None:
        """Reads the frames of a command until it has ended: the stream in a byte, a length in bytes 4 to 8, bytes."""
        start, pending = {"Detach": False, "Tty": False}, bytearray()
        async with self._provider.asked("POST", f"/exec/{exec_id}/start", None, json=start) as answer:
            if not answer.is_success:
                raise SandboxLost(f"The command was not started: {(await _body_of(answer))[:500]!r}.")
            async for part in answer.aiter_raw():
                pending += part
                while len(pending) >= 8 and len(pending) >= 8 + (length := struct.unpack(">I", pending[4:8])[0]):
                    kept = output[pending[0]]
                    kept += pending[8 : 8 + length]
                    del kept[:-LARGEST_OUTPUT_BYTES], pending[: 8 + length]

    async def kill(self, path: str) -> None:
        """See `OwnedSandbox.kill`. Ends its process group."""
        _, made = await self._call("POST", "/exec", json={"Cmd": ["/bin/sh", "-c", f"kill -9 -$(cat {path})"]})
        await self._provider.call("POST", f"/exec/{made['Id']}/start", json={"Detach": True})

    async def put(self, path: str, content: bytes) -> None:
        """See `OwnedSandbox.put`."""
        await self.write_files({path: SandboxFile(content)})

    async def _check(self) -> None:
        """Raises `SandboxLost` or `OutOfMemory` if the container does not run."""
        _, found = await self._call("GET", "/json")
        state = found["State"]
        if state.get("OOMKilled"):
            raise OutOfMemory("The container used more than its memory.")
        if not state.get("Running") or state.get("Dead") or state.get("Status") == "removing":
            raise SandboxLost("The container has ended.")

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        """See `RunningSandbox.write_files`."""
        headers, archive = {"content-type": "application/x-tar"}, await asyncio.to_thread(tar_of, files)
        status, answer = await self._call("PUT", "/archive?path=/", 400, 403, content=archive, headers=headers)
        if status != httpx.codes.OK:
            raise SandboxRefused(f"The files cannot be written in the container: {answer}.")

    async def read_file(self, path: str) -> bytes | None:
        """See `RunningSandbox.read_file`."""
        # The end of a link is not followed by the engine.
        try:
            status, content = await self._call("GET", "/archive", 400, params={"path": path})
        except _AnswerTooLong as error:
            raise unreadable(path) from error
        if status == httpx.codes.NOT_FOUND:
            return None
        if status != httpx.codes.OK:
            raise unreadable(path)
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                member = archive.next()
        except tarfile.TarError as error:
            raise SandboxLost(f"The engine's archive of {path} cannot be read: {error}.") from error
        if member is None or not member.isreg() or member.size > LARGEST_FILE_BYTES:
            raise unreadable(path)
        return bytes(content[member.offset_data : member.offset_data + member.size])


async def _body_of(answer: httpx.Response) -> bytes:
    """The content of an answer. Raises `_AnswerTooLong`."""
    excess = _AnswerTooLong(f"The Docker engine answers with more than {MOST_ANSWER_BYTES} bytes.")
    return await read_bounded(answer.aiter_bytes(), MOST_ANSWER_BYTES, excess)


def _dumped(answer: object) -> bytes:
    return answer if isinstance(answer, bytes) else json.dumps(answer).encode()
