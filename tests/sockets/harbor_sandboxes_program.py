"""The contract of sandboxes, over a backend of Harbor's own: `python harbor_sandboxes_program.py RESULTS`.

It runs where Harbor is installed, unmodified. The backend, `OnThisMachine`, runs commands on this machine, in a folder
that stands for the sandbox. `RESULTS` becomes JSON.
"""

import asyncio
import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    ProviderUnusable,
    SandboxFile,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    open_provider,
)

BACKEND = f"{Path(__file__).stem}:OnThisMachine"
RUNNING: set[str] = set()
ASKED: list[dict[str, Any]] = []


class OnThisMachine(BaseEnvironment):  # type: ignore[misc]  # Harbor is installed beside the service alone
    """Has no walls: for this test alone."""

    broken = False

    @staticmethod
    def type() -> str:
        return "on-this-machine"

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, fractional_cpus=True)

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)

    async def start(self, force_build: bool) -> None:
        ASKED.append({"cpus": self.task_env_config.cpus, "image": self.task_env_config.docker_image})
        self.folder = tempfile.mkdtemp()
        RUNNING.add(self.session_id)
        if self.task_env_config.docker_image == "slow":
            await asyncio.sleep(60)

    async def stop(self, delete: bool) -> None:
        if self.broken:
            OnThisMachine.broken = False
            raise OSError("no answer")
        assert delete
        RUNNING.discard(self.session_id)
        shutil.rmtree(self.folder)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if self.session_id not in RUNNING:
            raise ConnectionError("no such sandbox")
        assert (user, env) == ("root", None)
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", command),
            cwd=cwd or self.folder,
            env={"PATH": "/usr/bin:/bin", **self._persistent_env},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        code = process.returncode or 0
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=128 - code if code < 0 else code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None: ...

    async def download_file(self, source_path: str, target_path: Path | str) -> None: ...

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None: ...


async def refusal(provider: SandboxProvider, **fields: Any) -> str:
    try:
        await provider.open(SandboxSpec(**dict[str, Any](image="debian", network=True) | fields))
    except (SandboxRefused, SandboxLost) as error:
        return f"{type(error).__name__}: {error}"
    return "made"


async def played() -> dict[str, Any]:
    provider = open_provider("harbor", {"import_path": BACKEND})
    sandbox = await provider.open(SandboxSpec(image="debian", network=True, cpus=1.5, environment={"OF_TASK": "x"}))
    folder = tempfile.mkdtemp()
    found: dict[str, Any] = {"asked": ASKED[-1]}
    done = await sandbox.exec(
        ["sh", "-c", "cat; echo $OF_TASK$OF_CALL; pwd; echo err >&2; exit 3"],
        stdin=b"given ",
        environment={"OF_CALL": "y z"},
        cwd=folder,
    )
    found["done"] = [done.exit_code, done.stdout.replace(folder, "FOLDER"), done.stderr]
    content = bytes(range(256)) * 5000
    await sandbox.write_files({f"{folder}/deep/a": SandboxFile(content)})
    found["read"] = await sandbox.read_file(f"{folder}/deep/a") == content
    found["missing"] = await sandbox.read_file(f"{folder}/b") is None
    try:
        await sandbox.exec(["sleep", "60"], timeout_s=0.5)
    except TimeoutError:
        found["timed_out"] = True
    found["reach"] = await sandbox.reach("https://service")
    OnThisMachine.broken = True
    await sandbox.close()
    found["left"] = sorted(RUNNING)
    await sandbox.close()
    try:
        await sandbox.exec(["true"])
    except SandboxLost as error:
        found["lost"] = str(error)
    found["refused"] = {
        "folders": await refusal(provider, read_only_folders=("/opt",)),
        "memory_mb": await refusal(provider, memory_mb=100),
        "storage_mb": await refusal(provider, storage_mb=100),
        "network": await refusal(provider, network=False),
        "no Dockerfile": await refusal(provider, image=None, folder=Path(folder)),
        "slow": await refusal(provider, image="slow", build_timeout_s=0.2),
    }
    shutil.rmtree(folder)
    return found


def unusable(**options: Any) -> str:
    try:
        open_provider("harbor", options)
    except ProviderUnusable as error:
        return str(error)
    return "opened"


def main(results: str) -> None:
    # Harbor imports the backend by its path.
    sys.modules[Path(__file__).stem] = sys.modules["__main__"]
    logging.disable()
    found = asyncio.run(played())
    found["unusable"] = {name: unusable(type=name) for name in ("e2b", "daytona", "modal", "prime", "nowhere")}
    found["unusable"]["none"] = unusable()
    Path(results).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
