"""Rules that `check` applies while it plays an environment, and its findings."""

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import indent
from typing import Literal, NamedTuple, TypeVar

from rollout_env.check_static_rules import (
    attribute_problems,
    example_problems,
    extra_env_info_problem,
    many_examples_problems,
    sample_problems,
)
from rollout_env.environment import TaskEnvironment
from rollout_env.play import PlayResult, Reply, Sample, ScriptedRollout, begin
from rollout_env.records import OutcomeInvalid, StepOutcome
from rollout_env.steps import RolloutSteps, call

BEAT_S = 0.02
Result = TypeVar("Result")


class StepTooSlow(Exception):
    """The step took longer than its limit."""


async def longest_block(step: Awaitable[Result], timeout_s: float) -> tuple[Result, float]:
    """Awaits the step and measures the longest time in seconds for which it blocked the event loop.

    Blocks shorter than `BEAT_S` are missed; longer ones are measured up to `BEAT_S` too short.

    Raises:
        StepTooSlow: the step takes longer than `timeout_s`; it is cancelled.
        Exception: any that the step raises.
    """
    longest_s = 0.0
    task = asyncio.ensure_future(step)
    started = last = time.monotonic()
    try:
        while not task.done():
            if last - started > timeout_s:
                raise StepTooSlow
            await asyncio.wait([task], timeout=BEAT_S)
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last - BEAT_S), now
        return task.result(), longest_s
    finally:
        task.cancel()


Rule = Literal[
    "attributes", "example_samples", "sample", "start", "step", "outcome", "metadata", "blocking", "state", "close"
]
Outcome = TypeVar("Outcome")
Replies = Sequence[Reply] | Callable[[Sample], Sequence[Reply]]

AWKWARD_REPLIES = ("", " \n", "\x00", "<|end|>{[(\\", "ab" * 5000)
"""Replies that a model can generate, so that no environment may raise on them."""
LONGEST_QUOTE = 40
HERE = Path(__file__).parent


class RuleProblem(NamedTuple):
    rule: Rule
    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that the environment breaks."""

    rule: Rule
    message: str
    """A sentence: where it was found first, and what is wrong."""
    traceback: str = field(default="", compare=False)
    """Traceback of the environment's exception, from its own code on."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}\n{indent(self.traceback, '    ')}".rstrip()


class Played(NamedTuple):
    """A sample, the replies to it, and their result when it was played alone."""

    name: str
    sample: Sample
    replies: Sequence[Reply]
    result: PlayResult


