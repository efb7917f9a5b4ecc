"""An agent that plays tasks in Harbor's format: a sandbox for each run, the agent in it, then the task's verifier.

    create -> run -> judge -> destroy

Guarantees: every sandbox that was created is destroyed, however the run ends; a sandbox that is lost is a failure that
can be retried, and never a reward. As in Harbor, an agent that fails by itself or reaches the time of its task is
judged by what it has left.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deployments.agents.command_program import run_in_sandbox, sandbox_failures
from deployments.agents.programs import AgentCall, AgentProgram, CallableProgram, RunNotes
from deployments.agents.settings import AgentSettings
from deployments.failures import AgentFailed, EnvironmentRejected, VerifierFailed
from deployments.harbor.tasks import TIMES, HarborSettings, HarborTask, tasks_within
from deployments.harbor.verifier import NotJudged, judge, prepare
from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    OutOfMemory,
    RunningSandbox,
    SandboxFile,
    SandboxSpec,
    open_provider,
)
from deployments.sandbox.providers.leftover import ProcessesLeft

FOLDER = "/run/rollout"
INSTRUCTION_FILE = f"{FOLDER}/instruction.md"
MAIN_REWARD = "reward"
"""The reward of a verifier that gives several numbers; the others are metrics."""


class HarborProgram(AgentProgram):
    def __init__(self, settings: AgentSettings, harbor: HarborSettings) -> None:
        """Raises `HarborTaskRefused`, `ProviderUnusable` or `AgentNotLoadable`."""
        self._tasks = tasks_within(harbor, settings.timeout_s)
        self._command = settings.command
        self._function = None if settings.import_path is None else CallableProgram(settings.import_path, ["sandbox"])
        self._timeout_s = settings.timeout_s
        self._provider = open_provider(harbor.sandbox.provider, harbor.sandbox.options)

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        task = self._task_of(call)
        with sandbox_failures(f"The task {task.name}", said):
            with _timed(said, "create"):
                sandbox = await self._provider.open(self._spec_of(task))
            try:
                return await self._played(call, task, sandbox, said)
            finally:
                with _timed(said, "destroy"):
                    await sandbox.close()

    def _task_of(self, call: AgentCall) -> HarborTask:
        info: Any = call.sample.get("extra_env_info") or {}
        name = info.get("task")
        if (task := self._tasks.get(name)) is None:
            raise EnvironmentRejected(
                f"extra_env_info.task must name one of the {len(self._tasks)} tasks, got {name!r}."
            )
        return task

    def _spec_of(self, task: HarborTask) -> SandboxSpec:
        environment = task.config.environment
        return SandboxSpec(
            image=environment.docker_image,
            folder=task.build_folder,
            environment=environment.env,
            workdir=environment.workdir,
            cpus=environment.cpus,
            memory_mb=environment.memory_mb,
            storage_mb=environment.storage_mb,
            network=environment.wants_network and self._provider.has_network,
            read_only_folders=tuple(self._command.folders) if self._command is not None else (),
            build_timeout_s=environment.build_timeout_sec,
            lifetime_s=self._timeout_s,
        )

    async def _played(
        self, call: AgentCall, task: HarborTask, sandbox: RunningSandbox, said: RunNotes
    ) -> dict[str, float]:
        try:
            first = await prepare(sandbox)
            with _timed(said, "run"):
                await self._agent(call, task, sandbox, said)
            with _timed(said, "judge"):
                rewards, ended = await judge(sandbox, task, first)
            if ended:
                said.metrics["agent_processes_ended"] = float(ended)
        except (NotJudged, ProcessesLeft) as error:
            raise VerifierFailed(f"The task {task.name} was not judged. {error}") from error
        if MAIN_REWARD not in rewards:
            return rewards
        said.metrics |= {f"verifier_{name}": value for name, value in rewards.items() if name != MAIN_REWARD}
        return {MAIN_REWARD: rewards[MAIN_REWARD]}

    async def _agent(self, call: AgentCall, task: HarborTask, sandbox: RunningSandbox, said: RunNotes) -> None:
        """Lets the agent work. Raises what makes the run worth nothing: the sandbox is lost, or nothing was tried."""
        timeout_s = task.config.agent.timeout_sec
        try:
            async with asyncio.timeout(timeout_s):
                if self._function is not None:
                    await self._function.play(call, sandbox)
                else:
                    assert self._command is not None
                    instruction = {INSTRUCTION_FILE: SandboxFile(task.instruction.encode())}
                    await sandbox.write_files(instruction)
                    variables = {"ROLLOUT_INSTRUCTION_FILE": INSTRUCTION_FILE}
                    await run_in_sandbox(self._command, call, sandbox, FOLDER, said, variables)
        except TimeoutError:
            said.metrics["agent_timed_out"] = 1.0
        except AgentFailed as error:
            if isinstance(error.__cause__, SandboxLost | OutOfMemory):
                raise error.__cause__ from error
            said.sentence = str(error)
            said.metrics["agent_failed"] = 1.0


@contextmanager
def _timed(said: RunNotes, step: str) -> Iterator[None]:
    """Adds the seconds of the block, a step of `TIMES`, to the metrics of the run, however it ends."""
    begun_at = time.monotonic()
    try:
        yield
    finally:
        said.metrics[TIMES[step]] = time.monotonic() - begun_at
