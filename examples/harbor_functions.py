"""A data set in Harbor's format, and an agent that plays it: Python functions to write, which a verifier calls.

Learn from it how tasks are generated, and how an agent works in the sandbox of its rollout.
`examples/train_agent_harbor.py` trains the embedded model with tools on it, which has learned to write `f(x)` from a
formula, and here finds the formula in words.
"""

import random
from pathlib import Path

from deployments.sandbox.providers.interface import RunningSandbox, SandboxFile
from deployments.tasks.replies import last_code_block
from examples.tool_agent import connections
from rollout_client import SampleInput

WORDINGS = ("{factor} times x plus {summand}", "x times {factor} plus {summand}")
FACTORS, SUMMANDS = range(2, 99), range(2, 99)
ARGUMENTS = (0, 1, 5, -7)
"""The verifier calls the function with each."""
FUNCTION_FILE = "/app/f.py"
FILES = {
    "task.toml": """schema_version = "1.4"

[task]
name = "functions/{number}"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
network_mode = "no-network"
memory_mb = 512
storage_mb = 16
""",
    "instruction.md": f"Write to {FUNCTION_FILE} a Python function f(x) that returns {{words}}.\n",
    "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
    "solution/solve.sh": f"""#!/bin/bash
printf 'def f(x):\\n    return {{factor}} * x + {{summand}}\\n' > {FUNCTION_FILE}
""",
    # A program that takes its time, or prints, is wrong.
    "tests/test.sh": """#!/bin/bash
cd /app
values=$(timeout 10 python3 -c 'from f import f; print(*map(f, {arguments}))')
if [ "$values" = "{values}" ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
""",
}
"""Of a task: their paths in its folder, and what they hold."""


def write_tasks(folder: Path, count: int, seed: int = 0) -> None:
    """Writes the folders of so many tasks, no two of which have the same numbers. The same seed gives the same."""
    draw = random.Random(seed)
    pairs = [(factor, summand) for factor in FACTORS for summand in SUMMANDS]
    for number, (factor, summand) in enumerate(draw.sample(pairs, count)):
        told = {
            "number": number,
            "factor": factor,
            "summand": summand,
            "words": draw.choice(WORDINGS).format(factor=factor, summand=summand),
            "arguments": ARGUMENTS,
            "values": " ".join(str(factor * argument + summand) for argument in ARGUMENTS),
        }
        for name, text in FILES.items():
            path = folder / f"{number:04}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(**told), encoding="utf-8")


async def agent(base_url: str, api_key: str, sample: SampleInput, sandbox: RunningSandbox) -> None:
    """Asks the model once, and writes the code of its answer to the file."""
    assert sample.messages is not None
    question = f"{str(sample.messages[-1].content).strip()} Reply with one code block."
    model = connections().with_options(base_url=base_url, api_key=api_key)
    completion = await model.chat.completions.create(model="any", messages=[{"role": "user", "content": question}])
    code = last_code_block(completion.choices[0].message.content or "")
    if code is not None:
        await sandbox.write_files({FUNCTION_FILE: SandboxFile(code.encode())})