class Checker:
    """One check of one environment. A problem is kept once, with the place where it was found first."""

    def __init__(
        self, instances: Sequence[TaskEnvironment], replies: Replies, max_block_s: float, step_timeout_s: float
    ) -> None:
        self._instances = instances
        self._replies = replies
        self._max_block_s = max_block_s
        self._step_timeout_s = step_timeout_s
        self._findings: dict[tuple[Rule, str], Finding] = {}

    async def findings(self, samples: int | Sequence[Sample], seed: int, repeatable: bool) -> list[Finding]:
        self._add_all("attributes", "", attribute_problems(self._instances[0]))
        if not self._findings:
            played = [await self._play(name, sample) for name, sample in self._playable(samples, seed)]
            alone = [each for each in played if each is not None]
            if repeatable and alone and not self._findings:
                await self._compare(alone[0], alone[-1])
        for environment in self._instances:
            await self._close_one("close", call(environment.close))
        return list(self._findings.values())

    def _add(self, problem: RuleProblem, place: str = "") -> None:
        sentence = f"{place}: {problem.text}." if place else f"{problem.text}."
        self._findings.setdefault((problem.rule, problem.text), Finding(problem.rule, sentence, problem.traceback))

    def _add_all(self, rule: Rule, place: str, texts: Iterable[str]) -> bool:
        """Adds a problem for each text. Returns whether there were any."""
        problems = [RuleProblem(rule, text) for text in texts]
        for problem in problems:
            self._add(problem, place)
        return bool(problems)

    def _playable(self, samples: int | Sequence[Sample], seed: int) -> list[tuple[str, Sample]]:
        """The samples that keep the rules, with names."""
        environment = self._instances[0]
        if isinstance(samples, int):
            try:
                self._add_all("example_samples", "", example_problems(environment, samples, seed))
                samples = environment.example_samples(samples, seed)
                if not self._findings and not any(
                    found for few in samples for found in sample_problems(environment, few)
                ):
                    self._add_all("example_samples", "", many_examples_problems(environment, seed))
            except Exception as error:  # noqa: BLE001 - whatever an environment raises is a finding
                self._add(raised("example_samples", "example_samples", error))
                return []
        named = [(f"Sample {number}", sample) for number, sample in enumerate(samples)]
        return [
            (name, sample)
            for name, sample in named
            if not self._add_all("sample", name, sample_problems(environment, sample))
        ]

    async def _play(self, name: str, sample: Sample) -> Played | None:
        """Plays the sample with the awkward replies and with its own; None if its own replies found a problem."""
        if problem := await self._start_twice(sample):
            self._add(problem, name)
            return None
        for reply in AWKWARD_REPLIES:
            await self._play_alone(name, sample, [reply])
        replies = self._replies(sample) if callable(self._replies) else self._replies
        result = await self._play_alone(name, sample, replies)
        return Played(name, sample, replies, result) if result else None

    async def _play_alone(self, name: str, sample: Sample, replies: Sequence[Reply]) -> PlayResult | None:
        rollout = ScriptedRollout(sample)
        if problem := await self._start(rollout, self._instances[0]):
            self._add(problem, name)
            return None
        steps = RolloutSteps(self._instances[:1])
        for turn, reply in enumerate(replies):
            if rollout.terminated:
                break
            if problem := await self._turn(rollout, steps, reply):
                self._add(problem, f"{name}, turn {turn + 1}, reply {shortened(reply)}")
                await self._close_one("close of a session", steps.close())
                return None
        await self._close_one("close of a session", steps.close())
        return rollout.result()

    async def _start_twice(self, sample: Sample) -> RuleProblem | None:
        """Starts two rollouts of one sample, where possible on two instances, and returns the first problem."""
        rollouts = ScriptedRollout(sample), ScriptedRollout(sample)
        for rollout, environment in zip(rollouts, (self._instances[0], self._instances[-1]), strict=True):
            if problem := await self._start(rollout, environment):
                return problem
        if rollouts[0].result() != rollouts[1].result():
            text = "start returned something else the second time: seed what is random by a field of extra_env_info"
            return RuleProblem("start", text)
        return None

    async def _start(self, rollout: ScriptedRollout, environment: TaskEnvironment) -> RuleProblem | None:
        """Starts the rollout and returns the first problem with it."""
        outcome, problem = await self._watched("start", "start", begin(rollout, environment))
        return problem or (metadata_problem(environment, outcome) if outcome is not None else None)

    async def _turn(self, rollout: ScriptedRollout, steps: RolloutSteps, reply: Reply) -> RuleProblem | None:
        """Plays one turn and returns the first problem with it."""
        rollout.add_reply(reply)
        step = steps.step(rollout.messages_so_far(), rollout.extra_env_info)
        outcome, problem = await self._watched("step", "the step", step)
        if outcome is None or problem is not None:
            return problem
        rollout.add_outcome(outcome)
        return metadata_problem(self._instances[0], outcome)

    async def _watched(
        self, rule: Literal["start", "step"], subject: str, work: Awaitable[Outcome]
    ) -> tuple[Outcome | None, RuleProblem | None]:
        """Awaits a call of the environment. Returns its outcome, and the first problem with the call itself.

        Args:
            subject: the name of the call in a sentence.
        """
        try:
            outcome, blocked_s = await longest_block(work, self._step_timeout_s)
        except StepTooSlow:
            return None, RuleProblem(rule, f"{subject} took longer than {self._step_timeout_s:g} s")
        except OutcomeInvalid as error:
            return None, RuleProblem("outcome", str(error).rstrip("."))
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is a finding
            return None, raised(rule, rule, error)
        if blocked_s > self._max_block_s:
            text = BLOCKING.format(subject=subject, limit_s=self._max_block_s)
            return outcome, RuleProblem("blocking", text)
        return outcome, None

    async def _compare(self, first: Played, second: Played) -> None:
        """Plays two samples at once, turn by turn, and compares the outcomes with those of each alone."""
        pair = (first, second)
        rollouts = [ScriptedRollout(played.sample) for played in pair]
        for rollout in rollouts:
            await self._start(rollout, self._instances[-1])
        steps = [RolloutSteps(self._instances, first=place) for place, _ in enumerate(pair)]
        await self._compare_turns(pair, rollouts, steps)
        for of_rollout in steps:
            await self._close_one("close of a session", of_rollout.close())

    async def _compare_turns(
        self, pair: Sequence[Played], rollouts: Sequence[ScriptedRollout], steps: Sequence[RolloutSteps]
    ) -> None:
        turns = max(len(played.result.turns) for played in pair)
        for turn in range(turns):
            for of_rollout, rollout, played in zip(steps, rollouts, pair, strict=True):
                if turn >= len(played.result.turns):
                    continue
                problem = await self._turn(rollout, of_rollout, played.replies[turn])
                difference = problem.text if problem else difference_in(played.result, rollout.result(), turn)
                if difference:
                    self._add(RuleProblem("state", f"{difference} {STATE}"), f"{played.name}, turn {turn + 1}")
                    return

    async def _close_one(self, subject: str, closing: Awaitable[None]) -> None:
        try:
            await closing
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is a finding
            self._add(raised("close", subject, error))


def metadata_problem(environment: TaskEnvironment, outcome: StepOutcome) -> RuleProblem | None:
    """Problem with metadata that the outcome's own validation lets through."""
    if outcome.metadata is None:
        return None
    if not outcome.terminated and (problem := extra_env_info_problem(environment, outcome.metadata)):
        return RuleProblem("metadata", f"the next step would not accept it as extra_env_info: {problem}")
    return None


def difference_in(alone: PlayResult, at_once: PlayResult, turn: int) -> str | None:
    """Names the fields of the outcome of one turn that differ, if any. Metrics may differ: they may hold times."""
    expected, found = alone.turns[turn].outcome, at_once.turns[turn].outcome
    compared = [field.name for field in fields(expected) if field.name != "metrics"]
    names = [name for name in compared if getattr(expected, name) != getattr(found, name)]
    return f"its {', '.join(names)} differed" if names else None


STATE = (
    "when two rollouts were played at once, compared with one after the other. Keep the state of a rollout in "
    "metadata, not in the environment; pass repeatable=False if steps are random on purpose"
)
BLOCKING = (
    "{subject} blocked the event loop for more than {limit_s:g} s, during which no other step could run. Await what "
    "takes long, or run it by asyncio.to_thread"
)


def raised(rule: Rule, subject: str, error: Exception) -> RuleProblem:
    return RuleProblem(rule, f"{subject} raised {described(error)}", traceback_of(error))


def described(error: Exception) -> str:
    """Type and first line of an exception, without a final full stop."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}".rstrip(".: ")


def traceback_of(error: Exception) -> str:
    """Traceback without the frames of this package before the environment's own."""
    frames = error.__traceback__
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent == HERE:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def shortened(reply: Reply) -> str:
    text = reply if isinstance(reply, str) else reply["content"]
    return repr(text) if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]!r}..."
