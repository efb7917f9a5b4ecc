"""Sandboxes of Harbor's environment backends, such as those of E2B, Daytona, Modal and Prime Intellect: `harbor`.

The extra `harbor` installs the package, which needs Python 3.12 or newer; a backend needs its SDK and its key as in
Harbor itself (`pip install "harbor[e2b]"`, `E2B_API_KEY`). Harbor lists no sandboxes, so there is no reaper here: those
of a process that dies end by the time limit that the vendor or the backend's own options set.
"""

import asyncio
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from harbor.environments.base import BaseEnvironment, SandboxBuildFailedError
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    ExecResult,
    ProviderUnusable,
    RunningSandbox,
    SandboxFile,
    SandboxRefused,
    SandboxSpec,
    tar_of,
)
from deployments.sandbox.providers.shell import (
    CALLS_OF_OURS_S,
    RemoteProvider,
    RemoteSandbox,
)

LONGEST_COMMAND_S = 86_400
BOUNDS_FILES = ("daytona", "prime")
"""Backends that make a disk of `storage_mb`; Harbor has no flag that says so."""
REFUSALS = (ValueError, FileNotFoundError, ImportError, SandboxBuildFailedError)
"""Errors by which a backend refuses what it is asked to make: another try would fail alike."""


class _HarborProvider(RemoteProvider):
    name = "harbor"
    has_network = True

    def __init__(self, type: str | None = None, import_path: str | None = None, **options: Any) -> None:
        """Loads the backend and checks its options and key, without a connection.

        Args:
            type: Harbor's name of a backend, such as `e2b`, `daytona`, `modal` or `prime`.
            import_path: `module:Class` of another one.
            options: the backend's own, as `harbor run --ek` takes them.

        Raises:
            ProviderUnusable: there is no such backend, its SDK or its key is missing, or an option is wrong.
        """
        self._backend_options = options
        try:
            known = None if type is None else EnvironmentType(type)
            self._backend = EnvironmentFactory.get_environment_class(known, import_path)
            self._backend.preflight(kwargs=options)
        except (ImportError, ValueError, TypeError, SystemExit) as error:
            raise ProviderUnusable(f"the backend {type or import_path} of harbor cannot be used: {error}") from error
        self._label = type or str(import_path)
        self._running: dict[str, _HarborSandbox] = {}

    async def open(self, spec: SandboxSpec) -> RunningSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_folders(self.name)
        self._refuse_unenforced(spec)
        name = f"rollout-{uuid4().hex}"
        paths = TrialPaths(Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=f"{name}-")))
        try:
            # A backend refuses at once what it does not support.
            with _translated(self._label, refused=(*REFUSALS, RuntimeError)):
                environment = self._environment(name, spec, paths)
        except SandboxRefused:
            shutil.rmtree(paths.trial_dir, ignore_errors=True)
            raise
        sandbox = self._running[name] = _HarborSandbox(self, name, spec, environment)
        try:
            with _translated(self._label, refused=REFUSALS):
                async with asyncio.timeout(spec.build_timeout_s):
                    await environment.start(force_build=False)
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, TimeoutError):
                limit = f"{spec.build_timeout_s:g} s"
                raise SandboxLost(f"{self._label} did not start a sandbox within {limit}.") from error
            raise
        return sandbox

    def _environment(self, name: str, spec: SandboxSpec, paths: TrialPaths) -> BaseEnvironment:
        can = self._backend.resource_capabilities()
        config = EnvironmentConfig(
            build_timeout_sec=spec.build_timeout_s,
            docker_image=spec.image,
            cpus=spec.cpus if spec.cpus is None or (can and can.fractional_cpus) else math.ceil(spec.cpus),
            memory_mb=spec.memory_mb,
            storage_mb=spec.storage_mb,
            workdir=spec.workdir,
        )
        mode = NetworkMode.PUBLIC if spec.network else NetworkMode.NO_NETWORK
        return self._backend(
            environment_dir=spec.folder or paths.trial_dir / "environment",
            environment_name=name,
            session_id=name,
            trial_paths=paths,
            task_env_config=config,
            persistent_env=dict(spec.environment),
            network_policy=NetworkPolicy(network_mode=mode),
            **self._backend_options,
        )

    def _refuse_unenforced(self, spec: SandboxSpec) -> None:
        """Raises `SandboxRefused` for a limit that the backend does not say it enforces."""
        can = self._backend.resource_capabilities()
        enforced = {
            "cpus": can is not None and (can.cpu_limit or can.cpu_request),
            "memory_mb": can is not None and (can.memory_limit or can.memory_request),
            "storage_mb": self._label in BOUNDS_FILES,
        }
        for limit, is_enforced in enforced.items():
            if not is_enforced:
                spec.refuse_limits(f"the backend {self._label} of harbor does not bound it", limit)

    async def remove(self, sandbox_id: str) -> None:
        """See `RemoteProvider.remove`."""
        if (sandbox := self._running.get(sandbox_id)) is not None:
            with _translated(self._label):
                await sandbox.environment.stop(delete=True)
            self._running.pop(sandbox_id, None)
            await asyncio.to_thread(shutil.rmtree, sandbox.environment.trial_paths.trial_dir, ignore_errors=True)

    def close(self) -> None:
        """Does nothing: Harbor's backends are asynchronous, and destroy a sandbox when it is closed."""


class _HarborSandbox(RemoteSandbox):
    """One environment of a backend."""

    def __init__(self, provider: _HarborProvider, name: str, spec: SandboxSpec, environment: BaseEnvironment) -> None:
        super().__init__(provider, name, spec)
        self.environment = environment
        self._backend = environment.type()

    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:
        """See `ShellSandbox.run_shell`."""
        limit = LONGEST_COMMAND_S if timeout_s is None else math.ceil(timeout_s) + 1
        with _translated(self._backend):
            done = await self.environment.exec(line, timeout_sec=limit, user="root")
        return ExecResult(done.return_code, done.stdout or "", done.stderr or "")

    async def write_files(self, files: Mapping[str, SandboxFile]) -> None:
        """See `RunningSandbox.write_files`."""
        archive = f"/tmp/{uuid4().hex}.tar"
        with tempfile.NamedTemporaryFile() as file:
            content = await asyncio.to_thread(tar_of, files)
            await asyncio.to_thread(Path(file.name).write_bytes, content)
            with _translated(self._backend):
                await self.environment.upload_file(file.name, archive)
        line = f"tar --no-same-owner -xf {archive} -C / && rm {archive}"
        self.refuse_unwritten(await self.run_shell(line, CALLS_OF_OURS_S))


@contextmanager
def _translated(backend: str, refused: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raises errors of the backend's SDK, which are of any type, as those of the interface."""
    try:
        yield
    except (SandboxLost, SandboxRefused, TimeoutError):
        raise
    except refused as error:
        raise SandboxRefused(f"{backend} refuses the sandbox: {error}") from error
    except Exception as error:
        raise SandboxLost(f"{backend}: {type(error).__name__}: {error}") from error
