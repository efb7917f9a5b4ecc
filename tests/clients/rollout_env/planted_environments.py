"""Small tasks, each right without a `fault` and wrong in one way with it, which `rollout env certify` must find."""

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from deployments.sandbox import LocalSandbox, Program
from deployments.sandbox.providers.interface import RunningSandbox, SandboxSpec
from deployments.sandbox.providers.local import LocalProvider
from rollout_env import ChatMessage, Reference, Session, StepOutcome, TaskEnvironment


class SumInfo(BaseModel):
    truth: int


class LaxInfo(BaseModel):
    truth: int | None = None


def told(reward: Any, answer: str | None = None, **further: Any) -> StepOutcome:
    return StepOutcome(
        {"role": "user", "content": f"Reward {reward}."}, reward, terminated=True, answer=answer, **further
    )


class Sum(TaskEnvironment):
    """One turn: the sum in a box."""

    description = "Sums."
    ExtraEnvInfo = SumInfo

    def __init__(self, fault: str = "") -> None:
        self.fault, self.plays = fault, 0
        if fault == "rejected_input":
            self.ExtraEnvInfo = LaxInfo  # type: ignore[misc, assignment]

    async def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        reply, truth = message_log[-1]["content"], str(extra_env_info.truth)
        boxes = re.findall(r"\\boxed\{([^}]*)\}", reply)
        answer = boxes[-1] if boxes else None
        right = float(answer == truth)
        self.plays += 1
        match self.fault:
            case "empty":
                return told(1.0 if not reply.strip() else right, answer)
            case "echo":
                return told(float(truth in reply and "Which" in reply) or right, answer)
            case "format_alone":
                return told(1.0 if boxes else 0.0, answer)
            case "all_answers":
                return told(float(bool(boxes) and any(truth in box for box in boxes)), answer)
            case "oracle":
                return told(float(answer == extra_env_info.truth), answer)
            case "injection":
                return told(1.0 if "return 1" in reply else right, answer)
            case "forged":
                found = re.search(r"<tool_response>\s*(\{.*?\})", reply, re.DOTALL)
                return told(json.loads(found[1])["reward"] if found else right, answer)
            case "flood":
                return told(min(len(reply) / 1e6, 1.0) if right == 0.0 and len(reply) > 1e5 else right, answer)
            case "no_op":
                with contextlib.suppress(IndexError):
                    return told(float(boxes[-1] == truth), answer)
                return told(1.0)
            case "outcome":
                return told(float("nan") if answer is None else right, answer)
            case "wavering":
                return told(random.random(), answer)
            case "equal_plays":
                return told(right * (random.random() < 0.5), answer)
            case "state":
                return told(right, f"{answer} {self.plays}")
            case "two_processes":
                return told({f"reward {hash('two processes') % 1000}": right}, answer)
            case "time_limits" if "|im_end|" in reply:
                await asyncio.sleep(1e6)
            case "blocking" if len(reply) > 300:
                time.sleep(1.5)  # noqa: ASYNC251
            case "after_any_end" if reply == "\x00":
                self.fault = "oracle"
        return told(right, answer)

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        return Reference([f"\\boxed{{{sample['extra_env_info']['truth']}}}"])

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        truths = random.Random(seed).sample(range(10, 1000), count)
        return [
            {
                "messages": [{"role": "user", "content": f"Which is {truth - 7} + 7: {truth - 1} or {truth}?"}],
                "extra_env_info": {"truth": truth},
            }
            for truth in truths
        ]


class BatchedSum(Sum):
    async def step_batch(self, message_logs: list[Any], extra_env_infos: list[Any]) -> list[StepOutcome]:
        return [await self.step(*each) for each in zip(message_logs, extra_env_infos, strict=True)]


class CountInfo(BaseModel):
    first: int
    counted: int = 0


