"""A stand-in of `kubectl` with its cluster: a program that carries its call to this process, which answers.

It answers what `deployments/sandbox/providers/kubernetes.py` asks, with kubectl's own outputs and exit codes.
"""

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.deployments.sandbox.providers.stand_ins.world import ASKED, Gone, NoSuchImage, world

PROGRAM = """#!{python}
import base64, json, socket, sys
with socket.socket(socket.AF_UNIX) as stream:
    stream.connect({socket!r})
    call = {{"argv": sys.argv[1:], "stdin": base64.b64encode(sys.stdin.buffer.read()).decode()}}
    stream.sendall(json.dumps(call).encode() + b"\\n")
    code, out, err = json.loads(stream.makefile("rb").readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
Answer = tuple[int, str, str]


class Cluster:
    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.ids: dict[str, str] = {}

    async def answer(self, argv: list[str], stdin: bytes) -> Answer:
        assert argv[:2] == ["--namespace", "default"]
        match argv[2:]:
            case ["create", "-f", "-"]:
                return await self._create(json.loads(stdin))
            case ["get", "pod", name, "-o", "json"]:
                return (0, json.dumps(self.pods[name]), "") if name in self.pods else not_found(name)
            case ["get", "pod", name, "-o", "jsonpath={.status.phase}"]:
                return (0, self.pods[name]["status"]["phase"], "") if name in self.pods else not_found(name)
            case ["get", "pods", "-l", label, "-o", "json"]:
                key, _, value = label.partition("=")
                items = [pod for pod in self.pods.values() if pod["metadata"]["labels"].get(key) == value]
                return 0, json.dumps({"items": items}), ""
            case ["delete", "pod", name, "--ignore-not-found", "--now", "--wait=true"]:
                if self.pods.pop(name, None) is not None and name in self.ids:
                    await world().destroy(self.ids[name])
                return 0, "", ""
            case ["exec", "-i", name, "-c", "sandbox", "--", "sh", "-c", line]:
                try:
                    done = await world().run(self.ids.get(name, name), line, stdin)
                except Gone:
                    return 1, "", f'Error from server (NotFound): pods "{name}" not found\n'
                return done.exit_code, done.stdout, done.stderr
        raise AssertionError(argv)

    async def _create(self, manifest: dict[str, Any]) -> Answer:
        name, [container] = manifest["metadata"]["name"], manifest["spec"]["containers"]
        assert (manifest["apiVersion"], manifest["kind"], manifest["spec"]["restartPolicy"]) == ("v1", "Pod", "Never")
        ASKED.append(container["resources"])
        state: dict[str, Any] = {"ready": True, "state": {"running": {}}}
        try:
            variables = {each["name"]: each["value"] for each in container["env"]}
            self.ids[name] = await world().create(container["image"], variables)
        except NoSuchImage:
            state = {"ready": False, "state": {"waiting": {"reason": "ErrImagePull", "message": "nowhere"}}}
        status = {"phase": "Running" if state["ready"] else "Pending", "containerStatuses": [state]}
        self.pods[name] = {**manifest, "status": status}
        return 0, f"pod/{name} created\n", ""


def not_found(name: str) -> Answer:
    return 1, "", f'Error from server (NotFound): pods "{name}" not found\n'


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Path]:
    """The program, whose calls are answered within the block."""
    stand_in, socket, program = Cluster(), folder / "kubectl.sock", folder / "kubectl"

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = json.loads(await reader.readline())
        answer = await stand_in.answer(call["argv"], base64.b64decode(call["stdin"]))
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(connected, socket, limit=2**26):
        program.write_text(PROGRAM.format(python=sys.executable, socket=str(socket)))
        program.chmod(0o755)
        yield program
