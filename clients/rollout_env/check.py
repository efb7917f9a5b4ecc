"""Checks an environment against the rules that the service relies on, for the environment's own tests."""

import json
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, PositiveFloat, PositiveInt, StringConstraints, TypeAdapter, ValidationError

from rollout_env.environment import LostSession, TaskEnvironment, has_a_start, has_a_step
from rollout_env.play import PlayResult, Reply, Sample, ScriptedRollout, begin, prompt_of, run
from rollout_env.records import JsonObject, OutcomeInvalid, StepOutcome
from rollout_env.steps import RolloutSteps, StepTooSlow, call, longest_block, problems_of

Rule = Literal[
    "attributes", "example_samples", "sample", "start", "step", "outcome", "metadata", "blocking", "state", "close"
]
Replies = Sequence[Reply] | Callable[[Sample], Sequence[Reply]]
Result = TypeVar("Result")
ORDINARY_REPLIES = ("I do not know.", "Yes.", "42")
AWKWARD_REPLIES = ("", " \n", "\x00", "<|end|>{[(\\", "ab" * 5000)
"""Replies that a model can generate, so that no environment may raise on them."""
MANY_SAMPLES = 64
"""Size of a large request for samples."""
FEW_SAMPLES = 8
"""Fewer different samples may come in the same order for two seeds by chance."""
LONGEST_QUOTE = 40
HERE = Path(__file__).parent
JSON_OBJECT = TypeAdapter(JsonObject)
ATTRIBUTES: Mapping[str, TypeAdapter[Any]] = {
    "description": TypeAdapter(Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]),
    "tools": TypeAdapter(Sequence[JsonObject]),
    "max_concurrent_steps": TypeAdapter(PositiveInt | None),
    "max_sessions": TypeAdapter(PositiveInt | None),
    "lost_session": TypeAdapter(LostSession),
    "session_idle_s": TypeAdapter(PositiveFloat),
    "ExtraEnvInfo": TypeAdapter(type[BaseModel]),
}
STATE = (
    "when two rollouts were played at once, compared with one after the other. Keep the state of a rollout in "
    "metadata, not in the environment; pass repeatable=False if steps are random on purpose"
)
BLOCKING = (
    "{subject} blocked the event loop for more than {limit_s:g} s, during which no other step could run. Await what "
    "takes long, or run it by asyncio.to_thread"
)


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


