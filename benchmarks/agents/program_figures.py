"""The figures of programs that were played, and their bounds. No I/O."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple

from benchmarks.agents.slow_tools import NEW_TOKENS

BLOCK_TOKENS = 128
COUNTS = re.compile(r"^ray_vllm_(prefix_cache_queries|(?:external_)?prefix_cache_hits)_total\{.*\} (\S+)$", re.M)
"""External hits are those of a connector, where the tokens are looked up that the engine has not found."""
SCARCE = {"recomputed_tokens": (-math.inf, 0.5), "turns_per_s": (1.3, math.inf), "slowest_s": (0.0, 1.5)}
"""The least and the most of ratios, with a cache for a part of the programs, whose tools take their usual time."""
AMPLE = {"turns_per_s": (0.98, math.inf)}
"""The same otherwise."""
Figures = dict[str, float]


class Program(NamedTuple):
    """One rollout: its seconds, and the length of the prompt of each turn."""

    seconds: float
    prompts: Sequence[int]


def looked_up_and_found(page: str) -> tuple[int, int]:
    """Prompt tokens that all engines have looked up and found so far, by a page of metrics."""
    counts = [(name, int(float(value))) for name, value in COUNTS.findall(page)]
    looked_up = sum(count for name, count in counts if name.endswith("queries"))
    return looked_up, sum(count for _, count in counts) - looked_up


def compulsory_tokens(program: Program) -> int:
    """Prompt tokens that no earlier turn of the program has computed in whole blocks."""
    # The last token that was generated is computed with the next prompt.
    known = (before + NEW_TOKENS - 1 for before, _ in pairwise(program.prompts))
    return sum(program.prompts) - sum(tokens // BLOCK_TOKENS * BLOCK_TOKENS for tokens in known)


def figures_of(programs: Sequence[Program], computed: int) -> Figures:
    """Args: `computed` prompt tokens of all programs, which began at the same time."""
    seconds = [program.seconds for program in programs]
    return {
        "recomputed_tokens": computed - sum(map(compulsory_tokens, programs)),
        "turns_per_s": round(sum(len(program.prompts) for program in programs) / max(seconds), 3),
        "mean_s": round(mean(seconds), 2),
        "slowest_s": round(max(seconds), 2),
        "fairness": round(sum(seconds) ** 2 / len(seconds) / sum(each**2 for each in seconds), 3),
    }


def ratios_of(figures: Figures, today: Figures) -> Figures:
    """Each figure in proportion to today's of the same round; a 0 there counts as 1."""
    return {name: round(figure / (today[name] or 1), 3) for name, figure in figures.items()}


def medians(rounds: Sequence[Figures]) -> Figures:
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def missed(ratios: Figures, cache: float, tool_times: float) -> list[str]:
    """The bounds that do not hold, in words."""
    bounds = SCARCE if cache < 1 and tool_times == 1 else AMPLE
    return [
        f"{name}: {ratios[name]:g} of today's, not within {least:g} and {most:g}"
        for name, (least, most) in bounds.items()
        if not least <= ratios[name] <= most
    ]
