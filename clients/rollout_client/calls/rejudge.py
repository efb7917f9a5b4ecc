"""Stored rollouts through an environment as it is now, as requests of `POST /rollout` that generate nothing. No I/O.

A posted log that ends with a complete response is stepped before anything is generated, and ends with that step where
`max_rollout_turns` is its number of responses. So each turn of a rollout is one posted log: with the responses that it
had, and the `extra_env_info` that the step before has returned.

Guarantees: a reward is given only if every turn was judged as it was played then: the environment has answered each
response but the last one with the same messages, and knew what it knew then. Otherwise a sentence says why not.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from rollout_client.calls.json_values import as_given, json_value
from rollout_client.calls.rollouts import Samples
from rollout_client.contract.messages import GivenMessage, JsonObject, Message
from rollout_client.contract.rollouts import SampleResult
from rollout_client.errors import RequestRejected
from rollout_client.results import final_reward, generated_places

ROLLOUTS_PER_REQUEST = 128
TOKENS_PER_REQUEST = 2_000_000
"""A token takes some 30 bytes of JSON, with its log-probability, and a body may have 256 MiB by default."""
NO_RESPONSE = "it has no response"
NOT_COMPLETE = "a response of it is not complete: it was interrupted"
NOT_STEPPED = "not every response of it was judged by itself, as in the run of an agent"
INFO_UNKNOWN = (
    "its environment changes extra_env_info in its steps, and a result has it as the last step has left it: "
    "give the samples that were played"
)
NO_SAMPLE = "none of the given samples has its row, id or idx"
OTHER_SAMPLE = "the given sample of its row, id or idx has another task or prompt, or the environment begins the prompt"
GOES_ON = "the environment as it is now does not end it, so its reward is not final"
INDEX = re.compile(r"^samples\[(\d+)\]\.?(.*)$")


@dataclass(frozen=True, slots=True)
class RejudgedRollout:
    """A stored rollout, and its reward by the environment as it is now."""

    sample: SampleResult
    """As it was stored."""
    task_name: str
    """The task that has judged it."""
    old: float | None
    """Its final reward as it was stored, over all of its turns; `None` if it had none."""
    new: float | None
    """`None` if it cannot be judged again."""
    rewards: Mapping[str, float]
    """`new` by name."""
    turns: int
    """Number of responses that were judged; fewer than the rollout has if the environment ends it sooner now."""
    reason: str | None
    """Why it cannot be judged again, as the end of a sentence."""

    @property
    def difference(self) -> float | None:
        """`None` without an old or a new reward; 0 for what only rounding tells apart."""
        if self.old is None or self.new is None:
            return None
        return 0.0 if math.isclose(self.old, self.new, rel_tol=1e-9, abs_tol=1e-9) else self.new - self.old


@dataclass(frozen=True, slots=True)
class Rejudgement:
    """Stored rollouts with their old and new rewards, in their order."""

    rollouts: list[RejudgedRollout]

    @property
    def compared(self) -> list[RejudgedRollout]:
        """Those with an old and a new reward."""
        return [rollout for rollout in self.rollouts if rollout.difference is not None]

    @property
    def changed(self) -> list[RejudgedRollout]:
        return [rollout for rollout in self.rollouts if rollout.difference]

    @property
    def old_sum(self) -> float:
        """Over those with an old and a new reward."""
        return math.fsum(cast(float, rollout.old) for rollout in self.compared)

    @property
    def new_sum(self) -> float:
        """Over those with an old and a new reward."""
        return math.fsum(cast(float, rollout.new) for rollout in self.compared)

    @property
    def not_judged(self) -> dict[str, int]:
        """Number of rollouts by the reason for which they cannot be judged again."""
        return dict(Counter(rollout.reason for rollout in self.rollouts if rollout.reason is not None))


class Replay:
    """One rollout on its way through the environment.

    Args:
        given: the sample that was played. Without it, the `extra_env_info` of the result counts as the sample's.
    """

    def __init__(self, sample: SampleResult, task_name: str, given: Mapping[str, Any] | None) -> None:
        self.sample = sample
        self.task_name = task_name
        self.reason: str | None = None
        self.is_done = False
        self.turn = 0
        """Number of responses that were judged."""
        self.knows_info = given is not None
        self._info: Any = sample.extra_env_info if given is None else given.get("extra_env_info", {})
        self._places = generated_places(sample)
        self.tokens = sum(len(message.token_ids) for message in sample.message_log)
        self._rewards: defaultdict[str, float] = defaultdict(float)
        self._turn_rewards: list[float] = []
        responses = [sample.message_log[place] for place in self._places]
        if not responses:
            self.refuse(NO_RESPONSE)
        elif any(response.reward is None for response in responses[:-1]) or sample.branches:
            self.refuse(NOT_STEPPED)
        elif any(response.finish_reason is None for response in responses):
            self.refuse(NOT_COMPLETE)

    @property
    def is_active(self) -> bool:
        return not self.is_done and self.reason is None

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def posted(self, info: JsonObject | None = None) -> JsonObject:
        """The sample to post for the turn that is due, by default with the `extra_env_info` that has come so far."""
        sample = self.sample
        log = sample.message_log[: self._places[self.turn] + 1]
        fields = set(GivenMessage.model_fields)
        return {
            "task_name": self.task_name,
            "message_log": [cast(Any, message.model_dump(exclude_unset=True, include=fields)) for message in log],
            "extra_env_info": self._info if info is None else info,
            "observation_format": sample.observation_format,
            **({} if sample.tools is None else {"tools": cast(Any, sample.tools)}),
            **({} if sample.chat_template_kwargs is None else {"chat_template_kwargs": sample.chat_template_kwargs}),
        }

    def add(self, stepped: SampleResult) -> None:
        """Takes what the service has returned for `posted`."""
        if final_reward(stepped) is None:
            self.refuse(f"turn {self.turn + 1} was not judged: {cause_of(stepped)}")
            return
        if not self.knows_info and stepped.extra_env_info != self._info:
            self.refuse(INFO_UNKNOWN)
            return
        self._info = stepped.extra_env_info
        for name, reward in stepped.rewards.items():
            self._rewards[name] += reward
        self._turn_rewards.append(cast(float, stepped.total_reward))
        end = self._places[self.turn] + 1
        self.turn += 1
        if stepped.terminated or self.turn == len(self._places):
            self.is_done = True
            if not stepped.terminated and self.sample.status not in ("truncated", "max_turns"):
                self.refuse(GOES_ON)
        elif said(stepped.message_log[end:]) != said(self.sample.message_log[end : self._places[self.turn]]):
            self.refuse(
                f"the environment answers turn {self.turn} otherwise now, and the next one is to its old answer"
            )

    def rejudged(self) -> RejudgedRollout:
        was_judged = self.is_done and self.reason is None
        return RejudgedRollout(
            sample=self.sample,
            task_name=self.task_name,
            old=self._old_reward(),
            new=sum(self._turn_rewards) if was_judged else None,
            rewards=dict(self._rewards) if was_judged else {},
            turns=self.turn,
            reason=self.reason,
        )

    def _old_reward(self) -> float | None:
        """The total of a rollout that was resumed counts only its last request: then it is that of its messages."""
        if final_reward(self.sample) is None or self.sample.metrics.turn_count == len(self._places):
            return final_reward(self.sample)
        rewards = [self.sample.message_log[place].reward for place in self._places]
        return None if None in rewards else sum(cast(list[float], rewards))


class Rejudging:
    """Decides what is posted next until every rollout is judged or refused.

    Without the samples that were played, the first request of a task asks whether its environment leaves
    `extra_env_info` as it is: a step with that of the task's example must return it unchanged.

    Args:
        task_name: the task that judges; by default each rollout's own.
        samples: those that were played, found by `input_row`, `id` or `idx`.
        examples: the `extra_env_info` of each task's example.
    """

    def __init__(
        self,
        rollouts: Iterable[SampleResult],
        task_name: str | None,
        samples: Samples | None,
        examples: Mapping[str, JsonObject],
    ) -> None:
        finder = None if samples is None else SampleFinder(samples)
        self._replays = [replay_of(sample, task_name, finder) for sample in rollouts]
        self._examples = examples
        self._to_probe = list(dict.fromkeys(replay.task_name for replay in self._replays if not replay.knows_info))
        self._posted: list[Replay] = []
        self._is_probe = False

    def next_request(self) -> tuple[list[JsonObject], int] | None:
        """The samples to post and their `max_rollout_turns`; `None` when all are judged."""
        self._is_probe = False
        active = [replay for replay in self._replays if replay.is_active]
        while self._to_probe:
            task_name = self._to_probe.pop()
            of_task = [replay for replay in active if replay.task_name == task_name and not replay.knows_info]
            if of_task:
                self._posted, self._is_probe = of_task[:1], True
                return [of_task[0].posted(self._example(task_name))], 1
        if not active:
            return None
        turn = min(replay.turn for replay in active)
        due = [replay for replay in active if replay.turn == turn][:ROLLOUTS_PER_REQUEST]
        tokens = accumulate(replay.tokens for replay in due)
        self._posted = [replay for replay, sent in zip(due, tokens, strict=True) if sent <= TOKENS_PER_REQUEST] or due[
            :1
        ]
        return [replay.posted() for replay in self._posted], turn + 1

    def add(self, results: Sequence[SampleResult]) -> None:
        """Takes the answer of the request."""
        if not self._is_probe:
            for replay, result in zip(self._posted, results, strict=True):
                replay.add(result)
            return
        [probed], [result] = self._posted, results
        if final_reward(result) is None:
            self._refuse_task(probed.task_name, f"a step of the task's example failed: {cause_of(result)}")
        elif result.extra_env_info != self._example(probed.task_name):
            self._refuse_task(probed.task_name, INFO_UNKNOWN)

    def refuse(self, error: RequestRejected) -> None:
        """Takes the rollouts out that the service has refused. Raises `error` if it is not about rollouts."""
        found = [INDEX.match(problem.field) for problem in error.problem.errors]
        if not found or any(match is None or match[2] == "task_name" for match in found):
            raise error
        matches = cast(list[re.Match[str]], found)
        if self._is_probe:
            task_name = self._posted[0].task_name
            if not matches[0][2].startswith("message_log["):
                self._refuse_task(task_name, error.problem.errors[0].message)
                return
            self._to_probe.append(task_name)
        for match, problem in zip(matches, error.problem.errors, strict=True):
            self._posted[int(match[1])].refuse(f"{match[2]}: {problem.message}" if match[2] else problem.message)

    def result(self) -> Rejudgement:
        return Rejudgement([replay.rejudged() for replay in self._replays])

    def _example(self, task_name: str) -> JsonObject:
        """That of a task that is not listed is empty: the service refuses it, or its environment says how it goes."""
        return dict(self._examples.get(task_name, {}))

    def _refuse_task(self, task_name: str, reason: str) -> None:
        for replay in self._replays:
            if replay.task_name == task_name and not replay.knows_info:
                replay.refuse(reason)


def replay_of(sample: SampleResult, task_name: str | None, finder: "SampleFinder | None") -> Replay:
    name = task_name or sample.task_name
    if finder is None:
        return Replay(sample, name, None)
    given = finder.sample_of(sample)
    replay = Replay(sample, name, given or {})
    if given is None:
        replay.refuse(NO_SAMPLE)
    elif not is_of(sample, given):
        replay.refuse(OTHER_SAMPLE)
    return replay


class SampleFinder:
    """The samples that were played, by what a result has of them."""

    def __init__(self, samples: Samples) -> None:
        self._samples = json_value({"samples": [as_given(sample) for sample in samples]})["samples"]
        self._by_id = {sample["id"]: sample for sample in self._samples if sample.get("id") is not None}
        self._by_idx = {sample.get("idx", place): sample for place, sample in enumerate(self._samples)}

    def sample_of(self, result: SampleResult) -> Mapping[str, Any] | None:
        row = (result.model_extra or {}).get("input_row")
        if row is not None:
            return self._samples[row] if row < len(self._samples) else None
        return self._by_id.get(result.id) if result.id is not None else self._by_idx.get(result.idx)


def is_of(result: SampleResult, given: Mapping[str, Any]) -> bool:
    """Whether the rollout was played from this sample. Contents that are parts are compared by their text."""
    prompt = given.get("messages") or given.get("message_log") or []
    begun = [(message["role"], text_of(message.get("content"))) for message in prompt]
    first = (generated_places(result) or [len(result.message_log)])[0]
    return given.get("task_name", result.task_name) == result.task_name and begun == said(result.message_log[:first])


def text_of(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part["text"] for part in content)


def cause_of(result: SampleResult) -> str:
    return result.status if result.error is None else f"{result.error.kind} error: {result.error.message}"


def said(messages: Iterable[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]
