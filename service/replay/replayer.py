"""Generates the recorded tokens of a rollout again, each generation by itself, on the replica that generated then.

Each has the recorded tokens before it as its prompt, also after one that differs. Guarantees: nothing is compared that
other weights made than those of the record; what could not be compared is told, with the reason, and never counted as
equal.
"""

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from deployments.failures import RolloutFailure
from deployments.policy.failures import PolicyNotCurrent
from deployments.protocols.chat import ChatTokenizer
from deployments.protocols.generation import Generation, GenerationRequest
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.base import FieldProblem, VersionLabel, label_of
from rollout_client.contract.policy import PolicyState, VersionInfo
from rollout_client.contract.records import ReplayedGeneration, ReplayResponse, ReplayVerdict, TokenDifference
from rollout_client.contract.rollouts import SampleResult
from service.access.keys import Caller
from service.remote.policy import RemotePolicy
from service.replay.recorded_parts import RecordedPart, ReplayableRollout
from service.rollouts.episode_records import ServiceBuild
from service.rollouts.retries import RetryBudget, with_retries
from service.scheduling.fair_queue import share_of

if TYPE_CHECKING:
    from service.remote.generator import RemoteGenerator

RETRIES = 3
ROUNDING = 1e-5
"""Log-probabilities are float32, and JSON or a file may round them."""
WORST_LAST: Sequence[ReplayVerdict] = ("equal", "equal_ids", "not_compared", "parts")
INTERRUPTED = "The generation was interrupted."
logger = logging.getLogger("rollout_service.replay")

Served = Mapping[VersionLabel, VersionLabel | str]
"""For each label the version that has its weights now, or a sentence that says why there is none."""


