"""Sandboxes that are pods of Kubernetes, by `kubectl`, which has the cluster and the rights: `kubernetes`.

A template (a pod's manifest in YAML or JSON) says what all pods have; the image, the variables, the limits and the
label are added. A cluster builds no folders. A node enforces the pods' network policy: without one they have a network.
"""

import asyncio
import copy
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.launch import held_file
from deployments.sandbox.providers.interface import (
    DEFAULT_MEMORY_MB,
    LARGEST_FILE_BYTES,
    LARGEST_OUTPUT_BYTES,
    OWNER_LABEL,
    ExecResult,
    RunningSandbox,
    SandboxFile,
    SandboxRefused,
    SandboxSpec,
    tar_of,
)
from deployments.sandbox.providers.leftover import FIRST
from deployments.sandbox.providers.shell import (
    CALLS_OF_OURS_S,
    ReapedProvider,
    RemoteSandbox,
)
from deployments.sandbox.supervisor import PipeOutput, ended, start_process

_CONTAINER = "sandbox"
_ANSWERS_WITHIN_S = 60.0
_NO_SUCH_POD = "NotFound"
_BAD_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")
_POLL_S = 1.0


class KubernetesProvider(ReapedProvider):
    name = "kubernetes"
    has_network = True

    def __init__(self, namespace: str = "default", template: str | None = None, kubectl: str = "kubectl") -> None:
        """Opens no connection yet.

        Args:
            namespace: of the pods.
            template: path of a pod's manifest.
            kubectl: the program.
        """
        super().__init__({"namespace": namespace, "template": template, "kubectl": kubectl})
        self._kubectl = [kubectl, "--namespace", namespace]
        self._template: dict[str, Any] = {}
        if template is not None:
            self._template = yaml.safe_load(Path(template).read_text(encoding="utf-8")) or {}

    async def call(
        self,
        *arguments: str,
        stdin: bytes = b"",
        limit_s: float | None = _ANSWERS_WITHIN_S,
        most_bytes: int = LARGEST_FILE_BYTES,
    ) -> ExecResult:
        """Runs `kubectl`, whose last `most_bytes` of each output are kept. Cancelling the call ends it.

        Raises:
            SandboxLost: it was not started, or does not answer in time.
        """
        with ExitStack() as closing:
            stdout, stderr = (closing.enter_context(PipeOutput(most_bytes)) for _ in range(2))
            files = {"stdin": held_file(closing, stdin), "stdout": stdout.fd, "stderr": stderr.fd}
            process = start_process([*self._kubectl, *arguments], **files)
            try:
                async with asyncio.timeout(limit_s):
                    code = await ended(process)
            except BaseException as error:
                process.kill()
                process.wait()
                if isinstance(error, TimeoutError):
                    raise SandboxLost(f"kubectl did not answer within {limit_s:g} s.") from error
                raise
        return ExecResult(code, stdout.text(), stderr.text())

    async def _checked(self, *arguments: str, stdin: bytes = b"") -> str:
        """The output of `kubectl`. Raises `SandboxLost` if it fails."""
        done = await self.call(*arguments, stdin=stdin)
        if done.exit_code != 0:
            raise SandboxLost(f"kubectl {arguments[0]} failed: {done.stderr.strip()[-500:]}")
        return done.stdout

    async def open(self, spec: SandboxSpec) -> RunningSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_folders(self.name)
        if spec.image is None:
            raise SandboxRefused(
                "The provider kubernetes builds no folders: push the image, and name it in docker_image."
            )
        if not spec.network:
            raise SandboxRefused(
                "network_mode is no-network, and the provider kubernetes cannot take the network from one pod: use "
                "another provider."
            )
        self.start_reaper()
        name = f"rollout-{uuid4().hex[:20]}"
        sandbox = _KubernetesSandbox(self, name, spec)
        try:
            await self._checked("create", "-f", "-", stdin=json.dumps(self._manifest(name, spec)).encode())
            await self._ready(name, spec)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _manifest(self, name: str, spec: SandboxSpec) -> dict[str, Any]:
        manifest = copy.deepcopy(self._template)
        pod = manifest.setdefault("spec", {})
        container = pod.setdefault("containers", [{}])[0]
        asked = {
            "cpu": None if spec.cpus is None else str(spec.cpus),
            "memory": None if spec.memory_mb is None else f"{spec.memory_mb}Mi",
            "ephemeral-storage": None if spec.storage_mb is None else f"{spec.storage_mb}Mi",
        }
        resources = container.setdefault("resources", {})
        for kind in ("requests", "limits"):
            given = {key: value for key, value in asked.items() if value is not None}
            resources[kind] = {**resources.get(kind, {}), **given}
        resources["limits"].setdefault("memory", resources["requests"].get("memory", f"{DEFAULT_MEMORY_MB}Mi"))
        variables = [{"name": key, "value": value} for key, value in spec.environment.items()]
        container |= {"name": _CONTAINER, "image": spec.image, "command": ["/bin/sh", "-c", FIRST]}
        container["env"] = [*container.get("env", []), *variables]
        pod |= {"restartPolicy": "Never", "activeDeadlineSeconds": round(spec.lifetime_s)}
        pod.setdefault("automountServiceAccountToken", False)
        pod.setdefault("terminationGracePeriodSeconds", 0)
        metadata = manifest.setdefault("metadata", {})
        metadata["name"] = name
        metadata.setdefault("labels", {})[OWNER_LABEL] = self.owner
        return {**manifest, "apiVersion": "v1", "kind": "Pod"}

    async def _ready(self, name: str, spec: SandboxSpec) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + spec.build_timeout_s
        while True:
            status = json.loads(await self._checked("get", "pod", name, "-o", "json")).get("status", {})
            containers = status.get("containerStatuses", [])
            waiting = [container.get("state", {}).get("waiting", {}).get("reason") for container in containers]
            if any(reason in _BAD_IMAGE for reason in waiting):
                raise SandboxRefused(f"The image {spec.image} cannot be had: {waiting[0]}.")
            if status.get("phase") == "Running" and all(container.get("ready") for container in containers):
                return
            if status.get("phase") in ("Failed", "Succeeded") or loop.time() > deadline:
                raise SandboxLost(f"The pod {name} did not start: its phase is {status.get('phase')}.")
            await asyncio.sleep(_POLL_S)

    async def ids_of(self, owner: str) -> list[str]:
        """See `ReapedProvider.ids_of`."""
        pods = json.loads(await self._checked("get", "pods", "-l", f"{OWNER_LABEL}={owner}", "-o", "json"))["items"]
        return [pod["metadata"]["name"] for pod in pods]

    async def remove(self, sandbox_id: str) -> None:
        """See `RemoteProvider.remove`."""
        await self._checked("delete", "pod", sandbox_id, "--ignore-not-found", "--now", "--wait=true")


