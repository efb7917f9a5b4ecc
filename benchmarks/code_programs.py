"""How many small programs the task `code` judges in a second: `make bench-code`.

One environment, as a replica has it, steps its own example samples with right replies, as many at once as it takes.
Each step runs one program that defines a function and calls it three times. Each isolation that runs on this machine
is measured. The last line is JSON.
"""

import asyncio
import json
import os
import re
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deployments.sandbox import SandboxLost
from deployments.sandbox.local import ISOLATIONS
from deployments.tasks.code import CodeEnvironment, CodeInfo, SandboxSettings
from rollout_env import ChatMessage

LINEAR = re.compile(r"returns (\d+) \* x \+ (\d+)")
console = Console(stderr=True)


async def steps_per_s(environment: CodeEnvironment, count: int) -> float:
    """Judges `count` samples, `max_concurrent_steps` at once. Raises `AssertionError` if a reward is not 1."""
    slots = asyncio.Semaphore(environment.max_concurrent_steps or count)

    async def step(sample: dict[str, Any]) -> float:
        prompt = sample["messages"][0]["content"]
        factor, summand = LINEAR.search(prompt).groups()  # type: ignore[union-attr]
        reply = f"```python\ndef f(x):\n    return {factor} * x + {summand}\n```"
        log: list[ChatMessage] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        async with slots:
            outcome = await environment.step(log, CodeInfo.model_validate(sample["extra_env_info"]))
        assert isinstance(outcome.reward, float)
        return outcome.reward

    samples = environment.example_samples(count, seed=0)
    started = time.monotonic()
    rewards = await asyncio.gather(*map(step, samples))
    assert rewards == [1.0] * count
    return count / (time.monotonic() - started)


def main(count: Annotated[int, typer.Option(help="Programs per isolation.")] = 200) -> None:
    found: dict[str, float] = {}
    cores = os.cpu_count() or 1
    table = Table("isolation", "programs a second")
    for isolation in ISOLATIONS:
        try:
            environment = CodeEnvironment(
                sandbox=SandboxSettings.model_validate({"isolation": isolation, "max_concurrent_runs": 2 * cores})
            )
        except SandboxLost as error:
            console.print(f"{isolation}: {error}")
            continue
        found[isolation] = round(asyncio.run(steps_per_s(environment, count)), 1)
        environment.close()
        table.add_row(isolation, f"{found[isolation]:.1f}")
    console.print(table)
    typer.echo(json.dumps({"programs_per_s": found, "cores": cores}))


if __name__ == "__main__":
    typer.run(main)
