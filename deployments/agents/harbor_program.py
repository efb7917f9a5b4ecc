"""An agent that plays tasks in Harbor's format: a sandbox for each run, the agent in it, then the task's verifier.

    create -> run -> judge -> destroy

Guarantees: every sandbox that was created is destroyed, however the run ends; a sandbox that is lost is a failure that
can be retried, and never a reward. As in Harbor, an agent that fails by itself or reaches the time of its task is
judged by what it has left.
"""

import asyncio
import base64
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from deployments.agents.command_program import run_in_sandbox, sandbox_failures
from deployments.agents.programs import AgentCall, AgentProgram, CallableProgram, RunNotes
from deployments.agents.settings import COMMANDS_AT_ONCE, LONGEST_RUN_S, AgentSettings
from deployments.failures import AgentFailed, EnvironmentRejected, RolloutFailure, VerifierFailed
from deployments.harbor.tasks import TIMES, HarborInfo, HarborSettings, HarborTask, HarborTasks, tasks_within
from deployments.harbor.verifier import NotJudged, judge, prepare
from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    OutOfMemory,
    RunningSandbox,
    SandboxFile,
    SandboxSpec,
    files_below,
    open_provider,
    tar_of,
)
from deployments.sandbox.providers.leftover import ProcessesLeft
from rollout_client.contract.rollouts import SampleInput
from rollout_env import ChatMessage, Reference, SampleRejected, StepOutcome, TemporaryFailure

FOLDER = "/run/rollout"
INSTRUCTION_FILE = f"{FOLDER}/instruction.md"
MAIN_REWARD = "reward"
"""The reward of a verifier that gives several numbers; the others are metrics."""

_SOLVE = "mkdir -p /solution && echo {} | base64 -d | tar -x -C / && bash /solution/solve.sh"
_PYTHON = "python3 - <<'END_OF_PROGRAM'\n{}\nEND_OF_PROGRAM\n"
_LEAST_HIDDEN = 6
"""Bytes below which a content is too common to be recognized."""
_SHOWN = 4000
_written: ContextVar[list[str]] = ContextVar("written")


class HarborProgram(AgentProgram):
    def __init__(self, settings: AgentSettings, harbor: HarborSettings) -> None:
        """Raises `HarborTaskRefused`, `ProviderUnusable` or `AgentNotLoadable`."""
        self._tasks = tasks_within(harbor, settings.timeout_s)
        self._command = settings.command
        self._function = None if settings.import_path is None else CallableProgram(settings.import_path, ["sandbox"])
        self._timeout_s = settings.timeout_s
        self._places = asyncio.Semaphore(settings.places or COMMANDS_AT_ONCE)
        self._provider = open_provider(harbor.sandbox.provider, harbor.sandbox.options)

    async def run(self, call: AgentCall, said: RunNotes) -> dict[str, float]:
        task = self._task_of(call)
        with sandbox_failures(f"The task {task.name}", said):
            with _timed(said, "create"):
                sandbox = await self._provider.open(self.spec_of(task))
            try:
                with _judgment_of(task):
                    first = await prepare(sandbox)
                    async with said.place_of(self._places):
                        return await self._played(call, task, sandbox, said, first)
            finally:
                with _timed(said, "destroy"):
                    await sandbox.close()

    def close(self) -> None:
        """Ends all sandboxes."""
        self._provider.close()

    def _task_of(self, call: AgentCall) -> HarborTask:
        info: Any = call.sample.get("extra_env_info") or {}
        name = info.get("task")
        if (task := self._tasks.get(name)) is None:
            raise EnvironmentRejected(
                f"extra_env_info.task must name one of the {len(self._tasks)} tasks, got {name!r}."
            )
        return task

    def spec_of(self, task: HarborTask) -> SandboxSpec:
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
            # It may wait for a place as long as another run takes.
            lifetime_s=2 * self._timeout_s,
        )

    async def _played(
        self, call: AgentCall, task: HarborTask, sandbox: RunningSandbox, said: RunNotes, first: Set[str]
    ) -> dict[str, float]:
        with _timed(said, "run"):
            await self._agent(call, task, sandbox, said)
        with _timed(said, "judge"):
            rewards, ended = await judge(sandbox, task, first)
        if ended:
            said.metrics["agent_processes_ended"] = float(ended)
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
def _judgment_of(task: HarborTask) -> Iterator[None]:
    """Raises `VerifierFailed` for what keeps the task from being judged."""
    try:
        yield
    except (NotJudged, ProcessesLeft) as error:
        raise VerifierFailed(f"The task {task.name} was not judged. {error}") from error


