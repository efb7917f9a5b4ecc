"""A made-up model whose tokens follow from its version, the ids before them, the temperature and the seed alone."""

import asyncio
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deployments.failures import TurnTimedOut
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    ScoredPrompt,
    ScoringRequest,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)
from rollout_client.contract.base import VersionLabel, label_of
from service.replay.replayer import Served
from tests.service.scripted import ScriptedGenerator, first_part

LETTERS = "abcd."
"""The last one ends a generation."""


def logprobs_after(version: str, before: Sequence[int], temperature: float) -> dict[str, float]:
    scores = {
        letter: random.Random(repr((version, list(before), letter))).gauss(-2 * (letter == "."), 1)
        for letter in LETTERS
    }
    weights = {letter: math.exp(score / temperature) for letter, score in scores.items()}
    total = sum(weights.values())
    return {letter: math.log(weight / total) for letter, weight in weights.items()}


def generated(request: GenerationRequest, version: str) -> Generation:
    ids, text, logprobs, sampling = list(request.prompt_token_ids), "", list[float](), request.sampling
    draws, finish_reason = random.Random(sampling.seed), "length"
    while len(text) < request.max_new_tokens and finish_reason == "length":
        after = logprobs_after(version, ids, sampling.temperature or 1.0)
        letter = max(after, key=after.__getitem__)
        if sampling.temperature:
            [letter] = draws.choices([*after], [math.exp(logprob) for logprob in after.values()])
        ids.append(ord(letter))
        text += letter
        logprobs.append(after[letter])
        if letter == "." or any(text.endswith(stop) for stop in request.stop_strings):
            finish_reason = "stop"
    spans = (WeightSpan(version, 0, len(text)),)
    reason: Literal["stop", "length"] = "stop" if finish_reason == "stop" else "length"
    return Generation(packed_ids(map(ord, text)), packed_logprobs(logprobs), reason, spans, replica="a", batch_size=1)


def scored(request: ScoringRequest, version: str) -> ScoredPrompt:
    ids = list(request.prompt_token_ids)
    places = range(max(request.start, 1), len(ids))
    logprobs = [logprobs_after(version, ids[:place], 1.0)[chr(ids[place])] for place in places]
    return ScoredPrompt([], [], "length", prompt_logprobs=packed_logprobs(logprobs), weight_version=version)


@dataclass
class SeededGenerator(ScriptedGenerator):
    """Plays. Each generation is made by the next of `versions`, and cut after the next of `cuts` tokens if it has more,
    by an interruption or a stall."""

    script: Sequence[str | Exception] = ()
    cuts: Iterable[int | None] = ()
    versions: Iterable[int] = ()

    def __post_init__(self) -> None:
        self._cuts, self._versions = iter(self.cuts), iter(self.versions)
        self.version = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        if isinstance(request, ScoringRequest):
            return scored(request, str(self.version))
        self.version = next(self._versions, self.version)
        whole = generated(request, str(self.version))
        cut = next(self._cuts, None)
        if cut is None or cut >= len(whole.token_ids):
            return whole
        return first_part(whole, cut, TurnTimedOut("no new token") if cut % 2 else None)


@dataclass
class SeededReplicas:
    """Replicas that have every version."""

    names: Sequence[str] = ("a", "b")
    requests: list[tuple[str, GenerationRequest]] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    other_version: str | None = None
    """The version that generates in place of the one that is demanded."""

    def replicas(self) -> Sequence[str]:
        return self.names

    async def generate_on(self, replica: str, request: GenerationRequest) -> Generation:
        self.requests.append((replica, request))
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        return generated(request, self.other_version or label_of(request.policy, request.weight_version or 0))


class ServedVersions:
    """In place of `served_weights`: all versions are served but those that have a reason."""

    def __init__(self, reasons: Mapping[VersionLabel, str] | None = None) -> None:
        self._reasons = reasons or {}

    async def __call__(self, labels: Iterable[VersionLabel]) -> Served:
        return {label: self._reasons.get(label, label) for label in labels}