class Replayer:
    """The replays of one ingress replica.

    Args:
        weights: `served_weights` of a policy store.
        build: the software that runs now.
    """

    def __init__(
        self,
        replicas: "RemoteGenerator",
        weights: Callable[[Iterable[VersionLabel]], Awaitable[Served]],
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
        served = await self._weights({part.version for part in recorded.parts if part.version is not None})
        gone = {label_of(*label): reason for label, reason in served.items() if isinstance(reason, str)}
        if served and len(gone) == len(served):
            raise PolicyNotCurrent(
                *(
                    FieldProblem(field="rollout.message_log", message=reason, value=label)
                    for label, reason in gone.items()
                )
            )
        origins = recorded.record.generations
        # The cache of the replica that generated then may have the prefixes as they were computed then.
        replicas, preferred = self._replicas.replicas(), origins[0].replica if origins else ""
        replica = preferred if preferred in replicas else next(iter(replicas), "")
        unique_id = f"replay-{uuid4().hex[:16]}"
        names = {
            "rollout_id": unique_id,
            "group": unique_id,
            "request_id": request_id,
            "share": share_of(unique_id, "interactive", caller),
        }
        replayed = [await self._replayed(recorded, part, served, replica, names) for part in recorded.parts]
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

    async def _replayed(
        self, recorded: ReplayableRollout, part: RecordedPart, served: Served, replica: str, names: Mapping[str, Any]
    ) -> ReplayedGeneration:
        version = part.reason if part.version is None else served[part.version]
        outcome = ReplayedGeneration(
            message=part.message,
            start=part.start,
            end=part.end,
            weight_version=None if part.version is None else label_of(*part.version),
            verdict="not_compared",
            reason=version if isinstance(version, str) else part.reason,
        )
        if outcome.reason is not None or not isinstance(version, VersionLabel):
            return outcome
        outcome.replica = replica
        request = replace(
            part.request,
            generation_id=f"{names['rollout_id']}-{part.message}-{part.start}",
            prompt_token_ids=recorded.token_ids[: part.before],
            images=tuple(image for image in recorded.images if image.end <= part.before),
            policy=version.name,
            weight_version=version.number,
            **names,
        )
        try:
            now = await self._generation(request, replica)
            outcome.batch_size = now.batch_size or None
            self._compare(recorded, part, now, outcome)
        except RolloutFailure as failure:
            logger.info("A generation was not made again: %s", failure, extra={"request_id": request.request_id})
            outcome.reason = str(failure)
        return outcome

    def _compare(
        self, recorded: ReplayableRollout, part: RecordedPart, now: Generation, outcome: ReplayedGeneration
    ) -> None:
        """Compares a part with what was generated now, and says in the outcome where it differs first."""
        ids = recorded.token_ids[part.before : part.before + part.end - part.start]
        logprobs = (recorded.result.message_log[part.message].generation_logprobs or [])[part.start : part.end]
        shorter = min(len(ids), len(now.token_ids))
        same = next((place for place in range(shorter) if ids[place] != now.token_ids[place]), shorter)
        differences = [abs(logprobs[place] - now.logprobs[place]) for place in range(same)]
        outcome.tokens, outcome.largest_difference = same, max(differences, default=None)
        if same < len(ids) or (part.is_whole and len(now.token_ids) > len(ids)):
            outcome.verdict, place = "parts", same
        else:
            # A difference that is NaN is one too.
            beyond = (place for place, difference in enumerate(differences) if not difference <= ROUNDING)
            place = next(beyond, -1)
            outcome.verdict = "equal" if place < 0 else "equal_ids"
        if place < 0:
            return
        before = recorded.token_ids[: part.before + place]
        outcome.difference = TokenDifference(message=part.message, token=part.start + place)
        if place < len(ids):
            outcome.difference.recorded_id, outcome.difference.recorded_logprob = ids[place], logprobs[place]
            [outcome.difference.recorded_text] = self._tokenizer.pieces([ids[place]], before)
        if place < len(now.token_ids):
            now_id = outcome.difference.replayed_id = now.token_ids[place]
            outcome.difference.replayed_logprob = now.logprobs[place]
            [outcome.difference.replayed_text] = self._tokenizer.pieces([now_id], before)

    async def _generation(self, request: GenerationRequest, replica: str) -> Generation:
        """Raises `RolloutFailure`, also for a generation in whose middle the weights have changed."""
        demanded = label_of(request.policy, request.weight_version or 0)

        async def generate() -> Generation:
            generation = await self._replicas.generate_on(replica, request)
            if generation.finish_reason == "abort":
                raise generation.failure or RolloutFailure(INTERRUPTED)
            made_by = {span.version for span in generation.weight_versions if span.end > span.start}
            if generation.token_ids and made_by != {demanded}:
                raise RolloutFailure(f"Other weights took the place of version {demanded} in the middle of the replay.")
            return generation

        log_fields = {"request_id": request.request_id, "rollout_id": request.rollout_id}
        return await with_retries(generate, RetryBudget(log_fields, RETRIES))

    def _notes(self, recorded: ReplayableRollout, replayed: Iterable[ReplayedGeneration]) -> Iterator[str]:
        record, now = recorded.record, self._build
        if record.service_version != now.service_version:
            yield f"Service version {record.service_version or 'unknown'} played it, and {now.service_version} runs."
        if record.engine != now.engine:
            yield "The engine has another version or other settings than the one that played it."
        busiest = max((each.batch_size or 0 for each in replayed), default=0)
        if busiest > 1:
            yield f"The engine had up to {busiest} generations at once: that alone may change log-probabilities."


async def served_weights(policy: RemotePolicy, labels: Iterable[VersionLabel]) -> Served:
    """The versions that have the weights of these now. Raises `PolicyStoreLost`."""
    wanted = set(labels)
    state = await policy.store.state(0.0) if wanted else None
    return {} if state is None else {label: _serving(label, state) for label in wanted}


def _serving(label: VersionLabel, state: PolicyState) -> VersionLabel | str:
    """The version that has the weights of `label` now: itself, or one that goes back to it.

    If none has, a sentence that says why, and what to do.
    """
    if label.name is not None:
        if any((named.name, named.current) == label for named in state.named):
            return label
        return f"{label_of(*label)} made tokens of it, and of a named policy only the current version is kept"
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
    name = " --name again" if versions[label.number].kind == "adapter" else ""
    return f"{begin}; serve its weights again (`rollout policy rollback {label.number}{name}`), and then replay it"


def _weights_of(version: int, versions: Mapping[int, VersionInfo]) -> Hashable:
    """Equal for versions with equal weights. Those of an adapter are on their base."""
    while (info := versions.get(version)) is not None and info.rollback_of is not None and info.kind != "adapter":
        version = info.rollback_of
    if info is None or info.checksum is None:
        return version
    return (info.checksum, _weights_of(info.base or 0, versions)) if info.kind == "adapter" else info.checksum