@contextmanager
def _timed(said: RunNotes, step: str) -> Iterator[None]:
    """Adds the seconds of the block, a step of `TIMES`, to the metrics of the run, however it ends."""
    begun_at = time.monotonic()
    try:
        yield
    finally:
        said.metrics[TIMES[step]] = time.monotonic() - begun_at


async def _run_script(base_url: str, api_key: str, sample: SampleInput, sandbox: RunningSandbox) -> None:  # noqa: ARG001
    """The agent: runs the script of the sample."""
    script = str((sample.extra_env_info or {})["script"])
    done = await sandbox.exec(["bash", "-s"], stdin=script.encode(errors="replace"))
    _written.get().append(f"{done.stdout[-_SHOWN:]}\n{done.stderr[-_SHOWN:]}")


class ScriptedHarbor(HarborTasks):
    """One turn: the reply runs, and the verifier of the task scores the sandbox."""

    description = "Tasks in Harbor's format whose agent is a shell script."

    def __init__(self, settings: dict[str, Any]) -> None:
        """Raises `HarborTaskRefused` or `ProviderUnusable`."""
        super().__init__(settings)
        function = f"{__name__}:{_run_script.__name__}"
        agent = AgentSettings(import_path=function, harbor=self.harbor, timeout_s=LONGEST_RUN_S)
        self._program = HarborProgram(agent, self.harbor)

    async def step(  # type: ignore[override]
        self, message_log: list[ChatMessage], extra_env_info: HarborInfo
    ) -> StepOutcome:
        """Runs the script. Raises `SampleRejected` where nothing was judged, or `TemporaryFailure`."""
        written: list[str] = []
        _written.set(written)
        prompt = [{"role": "user", "content": message_log[0]["content"]}]
        info = {"task": extra_env_info.task, "script": message_log[-1]["content"]}
        sample: dict[str, Any] = {"task_name": extra_env_info.task, "messages": prompt, "extra_env_info": info}
        notes = RunNotes()
        try:
            reward = await self._program.run(AgentCall(base_url="http://127.0.0.1", api_key="", sample=sample), notes)
        except RolloutFailure as error:
            failure = TemporaryFailure if error.retryable else SampleRejected
            raise failure(f"{error} {' '.join(written)}".strip()) from error
        shown: ChatMessage = {"role": "user", "content": "\n".join(written)}
        return StepOutcome(shown, reward, terminated=True, metrics=notes.metrics)

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        """The task's `solution/`. Its sandbox must show neither that nor `tests/` nor the verifier's variables."""
        task = self.tasks[sample["extra_env_info"]["task"]]
        solution = files_below(task.folder / "solution", "/solution")
        hidden = {path: file.content for path, file in {**solution, **files_below(task.tests, "/tests")}.items()}
        hidden |= {f"the verifier's {name}": value.encode() for name, value in task.config.verifier.env.items()}
        script = _SOLVE.format(base64.b64encode(tar_of(solution)).decode())
        return Reference(
            replies=[script] if "/solution/solve.sh" in solution else None,
            program=_PYTHON.format,
            reaches=self._program.spec_of(task).network,
            hidden={name: content for name, content in hidden.items() if len(content.strip()) >= _LEAST_HIDDEN},
        )

    def close(self) -> None:
        """Ends all sandboxes."""
        self._program.close()
