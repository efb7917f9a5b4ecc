"""Generates the recorded tokens of a rollout again, each generation by itself, on the replica that generated then.

Each has the recorded tokens before it as its prompt, also after one that differs. Guarantees: nothing is compared that
other weights made than those of the record; what could not be compared is told, with the reason, and never counted as
equal.
"""

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol
from uuid import uuid4

from deployments.failures import RolloutFailure
from deployments.policy.failures import PolicyNotCurrent
from deployments.protocols.chat import ChatTokenizer
from deployments.protocols.generation import (
    Generation,
    GenerationRequest,
    SamplingOptions,
    ScoredPrompt,
    ScoringRequest,
)
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.base import VersionLabel, label_of
from rollout_client.contract.policy import PolicyState, VersionInfo
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.replay import ReplayedGeneration, ReplayResponse, ReplayVerdict, TokenDifference
from rollout_client.contract.rollouts import SampleResult
from service.access.keys import Caller
from service.remote.policy import RemotePolicy
from service.replay.recorded_parts import (
    ROUNDING,
    SCORED_WITHIN,
    PartComparison,
    RecordedPart,
    ReplayableRollout,
    compared,
)
from service.rollouts.episode_records import ServiceBuild
from service.rollouts.retries import RetryBudget, with_retries
from service.scheduling.priority import share_of

RETRIES = 3
WORST_LAST: Sequence[ReplayVerdict] = ("equal", "equal_ids", "scored", "not_compared", "parts")
INTERRUPTED = "The generation was interrupted."
logger = logging.getLogger("rollout_service.replay")

Serving = Mapping[VersionLabel, VersionLabel]
ServedWeights = Callable[[Iterable[VersionLabel]], Awaitable[tuple[Serving, Mapping[VersionLabel, str]]]]
"""For each label the version that has its weights now, or why there is none: `served_weights` of a policy store."""


class ReplayReplicas(Protocol):
    """The generator replicas, as replays call them. `RemoteGenerator` implements it."""

    def replicas(self) -> Sequence[str]:
        """Those that run, by their ids."""
        ...

    async def generate_on(self, replica: str, request: GenerationRequest) -> Generation:
        """Generates on this replica, in turn with all others by the share of the request. Raises `RolloutFailure`."""
        ...


