"""A sandbox that runs nothing: its outcomes are written down."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.sandbox import Limits, Outcome, Program, Sandbox, SandboxLost
from deployments.tasks.code import SandboxSettings


def printed(stdout: str, exit_code: int = 0, stderr: str = "") -> Outcome:
    return Outcome("exit", exit_code, stdout, stderr, 0.1)


@dataclass
class ScriptedSandbox(Sandbox):
    outcomes: list[Outcome | SandboxLost]
    runs: list[tuple[Program, dict[str, bytes], Limits]] = field(default_factory=list)
    is_closed: bool = False

    async def run(self, program: Program, files: Mapping[str, bytes], limits: Limits) -> Outcome:
        self.runs.append((program, dict(files), limits))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, SandboxLost):
            raise outcome
        return outcome

    def close(self) -> None:
        self.is_closed = True


def scripted(sandbox: ScriptedSandbox, **settings: Any) -> SandboxSettings:
    """Settings that start this sandbox."""

    class ScriptedSettings(SandboxSettings):
        def start(self) -> Sandbox:
            return sandbox

    return ScriptedSettings(**settings)