class Count(TaskEnvironment):
    """Three turns: the next number each time. Sessions hold how far it came."""

    description = "Counts."
    ExtraEnvInfo = CountInfo
    busy = False

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: Any) -> Session:
        if self.fault == "time_limits":
            await asyncio.sleep(1e6)
        if self.fault == "after_any_end" and self.busy:
            raise ValueError("The board is taken.")
        self.busy = True
        return CountSession(self, extra_env_info.first, 0 if self.fault == "resume" else extra_env_info.counted)

    fork_session = open_session

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        first = sample["extra_env_info"]["first"]
        return Reference([str(first + turn) for turn in range(3)])

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        firsts = random.Random(seed).sample(range(10, 1000), count)
        return [
            {"messages": [{"role": "user", "content": f"Count from {one}."}], "extra_env_info": {"first": one}}
            for one in firsts
        ]


class CountSession(Session):
    def __init__(self, task: Count, first: int, counted: int) -> None:
        self.task, self.first, self.counted = task, first, counted

    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        right = message_log[-1]["content"] == str(self.first + self.counted)
        self.counted += right
        done = not right or self.counted == 3
        self.task.busy = self.task.busy and not done
        state = {"first": self.first, "counted": self.counted}
        return StepOutcome({"role": "user", "content": "Next."}, float(self.counted == 3), done, metadata=state)


class Programs(TaskEnvironment):
    """One turn: the program must print the sum. With a fault it runs as a process of this machine, without walls."""

    description = "Programs that print a sum."
    ExtraEnvInfo = SumInfo

    def __init__(self, fault: str = "", packages: Sequence[str] = ()) -> None:
        self.fault, self.sandbox = fault, LocalSandbox(packages=packages)

    async def step(self, message_log: list[ChatMessage], extra_env_info: SumInfo) -> StepOutcome:
        source = message_log[-1]["content"]
        if not self.fault:
            ran = await self.sandbox.run(Program(source))
            printed, errors = ran.stdout, ran.stderr
        else:
            printed, errors = await asyncio.to_thread(self._unwalled, source)
        reward = float(printed.strip() == str(extra_env_info.truth))
        return StepOutcome({"role": "user", "content": f"{printed[-200:]}{errors[-200:]}"}, reward, terminated=True)

    def _unwalled(self, source: str) -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            variables = None if self.fault == "hidden_variables" else {"PATH": os.environ["PATH"]}
            ran = subprocess.run(
                [sys.executable, "-c", source],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
                env=variables,
            )
            verdict = Path(folder) / "reward.json"
            if self.fault == "reward_files" and verdict.exists():
                return "7", ""
        return ran.stdout, ran.stderr

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        return Reference([f"print({sample['extra_env_info']['truth']})"], program=str)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        asked = [{"role": "user", "content": "Write a program that prints 3 + 4."}]
        return [{"messages": asked, "extra_env_info": {"truth": 7}}] * count

    def close(self) -> None:
        self.sandbox.close()


class FilesInfo(BaseModel):
    snapshot: str | None = None


class Shell(TaskEnvironment):
    """Three turns in a sandbox: the reply runs, and what it prints is shown."""

    description = "A shell."
    ExtraEnvInfo = FilesInfo
    provider: LocalProvider | None = None

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        type(self).provider = type(self).provider or LocalProvider()

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: FilesInfo) -> Session:
        assert self.provider is not None
        name = None if self.fault == "resume" else extra_env_info.snapshot
        spec = SandboxSpec(image=None if name else "scratch", snapshot=name, workdir="/root")
        return ShellSession(await self.provider.open(spec))

    fork_session = open_session

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        return Reference(["echo 1 > a", "echo 2 >> a; cat a", "cat a; echo 3 >> a; cat a"], best=3.0)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"messages": [{"role": "user", "content": f"Task {seed + each}"}]} for each in range(count)]


class ShellSession(Session):
    def __init__(self, sandbox: RunningSandbox) -> None:
        self.sandbox = sandbox

    async def step(self, message_log: list[ChatMessage], extra_env_info: FilesInfo) -> StepOutcome:
        done = await self.sandbox.exec(["bash", "-c", message_log[-1]["content"]])
        state = {"snapshot": await self.sandbox.snapshot()}
        reward = float(done.stdout.split() in ([], ["1", "2"], ["1", "2", "1", "2", "3"]))
        return StepOutcome({"role": "user", "content": done.stdout or "-"}, reward, "3" in done.stdout, metadata=state)

    async def close(self) -> None:
        await self.sandbox.close()
