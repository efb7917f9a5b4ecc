"""What the engine comparison plays: how many samples, turns and tokens, over which prompts."""

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.three_tokens import THREE_TOKENS

LOWEST_ORDINARY_ID, HIGHEST_ORDINARY_ID = 5, 75
"""Of the embedded model's vocabulary."""
SAMPLING: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Workload:
    """`samples` conversations of `turns` generations of `new_tokens` tokens each."""

    samples: int
    turns: int
    new_tokens: int
    prompt_tokens: int = 48
    group: int = 1
    """Samples that share a prompt."""
    plays_a_round: int = 1
    """The shorter a play, the more one differs from the next."""

    @property
    def name(self) -> str:
        shape = f"{self.samples}x{self.turns}x{self.new_tokens}"
        return shape if self.group == 1 else f"{shape}@{self.prompt_tokens}/{self.group}"

    @property
    def all_turns(self) -> int:
        return self.samples * self.turns

    @property
    def all_tokens(self) -> int:
        return self.all_turns * self.new_tokens

    def prompts(self, seed: int) -> list[list[int]]:
        """Token ids of each sample's prompt; equal seeds give equal prompts, no two seeds a common prefix."""
        draw = random.Random(f"{self.name} {seed}")
        distinct = [
            draw.choices(range(LOWEST_ORDINARY_ID, HIGHEST_ORDINARY_ID), k=self.prompt_tokens)
            for _ in range(self.samples // self.group)
        ]
        return [prompt for prompt in distinct for _ in range(self.group)]


WORKLOADS = (
    Workload(64, 1, 128, plays_a_round=2),
    Workload(64, 4, 32, plays_a_round=2),
    Workload(256, 4, 32),
    Workload(256, 8, 16),
    Workload(64, 2, 32, prompt_tokens=1500, group=8, plays_a_round=2),
)
ONE_SAMPLE = Workload(1, 1, 1)
"""One token: each further one is the engine's own time, which differs by more than what is to be seen."""


def reply_ids(tokenizer: Any) -> list[int]:
    """What the environment of the comparison answers, as the model's tokens."""
    return list(tokenizer.encode(THREE_TOKENS, add_special_tokens=False))