class Replayer:
    """The replays of one ingress replica.

    Args:
        build: the software that runs now.
    """

    def __init__(
        self,
        replicas: ReplayReplicas,
        weights: ServedWeights,
        tokenizer: ChatTokenizer,
        engine: GeneratorDescription,
        build: ServiceBuild,
    ) -> None:
        self._replicas = replicas
        self._weights = weights
        self._tokenizer = tokenizer
        self._engine = engine
        self._build = build

    def read(self, result: SampleResult) -> ReplayableRollout:
        """Raises `RequestProblem` (422) if it cannot be generated again."""
        return ReplayableRollout(result, self._engine)

    async def replay(self, recorded: ReplayableRollout, request_id: str, caller: Caller) -> ReplayResponse:
        """Generates the parts again, one after the other.

        Raises:
            PolicyNotCurrent: none of the versions that made its tokens can be had now.
            PolicyStoreLost: the policy store does not answer.
            GenerationLost: no generator replica runs.
        """
        labels = {part.version for part in recorded.parts if part.version is not None}
        serving, reasons = await self._weights(labels)
        if labels and not serving:
            raise PolicyNotCurrent(
                *(
                    FieldProblem(field="rollout.message_log", message=reason, value=label_of(*label))
                    for label, reason in reasons.items()
                )
            )
        origins = recorded.record.generations
        unique_id = f"replay-{uuid4().hex[:16]}"
        base = GenerationRequest(
            generation_id="",
            prompt_token_ids=(),
            max_new_tokens=1,
            stop_strings=(),
            sampling=SamplingOptions(),
            rollout_id=unique_id,
            group=unique_id,
            request_id=request_id,
            share=share_of(unique_id, "interactive", caller),
        )
        # The cache of the replica that generated then may have the prefixes as they were computed then.
        replicas, preferred = self._replicas.replicas(), origins[0].replica if origins else ""
        replica = preferred if preferred in replicas else next(iter(replicas), "")
        replayed = list[ReplayedGeneration]()
        for part in recorded.parts:
            reason = None if part.version is None else reasons.get(part.version)
            if reason is not None:
                replayed.append(_not_compared(part, reason))
            else:
                replayed.append(await self._replayed(recorded, part, base, serving, replica))
        return self._response(recorded, request_id, replayed)

    async def _replayed(
        self,
        recorded: ReplayableRollout,
        part: RecordedPart,
        base: GenerationRequest,
        serving: Serving,
        replica: str,
    ) -> ReplayedGeneration:
        way, reason = recorded.way(part)
        if way is None or part.version is None:
            return _not_compared(part, str(reason))
        version = serving[part.version]
        request = recorded.request(part, replace(base, policy=version.name, weight_version=version.number))
        ids, logprobs = recorded.recorded_ids(part), recorded.logprobs(part)
        now_ids: Sequence[int] = ids
        batch_size = None
        try:
            if way == "scored":
                # Nothing comes before the first token of a log.
                unscored = 1 if part.before == 0 else 0
                prompt = recorded.token_ids[: part.before + part.length]
                scored = await self._score(request, prompt, part.before + unscored, replica)
                now_logprobs: Sequence[float] = [*logprobs[:unscored], *scored]
            else:
                made = await self._generation(request, replica)
                now_ids, now_logprobs, batch_size = made.token_ids, made.logprobs, made.batch_size or None
            within = SCORED_WITHIN if way == "scored" else ROUNDING
            found = compared(ids, logprobs, now_ids, now_logprobs, part.is_whole, within)
            place = found.logprobs_part_at if found.ids_part_at is None else found.ids_part_at
            difference = None
            if place is not None:
                difference = self._difference(recorded, part, place, now_ids, now_logprobs)
        except RolloutFailure as failure:
            logger.info("A generation was not made again: %s", failure, extra={"request_id": base.request_id})
            return _not_compared(part, str(failure), replica)
        verdict: ReplayVerdict = "scored" if way == "scored" else "equal"
        if difference is not None:
            verdict = "equal_ids" if way == "drawn" and found.ids_part_at is None else "parts"
        return _outcome(
            part, verdict, found, difference=difference, replica=replica, batch_size=batch_size, reason=reason
        )

    def _difference(
        self,
        recorded: ReplayableRollout,
        part: RecordedPart,
        place: int,
        now_ids: Sequence[int],
        now_logprobs: Sequence[float],
    ) -> TokenDifference:
        ids, logprobs = recorded.recorded_ids(part), recorded.logprobs(part)
        before = recorded.token_ids[: part.before + place]
        recorded_id = ids[place] if place < len(ids) else None
        replayed_id, replayed_logprob = (now_ids[place], now_logprobs[place]) if place < len(now_ids) else (None, None)
        return TokenDifference(
            message=part.message,
            token=part.start + place,
            recorded_id=recorded_id,
            recorded_text=self._text(recorded_id, before),
            recorded_logprob=logprobs[place] if place < len(ids) else None,
            replayed_id=replayed_id,
            replayed_text=self._text(replayed_id, before),
            replayed_logprob=replayed_logprob,
        )

    def _text(self, token_id: int | None, before: Sequence[int]) -> str | None:
        return None if token_id is None else self._tokenizer.pieces([token_id], before)[0]

    async def _score(
        self, request: GenerationRequest, token_ids: Sequence[int], start: int, replica: str
    ) -> Sequence[float]:
        scoring = ScoringRequest(
            generation_id=f"{request.generation_id}-score-{uuid4().hex[:8]}",
            prompt_token_ids=token_ids,
            max_new_tokens=1,
            stop_strings=(),
            sampling=SamplingOptions(),
            weight_version=request.weight_version,
            rollout_id=request.rollout_id,
            group=request.group,
            request_id=request.request_id,
            share=request.share,
            policy=request.policy,
            start=start,
        )
        scored = await self._generation(scoring, replica)
        assert isinstance(scored, ScoredPrompt)
        return scored.prompt_logprobs

    async def _generation(self, request: GenerationRequest, replica: str) -> Generation:
        """Raises `RolloutFailure`, also for a generation in whose middle the weights have changed."""

        async def generate() -> Generation:
            generation = await self._replicas.generate_on(replica, request)
            if generation.finish_reason == "abort":
                raise generation.failure or RolloutFailure(INTERRUPTED)
            _refuse_other_weights(generation, request)
            return generation

        log_fields = {"request_id": request.request_id, "rollout_id": request.rollout_id}
        return await with_retries(generate, RetryBudget(log_fields, RETRIES))

    def _response(
        self, recorded: ReplayableRollout, request_id: str, replayed: list[ReplayedGeneration]
    ) -> ReplayResponse:
        verdicts: list[ReplayVerdict] = [each.verdict for each in replayed] or ["not_compared"]
        verdict = max(verdicts, key=WORST_LAST.index)
        differences = [each.largest_difference for each in replayed if each.largest_difference is not None]
        return ReplayResponse(
            request_id=request_id,
            rollout_id=recorded.result.rollout_id,
            verdict=verdict,
            tokens=sum(each.tokens for each in replayed),
            largest_difference=max(differences, default=None),
            difference=next((each.difference for each in replayed if each.verdict == verdict), None),
            generations=replayed,
            notes=list(self._notes(recorded, replayed)),
        )

    def _notes(self, recorded: ReplayableRollout, replayed: Iterable[ReplayedGeneration]) -> Iterator[str]:
        record, now = recorded.record, self._build
        if record.service_version != now.service_version:
            yield f"Service version {record.service_version or 'unknown'} played it, and {now.service_version} runs."
        if record.engine != now.engine:
            yield "The engine has another version or other settings than the one that played it."
        if self._engine.is_batch_invariant:
            yield "The engine is batch-invariant: other generations beside one do not change its numbers."
        replicas = {each.replica for each in replayed if each.replica}
        others = sorted({origin.replica for origin in record.generations if origin.replica} - replicas)
        if others and replicas:
            yield f"Replica {', '.join(sorted(replicas))} replayed what {', '.join(others)} has generated."
        busiest = max((each.batch_size or 0 for each in replayed), default=0)
        if busiest > 1:
            yield f"The engine had up to {busiest} generations at once: that alone may change log-probabilities."