class CheckFailed(AssertionError):
    """The environment breaks rules. The message lists all findings."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        lines = ["The environment breaks rules of the service.", *(f"- {finding}" for finding in findings)]
        super().__init__("\n".join(lines))


def check(
    environment: TaskEnvironment | Callable[[], TaskEnvironment],
    replies: Replies = ORDINARY_REPLIES,
    samples: int | Sequence[Sample] = 3,
    *,
    seed: int = 0,
    repeatable: bool = True,
    max_block_s: float = 1.0,
    step_timeout_s: float = 120.0,
) -> None:
    """Raises `CheckFailed`, with all findings, if the environment breaks a rule that the service relies on.

    The rules, by their names in findings:

    - `attributes`: `description` is a text, `ExtraEnvInfo` a pydantic model with a JSON schema, `max_concurrent_steps`
      a positive number or None.
    - `example_samples`: the requested number of different samples, equal ones for an equal seed. For a large number:
      that many, each JSON with a prompt, and others for another seed.
    - `sample`: each is JSON with a prompt, and `ExtraEnvInfo` accepts its `extra_env_info`.
    - `start`, where there is one: does not raise, ends in time, and gives the same for the same sample.
    - `step`: does not raise, whatever the reply, and ends in time.
    - `outcome`: is a `StepOutcome` with permitted values: text, a known role, finite rewards, metadata that is JSON.
    - `metadata`: is accepted by `ExtraEnvInfo` unless the rollout ends.
    - `blocking`: a step does not keep the event loop from running other steps.
    - `state`: two rollouts that are played at once have the outcomes that they have one after the other.
    - `close`: does not raise.

    Args:
        environment: an instance, or a factory such as the class. With a factory, the steps of a rollout alternate
            between two instances, as between two replicas of the service. All instances are closed in the end.
        replies: played on each sample, one a turn; or a function that makes them for a sample. Some awkward replies,
            such as an empty one, are played too.
        samples: how many example samples to play, or the samples themselves.
        seed: seed of the example samples.
        repeatable: whether equal replies give equal outcomes. False skips the rule `state`.
        max_block_s: how long a step may block the event loop, in seconds.
        step_timeout_s: how long a step may take, in seconds.
    """
    instances = [environment] if isinstance(environment, TaskEnvironment) else [environment(), environment()]
    checker = Checker(instances, replies, max_block_s, step_timeout_s)
    if findings := run(checker.findings(samples, seed, repeatable)):
        raise CheckFailed(findings)


class _RuleBroken(Exception):
    """A call of the environment breaks a rule."""

    def __init__(self, rule: Rule, text: str, traceback: str = "") -> None:
        super().__init__(text)
        self.rule, self.text, self.traceback = rule, text, traceback


class _Played(NamedTuple):
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
        """All findings. Closes the instances in the end."""
        self._add_all("attributes", attribute_problems(self._instances[0]))
        if not self._findings:
            played = [await self._play(name, sample) for name, sample in self._playable(samples, seed)]
            alone = [each for each in played if each is not None]
            if repeatable and alone and not self._findings and self._instances[0].max_sessions != 1:
                await self._compare([alone[0], alone[-1]])
        for environment in self._instances:
            await self._holds(call(environment.close), "close")
        return list(self._findings.values())

    def _add(self, broken: _RuleBroken, place: str = "") -> None:
        sentence = f"{place}: {broken.text}." if place else f"{broken.text}."
        self._findings.setdefault((broken.rule, broken.text), Finding(broken.rule, sentence, broken.traceback))

    def _add_all(self, rule: Rule, texts: Iterator[str], place: str = "") -> bool:
        """Adds a finding for each text. Returns whether there are none."""
        found = list(texts)
        for text in found:
            self._add(_RuleBroken(rule, text), place)
        return not found

    async def _holds(self, work: Awaitable[object], rule: Rule, place: str = "", subject: str | None = None) -> bool:
        """Awaits a call of the environment. Adds a finding, and returns False, if it breaks a rule or raises.

        Args:
            subject: the name of the call in a sentence, by default that of the rule.
        """
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is a finding
            self._add(_broken_by(error, rule, subject or rule), place)
            return False
        return True

    def _playable(self, samples: int | Sequence[Sample], seed: int) -> list[tuple[str, Sample]]:
        """The samples that keep the rules, with names."""
        environment = self._instances[0]
        if isinstance(samples, int):
            try:
                self._add_all("example_samples", _example_problems(environment, samples, seed))
                samples = environment.example_samples(samples, seed)
                if not self._findings and not any(any(_sample_problems(environment, few)) for few in samples):
                    self._add_all("example_samples", _many_examples_problems(environment, seed))
            except Exception as error:  # noqa: BLE001 - whatever an environment raises is a finding
                self._add(_broken_by(error, "example_samples", "example_samples"))
                return []
        named = [(f"Sample {number}", sample) for number, sample in enumerate(samples)]
        return [
            (name, sample)
            for name, sample in named
            if self._add_all("sample", _sample_problems(environment, sample), name)
        ]

    async def _play(self, name: str, sample: Sample) -> _Played | None:
        """Plays the sample with the awkward replies and with its own; None if its own replies found a problem."""
        if not await self._holds(self._start_twice(sample), "start", name):
            return None
        for reply in AWKWARD_REPLIES:
            await self._play_alone(name, sample, [reply])
        replies = self._replies(sample) if callable(self._replies) else self._replies
        result = await self._play_alone(name, sample, replies)
        return _Played(name, sample, replies, result) if result else None

    async def _play_alone(self, name: str, sample: Sample, replies: Sequence[Reply]) -> PlayResult | None:
        rollout = ScriptedRollout(sample)
        steps = RolloutSteps(self._instances[:1])
        holds = await self._holds(self._start(rollout, self._instances[0]), "start", name)
        for turn, reply in enumerate(replies):
            if holds and not rollout.terminated:
                place = f"{name}, turn {turn + 1}, reply {_shortened(reply)}"
                holds = await self._holds(self._turn(rollout, steps, reply), "step", place)
        await self._holds(steps.close(), "close", subject="close of a session")
        return rollout.result() if holds else None

    async def _start_twice(self, sample: Sample) -> None:
        """Starts two rollouts of one sample, where possible on two instances."""
        rollouts = ScriptedRollout(sample), ScriptedRollout(sample)
        for rollout, environment in zip(rollouts, (self._instances[0], self._instances[-1]), strict=True):
            await self._start(rollout, environment)
        if rollouts[0].result() != rollouts[1].result():
            text = "start returned something else the second time: seed what is random by a field of extra_env_info"
            raise _RuleBroken("start", text)

    async def _start(self, rollout: ScriptedRollout, environment: TaskEnvironment) -> None:
        _check_metadata(environment, await self._watched("start", begin(rollout, environment)))

    async def _turn(self, rollout: ScriptedRollout, steps: RolloutSteps, reply: Reply) -> None:
        rollout.add_reply(reply)
        step = steps.step(rollout.messages_so_far(), rollout.extra_env_info)
        outcome = await self._watched("the step", step)
        rollout.add_outcome(outcome)
        _check_metadata(self._instances[0], outcome)

    async def _watched(self, subject: str, work: Awaitable[Result]) -> Result:
        """Awaits a call of the environment, which must neither take long nor block the event loop."""
        outcome, blocked_s = await longest_block(work, self._step_timeout_s)
        if blocked_s > self._max_block_s:
            raise _RuleBroken("blocking", BLOCKING.format(subject=subject, limit_s=self._max_block_s))
        return outcome

    async def _compare(self, pair: Sequence[_Played]) -> None:
        """Plays two samples at once, turn by turn, and compares the outcomes with those of each alone."""
        rollouts = [ScriptedRollout(played.sample) for played in pair]
        for rollout in rollouts:
            await self._holds(self._start(rollout, self._instances[-1]), "start")
        steps = [RolloutSteps(self._instances, first=place) for place, _ in enumerate(pair)]
        playing = list(zip(pair, rollouts, steps, strict=True))
        for turn in range(max(len(played.result.turns) for played in pair)):
            for played, rollout, of_rollout in playing:
                if turn >= len(played.result.turns):
                    continue
                try:
                    await self._turn(rollout, of_rollout, played.replies[turn])
                    difference = _difference_in(played.result, rollout.result(), turn)
                except Exception as error:  # noqa: BLE001 - whatever an environment raises is a finding
                    difference = _broken_by(error, "step", "step").text
                if difference:
                    self._add(_RuleBroken("state", f"{difference} {STATE}"), f"{played.name}, turn {turn + 1}")
                    playing = []
                    break
        for of_rollout in steps:
            await self._holds(of_rollout.close(), "close", subject="close of a session")


def _check_metadata(environment: TaskEnvironment, outcome: StepOutcome | None) -> None:
    """Raises `RuleBroken` for metadata that the outcome's own validation lets through."""
    if outcome is None or outcome.metadata is None or outcome.terminated:
        return
    if problem := _extra_env_info_problem(environment, outcome.metadata):
        raise _RuleBroken("metadata", f"the next step would not accept it as extra_env_info: {problem}")


