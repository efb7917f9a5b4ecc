"""Writes a new environment, with its test."""

import re
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = '''"""TASK: what the model must do, in a sentence."""

import random
from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment


class TASKState(BaseModel):
    """The `extra_env_info` of a sample: what a step needs to judge a reply, and what must be kept between turns."""

    secret: int
    guesses: int = 0


class TASKEnvironment(TaskEnvironment):
    """The parameters of the constructor are the settings: the `arguments` of the entry in the service's config."""

    description = "Guess a number from 1 to 10."
    ExtraEnvInfo = TASKState

    def __init__(self, most_guesses: int = 4) -> None:
        self.most_guesses = most_guesses

    def step(self, message_log: list[ChatMessage], extra_env_info: TASKState) -> StepOutcome:
        """Judges the last message. May block: it runs in a thread. State goes into `metadata`, never into `self`."""
        reply = message_log[-1]["content"]
        guesses = extra_env_info.guesses + 1
        right = reply.strip() == str(extra_env_info.secret)
        return StepOutcome(
            observation={"role": "user", "content": "Right." if right else "Wrong. Guess again."},
            reward={"right": float(right), "effort": -0.1},  # Of this step alone. The service sums up.
            terminated=right or guesses == self.most_guesses,
            metadata={"secret": extra_env_info.secret, "guesses": guesses},
            answer=reply.strip() or None,
        )

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Different samples, the same ones for the same seed."""
        draw = random.Random(seed)
        return [
            {
                "messages": [{"role": "user", "content": f"Round {number}. Guess my number, from 1 to 10."}],
                "extra_env_info": {"secret": draw.randint(1, 10)},
            }
            for number in range(count)
        ]
'''
TEST = '''"""TASK, tested without the service."""

from MODULE import TASKEnvironment

from rollout_env import check, play

SAMPLE = {"messages": [{"role": "user", "content": "Guess."}], "extra_env_info": {"secret": 7}}


def test_the_right_number_ends_the_rollout() -> None:
    played = play(TASKEnvironment(), ["3", "7"], SAMPLE)
    assert [message["content"] for message in played.message_log[2::2]] == ["Wrong. Guess again.", "Right."]
    assert played.rewards == {"right": 1.0, "effort": -0.2}
    assert played.terminated


def test_the_last_guess_ends_the_rollout() -> None:
    assert play(TASKEnvironment(most_guesses=1), ["3"], SAMPLE).terminated


def test_it_keeps_the_rules_for_environments() -> None:
    check(TASKEnvironment, replies=["1", "2", "3"])
'''
NEXT_STEPS = """Wrote {files}. Test it:

    cd {folder} && python -m pytest test_{module}.py

Serve it by this entry under `environments` of the service's config, with the folder in PYTHONPATH:

    {module}:
      import_path: {module}:{task}Environment

It has one replica; an entry under `deployments` gives it more, and cores.
"""


class WrittenEnvironment(NamedTuple):
    """A new environment."""

    import_path: str
    files: list[Path]
    next_steps: str
    """Commands that test it, and its entry in the config."""


class NotWritten(Exception):
    """The new environment cannot be written. The message gives the reason."""


def write_environment(name: str, folder: Path) -> WrittenEnvironment:
    """Writes `NAME.py` and `test_NAME.py` into the folder, which is made if it is missing.

    Raises:
        NotWritten: the name is not that of a module, or one of the files exists.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module):
        raise NotWritten(f"{name!r} is not a name for a module: use small letters, digits and _, such as number_game.")
    task = "".join(part.capitalize() for part in module.split("_"))
    files = {folder / f"{module}.py": ENVIRONMENT, folder / f"test_{module}.py": TEST}
    if there := [str(path) for path in files if path.exists()]:
        raise NotWritten(f"{' and '.join(there)} exists already: choose another name or folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text.replace("TASK", task).replace("MODULE", module))
    next_steps = NEXT_STEPS.format(files=" and ".join(map(str, files)), folder=folder, module=module, task=task)
    return WrittenEnvironment(f"{module}:{task}Environment", list(files), next_steps)
