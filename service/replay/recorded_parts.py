"""Recorded tokens of a rollout as generations that can be made again. No I/O.

A part is what one version made in one generation. Guarantees: the parts cover each recorded generation without gaps, in
order; a part whose tokens cannot be drawn again says why; whatever a caller has sent, reading it ends in parts or in
one problem that names a field.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from pydantic import ValidationError

from deployments.protocols.generation import GenerationRequest, SamplingOptions, packed_ids
from deployments.protocols.images import image_spans
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.base import FieldProblem, VersionLabel, read_label
from rollout_client.contract.messages import GivenMessage, Message, WeightVersionSpan
from rollout_client.contract.origins import ReplayRecord
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import logs_of, turns_of
from service.problems import RequestProblem, invalid_request, unknown_token
from service.rollouts.episode_records import sampling_of_turn

NOT_DRAWN = (
    "it has no seed and was not greedy, so its tokens cannot be drawn again; POST /score has their log-probabilities"
)
DRAWS_UNKNOWN = "the weights changed in the middle of its generation, and a seed draws from the beginning of one"
VERSION_UNKNOWN = "the log does not say which version made them"
CHECKED_FIELDS = {"role", "content", "token_ids", "generation_logprobs", "mm_ranges"}
"""The fields of a message that a replay reads, and that must go with each other."""
NO_REPLAY = (
    "it has none: an agent has played the rollout, its request generated nothing, or an older service has played it; "
    "only a rollout whose turns the service generates itself can be generated again"
)


@dataclass(frozen=True, slots=True)
class RecordedPart:
    """Tokens `[start, end)` of a message."""

    message: int
    start: int
    end: int
    before: int
    """Tokens of the log before them."""
    version: VersionLabel | None
    request: GenerationRequest
    """The generation of them again, but for its names, its prompt and the version."""
    is_whole: bool
    """Whether the generation ended by itself with the last of these tokens. Otherwise something has cut it."""
    reason: str | None
    """Why they cannot be drawn again; `None` if they can."""


class ReplayableRollout:
    """A result, read as generations.

    Args:
        engine: bounds what it may hold.
    """

    def __init__(self, result: SampleResult, engine: GeneratorDescription) -> None:
        """Raises `RequestProblem` (422) if it cannot be generated again, or is not a rollout of this service."""
        if result.replay is None:
            raise _refused("replay", NO_REPLAY)
        self.result = result
        self.record = result.replay
        self.token_ids = packed_ids(_checked_ids(result.message_log, engine))
        self.images = image_spans(result.message_log)
        self.parts = list(_parts_of(result.message_log, turns_of(logs_of(result))[-1], result.replay))


def _parts_of(log: Sequence[Message], turns: Mapping[int, int], record: ReplayRecord) -> Iterator[RecordedPart]:
    sampling = SamplingOptions(
        record.temperature, record.top_p, record.top_k, record.min_p, record.ignore_eos, record.seed
    )
    begins = [0, *accumulate(len(message.token_ids) for message in log)]
    origins, stop_strings = record.generations, tuple[str, ...]()
    last, last_end = 0, 0
    for number, (origin, following) in enumerate(zip(origins, [*origins[1:], None], strict=False)):
        field = f"replay.generations[{number}]"
        if not last <= origin.message < len(log) or log[origin.message].generation_logprobs is None:
            raise _refused(f"{field}.message", "message_log has no generated message there, after the one before")
        message, first = log[origin.message], last_end if origin.message == last else 0
        if not first <= origin.start < origin.end <= len(message.token_ids):
            raise _refused(field, f"[{origin.start}, {origin.end}) of the message is not a place after the one before")
        last, last_end = origin.message, origin.end
        if origin.stop_strings is not None:
            stop_strings = tuple(origin.stop_strings)
        before = begins[origin.message]
        room = record.max_seq_len - before - origin.start
        most = min(room, (record.max_new_tokens or room + origin.start) - origin.start)
        if most < origin.end - origin.start:
            raise _refused(field, f"it has more tokens than its max_new_tokens and max_seq_len allow, {most}")
        was_cut = message.finish_reason is None or (following is not None and following.message == origin.message)
        spans = list(_spans_within(message.weight_versions or (), origin.start, origin.end))
        for start, end, version in spans:
            is_whole = len(spans) == 1 and not was_cut
            request = GenerationRequest(
                generation_id="",
                prompt_token_ids=(),
                max_new_tokens=most if is_whole else end - start,
                stop_strings=stop_strings,
                sampling=sampling_of_turn(sampling, turns[origin.message], origin.start),
                turn=turns[origin.message],
            )
            reason = None if sampling.temperature == 0 else _undrawn(sampling, is_first=start == origin.start)
            if version is None:
                reason = VERSION_UNKNOWN
            yield RecordedPart(origin.message, start, end, before + start, version, request, is_whole, reason)


def _undrawn(sampling: SamplingOptions, is_first: bool) -> str | None:
    """Why sampled tokens cannot be drawn again, of the first version of their generation or of a later one."""
    if sampling.seed is None:
        return NOT_DRAWN
    return None if is_first else DRAWS_UNKNOWN


def _checked_ids(log: Sequence[Message], engine: GeneratorDescription) -> Sequence[int]:
    """The token ids of the log. Raises `RequestProblem`."""
    token_ids = list(chain.from_iterable(message.token_ids for message in log))
    if len(token_ids) > engine.max_model_len:
        said = f"it has {len(token_ids)} tokens, and the model takes at most {engine.max_model_len}"
        raise _refused("message_log", said)
    for place, message in enumerate(log):
        if unknown := unknown_token(f"rollout.message_log[{place}].token_ids", message.token_ids, engine.vocab_size):
            raise invalid_request(unknown)
        try:
            GivenMessage.model_validate(message.model_dump(include=CHECKED_FIELDS, exclude_unset=True))
        except ValidationError as error:
            [problem, *_] = error.errors(include_url=False)
            raise _refused(f"message_log[{place}]", problem["msg"].removeprefix("Value error, ")) from error
    return token_ids


def _spans_within(
    spans: Sequence[WeightVersionSpan], start: int, end: int
) -> Iterator[tuple[int, int, VersionLabel | None]]:
    """The parts of `[start, end)` with their versions; `None` where no span says it."""
    place = start
    for span in sorted(spans, key=lambda span: span.start):
        first, last = max(span.start, place), min(span.end, end)
        if first >= last:
            continue
        if first > place:
            yield place, first, None
        yield first, last, read_label(span.version)
        place = last
    if place < end:
        yield place, end, None


def _refused(field: str, message: str) -> RequestProblem:
    return invalid_request(FieldProblem(field=f"rollout.{field}", message=message))