def _difference_in(alone: PlayResult, at_once: PlayResult, turn: int) -> str | None:
    """Names the fields of the outcome of one turn that differ, if any. Metrics may differ: they may hold times."""
    expected, found = alone.turns[turn].outcome, at_once.turns[turn].outcome
    compared = [field.name for field in fields(expected) if field.name != "metrics"]
    names = [name for name in compared if getattr(expected, name) != getattr(found, name)]
    return f"its {', '.join(names)} differed" if names else None


def _broken_by(error: Exception, rule: Rule, subject: str) -> _RuleBroken:
    """The rule that a call breaks which has raised this: one of its own, or that it must not raise."""
    if isinstance(error, _RuleBroken):
        return error
    if isinstance(error, OutcomeInvalid):
        return _RuleBroken("outcome", str(error).rstrip("."))
    if isinstance(error, StepTooSlow):
        return _RuleBroken(rule, f"{'the step' if rule == 'step' else subject} {error}")
    first_line = next(iter(str(error).splitlines()), "")
    described = f"{type(error).__name__}: {first_line}".rstrip(".: ")
    return _RuleBroken(rule, f"{subject} raised {described}", _traceback_of(error))


def _traceback_of(error: Exception) -> str:
    """Traceback without the frames of this package before the environment's own."""
    frames = error.__traceback__
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent == HERE:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _shortened(reply: Reply) -> str:
    text = reply if isinstance(reply, str) else reply["content"]
    return repr(text) if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]!r}..."