def _outcome(
    part: RecordedPart, verdict: ReplayVerdict, found: PartComparison | None = None, **further: Any
) -> ReplayedGeneration:
    return ReplayedGeneration(
        message=part.message,
        start=part.start,
        end=part.end,
        weight_version=None if part.version is None else label_of(*part.version),
        verdict=verdict,
        tokens=0 if found is None else found.compared,
        largest_difference=None if found is None else found.largest_difference,
        mean_difference=None if found is None else found.mean_difference,
        **further,
    )


def _not_compared(part: RecordedPart, reason: str, replica: str | None = None) -> ReplayedGeneration:
    return _outcome(part, "not_compared", reason=reason, replica=replica)


def _refuse_other_weights(generation: Generation, request: GenerationRequest) -> None:
    """Raises `RolloutFailure` unless the version that the request demands has made all of it."""
    demanded = label_of(request.policy, request.weight_version or 0)
    spans = [span.version for span in generation.weight_versions if span.end > span.start]
    made_by = [generation.weight_version] if isinstance(generation, ScoredPrompt) else spans
    if generation.token_ids and not made_by:
        raise RolloutFailure("The engine does not say which version generated.")
    if other := next((version for version in made_by if version != demanded), None):
        raise RolloutFailure(f"Version {other} took the place of {demanded} in the middle of the replay.")


async def served_weights(
    policy: RemotePolicy, labels: Iterable[VersionLabel]
) -> tuple[Serving, Mapping[VersionLabel, str]]:
    """For each label the version that has its weights now, or why there is none. Raises `PolicyStoreLost`."""
    wanted = set(labels)
    if not wanted:
        return {}, {}
    state = await policy.store.state(0.0)
    found = {label: serving(label, state) for label in wanted}
    served = {label: now for label, now in found.items() if isinstance(now, VersionLabel)}
    return served, {label: why for label, why in found.items() if isinstance(why, str)}


def serving(label: VersionLabel, state: PolicyState) -> VersionLabel | str:
    """The version that has the weights of `label` now: itself, or one that goes back to it.

    If none has, a sentence that says why, and what to do.
    """
    if label.name is not None:
        return _serving_named(label, state)
    versions = {info.version: info for info in state.versions}
    wanted = _weights_of(label.number, versions)
    if wanted == _weights_of(state.current, versions):
        return VersionLabel(None, state.current)
    for named in state.named:
        served = None if named.base is None else (named.checksum, _weights_of(named.base, versions))
        if named.current is not None and wanted == served:
            return VersionLabel(named.name, named.current)
    begin = f"version {label.number} made tokens of it, and version {state.current} is current"
    if label.number not in versions:
        return f"{begin}; the service has the weights of {', '.join(map(str, versions))} alone"
    is_adapter = versions[label.number].kind == "adapter"
    name, weights = (" --name again", "serve its adapter") if is_adapter else ("", "make its weights current")
    return f"{begin}; {weights} again (`rollout policy rollback {label.number}{name}`), and then replay it"


def _serving_named(label: VersionLabel, state: PolicyState) -> VersionLabel | str:
    current = {named.name: named.current for named in state.named}
    if current.get(label.name or "") == label.number:
        return label
    served = [label_of(name, number) for name, number in current.items() if number is not None]
    kept = f"served are {', '.join(served)}" if served else "no named policy is served"
    return f"{label_of(*label)} made tokens of it, and {kept}; of a named policy only the current version is kept"


def _weights_of(version: int, versions: Mapping[int, VersionInfo]) -> Hashable:
    """Equal for versions with equal weights. Those of an adapter are on their base."""
    while (info := versions.get(version)) is not None and info.rollback_of is not None and info.kind != "adapter":
        version = info.rollback_of
    if info is None or info.checksum is None:
        return version
    return (info.checksum, _weights_of(info.base or 0, versions)) if info.kind == "adapter" else info.checksum