class _KubernetesSandbox(RemoteSandbox):
    _provider: KubernetesProvider

    async def run_shell(self, line: str, timeout_s: float | None, stdin: bytes = b"") -> ExecResult:  # noqa: ARG002
        """See `ShellSandbox.run_shell`. `kubectl` exits with the code of the command, and with 1 if it fails itself."""
        argv = ["exec", "-i", self.id, "-c", _CONTAINER, "--", "sh", "-c", line]
        done = await self._provider.call(*argv, stdin=stdin, limit_s=None, most_bytes=LARGEST_OUTPUT_BYTES)
        if (done.exit_code != 0 and "Error from server" in done.stderr) or done.exit_code == 137:
            state = await self._provider.call("get", "pod", self.id, "-o", "jsonpath={.status.phase}")
            if state.stdout != "Running":
                raise SandboxLost(f"The pod has ended: {state.stdout or _NO_SUCH_POD}.")
            if "Error from server" in done.stderr:
                raise SandboxLost(f"kubectl exec failed: {done.stderr.strip()[-500:]}")
        return done

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        """See `RunningSandbox.write_files`."""
        archive = await asyncio.to_thread(tar_of, files)
        self.refuse_unwritten(await self.run_shell("tar --no-same-owner -xf - -C /", CALLS_OF_OURS_S, archive))