# Rules that need no step. Each function yields, or returns, what is wrong.


def attribute_problems(environment: TaskEnvironment) -> Iterator[str]:
    """Problems with its class attributes, and a missing step."""
    if not has_a_step(type(environment)):
        yield "it implements neither step nor step_batch nor open_session"
    for name, attribute in ATTRIBUTES.items():
        try:
            attribute.validate_python(getattr(environment, name, None), strict=True)
        except ValidationError as error:
            yield problems_of(error, name)
            if name == "ExtraEnvInfo":
                return
    try:
        environment.ExtraEnvInfo.model_json_schema()
    except Exception as error:  # noqa: BLE001 - pydantic and the model's own code raise many types
        yield f"ExtraEnvInfo has no JSON schema, which GET /tasks shows: {type(error).__name__}: {error}"


def _example_problems(environment: TaskEnvironment, count: int, seed: int) -> Iterator[str]:
    """Problems with the example samples taken together."""
    samples, again = environment.example_samples(count, seed), environment.example_samples(count, seed)
    call = f"example_samples({count}, seed={seed}) returned"
    if samples != again:
        yield f"{call} different samples the second time"
    if len(samples) != count:
        yield f"{call} {len(samples)} samples"
    if (different := _different_samples(samples)) < len(samples):
        yield f"{call} only {different} different samples"


def _different_samples(samples: list[JsonObject]) -> int:
    return len({json.dumps(sample, sort_keys=True, default=repr) for sample in samples})


def _many_examples_problems(environment: TaskEnvironment, seed: int) -> Iterator[str]:
    """Problems with the example samples when a request asks for many."""
    samples, others = (environment.example_samples(MANY_SAMPLES, each) for each in (seed, seed + 1))
    call = f"example_samples({MANY_SAMPLES}, seed={seed})"
    if len(samples) != MANY_SAMPLES:
        yield f"{call} returned {len(samples)} samples; repeat them where there are no more"
    if samples == others and _different_samples(samples) >= FEW_SAMPLES:
        yield f"{call} returned the same samples as with seed {seed + 1}; choose or order them by the seed"
    problems = ((place, next(_sample_problems(environment, each), None)) for place, each in enumerate(samples))
    if found := next(((place, problem) for place, problem in problems if problem), None):
        yield f"sample {found[0]} of {call} is not a sample: {found[1]}"


def _sample_problems(environment: TaskEnvironment, sample: Any) -> Iterator[str]:
    """Problems with one sample, posted to the service as it is."""
    try:
        JSON_OBJECT.validate_python(sample)
    except ValidationError as error:
        yield f"it is not JSON: {problems_of(error, 'sample')}"
        return
    try:
        if not (prompt_of(sample) or has_a_start(type(environment))):
            yield "The sample has no prompt: give it messages, at least one"
    except ValueError as error:
        yield str(error).rstrip(".")
    if problem := _extra_env_info_problem(environment, sample.get("extra_env_info") or {}):
        yield problem


def _extra_env_info_problem(environment: TaskEnvironment, extra_env_info: dict[str, Any]) -> str | None:
    """Reason why `extra_env_info` is not valid for `ExtraEnvInfo`, if it is not."""
    try:
        environment.ExtraEnvInfo.model_validate(extra_env_info)
    except ValidationError as error:
        return f"ExtraEnvInfo does not accept it: {problems_of(error, 'extra_env_info')}"
    except Exception as error:  # noqa: BLE001 - a validator of the environment's own raises what it wants
        return f"ExtraEnvInfo raised {type(error).__name__}: {error}"
    return None
