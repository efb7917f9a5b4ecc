"""A stand-in of a Docker engine: its HTTP API (1.41) on a Unix socket, as far as ours calls it.

The same tests were held by a real engine; this one says what they need of it where there is none.
"""

import asyncio
import io
import json
import struct
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import ExecResult, SandboxRefused
from tests.deployments.sandbox.providers.stand_ins.world import ASKED, KNOWN_IMAGE, Gone, world

KILLED = 137


@dataclass
class Container:
    name: str
    config: dict[str, Any]
    id: str = ""


@dataclass
class Engine:
    images: dict[str, str | Path] = field(default_factory=lambda: {KNOWN_IMAGE: KNOWN_IMAGE})
    containers: dict[str, Container] = field(default_factory=dict)
    execs: dict[str, tuple[Container, dict[str, Any]]] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def of(self, request: Request) -> Container:
        """Raises `Gone`."""
        name = request.path_params["name"]
        found = self.containers.get(name) or next((each for each in self.containers.values() if each.id == name), None)
        if found is None:
            raise Gone(name)
        return found

    async def image(self, request: Request) -> Response:
        is_known = request.path_params["name"] in self.images
        return JSONResponse({}) if is_known else message(404, f"No such image: {request.path_params['name']}")

    async def build(self, request: Request) -> Response:
        folder = world().folder / uuid4().hex
        with tarfile.open(fileobj=io.BytesIO(await request.body())) as archive:
            # Python 3.11.2, which Debian 12 has, knows no argument `filter`.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(folder)
        try:
            await world().destroy(await world().create(folder, {}))
        except SandboxRefused as error:
            return Response(json.dumps({"stream": "Step 1"}) + "\n" + json.dumps({"error": str(error)}) + "\n")
        self.images[request.query_params["t"]] = folder
        return Response(json.dumps({"stream": "Successfully built"}) + "\n")

    async def create(self, request: Request) -> Response:
        config = await request.json()
        if config["Image"] not in self.images:
            return message(404, f"No such image: {config['Image']}")
        ASKED.append(config["HostConfig"])
        name = request.query_params["name"]
        self.containers[name] = Container(name, config)
        return JSONResponse({"Id": name, "Warnings": self.warnings}, 201)

    async def start(self, request: Request) -> Response:
        container = self.of(request)
        variables = dict(each.split("=", 1) for each in container.config["Env"])
        source = self.images[container.config["Image"]]
        container.id = await world().create(source, variables)
        return Response(status_code=204)

    async def make_exec(self, request: Request) -> Response:
        key = uuid4().hex
        self.execs[key] = self.of(request), await request.json()
        return JSONResponse({"Id": key}, 201)

    async def start_exec(self, request: Request) -> Response:
        key = request.path_params["key"]
        container, config = self.execs[key]
        running = asyncio.ensure_future(self.run(key, container, config))
        if (await request.json())["Detach"]:
            await running
            return Response(status_code=200)

        async def frames() -> AsyncIterator[bytes]:
            done = await asyncio.shield(running)
            for stream, text in ((1, done.stdout), (2, done.stderr)):
                content = text.encode()
                yield struct.pack(">BxxxI", stream, len(content)) + content if content else b""

        return StreamingResponse(frames(), media_type="application/vnd.docker.raw-stream")

    async def run(self, key: str, container: Container, config: dict[str, Any]) -> ExecResult:
        try:
            sandbox = world().held[container.id]
            variables = dict(each.split("=", 1) for each in config.get("Env", ()))
            done = await sandbox.exec(config["Cmd"], environment=variables, cwd=config.get("WorkingDir"))
        except (KeyError, SandboxLost):
            done = ExecResult(KILLED, "", "")
        self.codes[key] = done.exit_code
        return done

    async def exec_state(self, request: Request) -> Response:
        return JSONResponse({"Running": False, "ExitCode": self.codes[request.path_params["key"]]})

    async def state(self, request: Request) -> Response:
        running = self.of(request).id in world().held
        return JSONResponse({"State": {"Running": running, "Status": "running", "OOMKilled": False}})

    async def archive(self, request: Request) -> Response:
        sandbox_id = self.of(request).id
        if request.method == "PUT":
            assert request.query_params["path"] == "/"
            with tarfile.open(fileobj=io.BytesIO(await request.body())) as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    assert file is not None
                    await world().put(sandbox_id, f"/{member.name}", file.read())
                    await world().run(sandbox_id, f"chmod {member.mode:o} /{member.name}")
            return Response(status_code=200)
        path = request.query_params["path"]
        kind = (await world().run(sandbox_id, f"test -f {path} && echo file; test -d {path} && echo folder")).stdout
        if not kind:
            return message(404, f"Could not find the file {path} in container")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            member = tarfile.TarInfo(Path(path).name)
            content = await world().get(sandbox_id, path) if kind == "file\n" else b""
            member.size, member.type = len(content), tarfile.REGTYPE if kind == "file\n" else tarfile.DIRTYPE
            archive.addfile(member, io.BytesIO(content))
        return Response(buffer.getvalue(), media_type="application/x-tar")

    async def remove(self, request: Request) -> Response:
        container = self.of(request)
        del self.containers[container.name]
        if container.id in world().held:
            await world().destroy(container.id)
        return Response(status_code=204)

    async def listed(self, request: Request) -> Response:
        [label] = json.loads(request.query_params["filters"])["label"]
        key, _, value = label.partition("=")
        found = [each.name for each in self.containers.values() if each.config["Labels"].get(key) == value]
        return JSONResponse([{"Id": name} for name in found])


def message(status: int, text: str) -> Response:
    return JSONResponse({"message": text}, status)


async def no_such_container(_request: Request, error: Exception) -> Response:
    return message(404, f"No such container: {error}")


@asynccontextmanager
async def engine(socket: Path, stand_in: Engine | None = None) -> AsyncIterator[None]:
    """Answers at the socket within the block."""
    stand_in = stand_in or Engine()
    routes = [
        Route("/images/{name:path}/json", stand_in.image),
        Route("/build", stand_in.build, methods=["POST"]),
        Route("/containers/json", stand_in.listed),
        Route("/containers/create", stand_in.create, methods=["POST"]),
        Route("/containers/{name}/start", stand_in.start, methods=["POST"]),
        Route("/containers/{name}/exec", stand_in.make_exec, methods=["POST"]),
        Route("/containers/{name}/archive", stand_in.archive, methods=["GET", "PUT"]),
        Route("/containers/{name}/json", stand_in.state),
        Route("/containers/{name}", stand_in.remove, methods=["DELETE"]),
        Route("/exec/{key}/start", stand_in.start_exec, methods=["POST"]),
        Route("/exec/{key}/json", stand_in.exec_state),
    ]
    app = Starlette(routes=[Mount("/v1.41", routes=routes)], exception_handlers={Gone: no_such_container})
    server = uvicorn.Server(uvicorn.Config(app, uds=str(socket), log_level="warning", lifespan="off"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        server.force_exit = True
        await serving
