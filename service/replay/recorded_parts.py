"""Recorded tokens of a rollout as generations that can be made again, and how one compares with its record. No I/O.

A part is what one version made in one generation. Guarantees: the parts cover each recorded generation without gaps, in
order; a part whose tokens cannot be drawn again says why; whatever a caller has sent, reading it ends in parts or in
one problem that names a field.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Literal

from pydantic import ValidationError

from deployments.protocols.generation import GenerationRequest, SamplingOptions, packed_ids
from deployments.protocols.images import image_spans
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.base import VersionLabel, read_label
from rollout_client.contract.messages import GivenMessage, Message, WeightVersionSpan
from rollout_client.contract.origins import GenerationOrigin
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.rollouts import SampleResult
from service.problems import RequestProblem, invalid_request, unknown_token
from service.rollouts.episode_records import sampling_of_turn

Way = Literal["drawn", "scored"]
PLAIN_SAMPLING = SamplingOptions()
ROUNDING = 1e-5
"""Log-probabilities are float32, and JSON or a file may round them."""
SCORED_WITHIN = 0.5
"""How far a token's log-probability may be from the one that a score gives it: computed at once, and not one after the
other, it differs by rounding (docs/weights.md, "Noise or a fault")."""
NOT_PLAIN = (
    "it has no seed and was not greedy, so its tokens cannot be drawn again; the engine scores at temperature 1 alone, "
    "without top-p, top-k and min-p"
)
NOT_DRAWN = "it has no seed and was not greedy: its tokens are scored, and not drawn again"
DRAWS_UNKNOWN = "the weights changed in the middle of its generation, and a seed draws from the beginning of one"
SHOWS_IMAGES = "; what shows images cannot be scored"
VERSION_UNKNOWN = "the log does not say which version made them"


@dataclass(frozen=True, slots=True)
class RecordedPart:
    """Tokens `[start, end)` of a message."""

    message: int
    start: int
    end: int
    before: int
    """Tokens of the log before them."""
    turn: int
    turn_tokens: int
    """Tokens of the message when its generation began: the seed is derived from it."""
    most_tokens: int
    """`max_new_tokens` of its generation, less its tokens before the part."""
    stop_strings: tuple[str, ...]
    version: VersionLabel | None
    is_whole: bool
    """Whether the generation ended by itself with the last of these tokens. Otherwise something has cut it."""
    follows_other_version: bool
    """Whether its generation has tokens before it, of another version."""

    @property
    def length(self) -> int:
        return self.end - self.start


class ReplayableRollout:
    """A result, read as generations.

    Args:
        engine: bounds what it may hold.
    """

    def __init__(self, result: SampleResult, engine: GeneratorDescription) -> None:
        """Raises `RequestProblem` (422) if it cannot be generated again, or is not a rollout of this service."""
        if result.replay is None:
            raise _refused("replay", NO_REPLAY, None)
        self.result = result
        self.record = record = result.replay
        self.sampling = SamplingOptions(
            record.temperature, record.top_p, record.top_k, record.min_p, record.ignore_eos, record.seed
        )
        self.token_ids = packed_ids(_checked_ids(result.message_log, engine))
        self.images = image_spans(result.message_log)
        self.shows_images = bool(self.images) or not set(engine.image_token_ids).isdisjoint(self.token_ids)
        """Then nothing of it can be scored."""
        self.parts = list(self._parts())

    def logprobs(self, part: RecordedPart) -> Sequence[float]:
        return (self.result.message_log[part.message].generation_logprobs or [])[part.start : part.end]

    def recorded_ids(self, part: RecordedPart) -> Sequence[int]:
        return self.token_ids[part.before : part.before + part.length]

    def way(self, part: RecordedPart) -> tuple[Way | None, str | None]:
        """How the part can be compared, and why not by drawing it again; `None` if it cannot."""
        sampling = self.sampling
        if part.version is None:
            return None, VERSION_UNKNOWN
        if sampling.temperature == 0 or (sampling.seed is not None and not part.follows_other_version):
            return "drawn", None
        is_plain = replace(sampling, ignore_eos=False, seed=None) == PLAIN_SAMPLING
        why = (NOT_DRAWN if is_plain else NOT_PLAIN) if sampling.seed is None else DRAWS_UNKNOWN
        if self.shows_images:
            return None, why + SHOWS_IMAGES
        return ("scored" if is_plain else None), why

    def request(self, part: RecordedPart, base: GenerationRequest) -> GenerationRequest:
        """The generation of the part again; `base` has its names, its share and its version."""
        return replace(
            base,
            generation_id=f"{base.rollout_id}-{part.message}-{part.start}",
            prompt_token_ids=self.token_ids[: part.before],
            max_new_tokens=part.most_tokens if part.is_whole else part.length,
            stop_strings=part.stop_strings,
            sampling=sampling_of_turn(self.sampling, part.turn, part.turn_tokens),
            turn=part.turn,
            images=tuple(image for image in self.images if image.end <= part.before),
        )

    def _parts(self) -> Iterator[RecordedPart]:
        log, origins, record = self.result.message_log, self.record.generations, self.record
        turns = [0, *accumulate(int(message.generation_logprobs is not None) for message in log)]
        starts = [0, *accumulate(len(message.token_ids) for message in log)]
        stop_strings: tuple[str, ...] = ()
        for number, (origin, following) in enumerate(zip(origins, [*origins[1:], None], strict=True)):
            _refuse_other_place(origin, number, origins[number - 1] if number else None, log)
            if origin.stop_strings is not None:
                stop_strings = tuple(origin.stop_strings)
            message = log[origin.message]
            goes_on = following is not None and following.message == origin.message
            was_cut = goes_on or message.finish_reason is None
            before = starts[origin.message]
            room = record.max_seq_len - before - origin.start
            most = min(room, (record.max_new_tokens or room + origin.start) - origin.start)
            if most < origin.end - origin.start:
                field = f"replay.generations[{number}]"
                raise _refused(field, f"it has more tokens than its max_new_tokens and max_seq_len allow, {most}", None)
            spans = list(_spans_within(message.weight_versions or (), origin.start, origin.end))
            for start, end, label in spans:
                yield RecordedPart(
                    message=origin.message,
                    start=start,
                    end=end,
                    before=before + start,
                    turn=turns[origin.message],
                    turn_tokens=origin.start,
                    most_tokens=most - (start - origin.start),
                    stop_strings=stop_strings,
                    version=label,
                    is_whole=len(spans) == 1 and not was_cut,
                    follows_other_version=start > origin.start,
                )


CHECKED_FIELDS = {"role", "content", "token_ids", "generation_logprobs", "mm_ranges"}
"""The fields of a message that a replay reads, and that must go with each other."""
NO_REPLAY = (
    "it has none: an agent has played the rollout, its request generated nothing, or an older service has played it; "
    "only a rollout whose turns the service generates itself can be generated again"
)


def _checked_ids(log: Sequence[Message], engine: GeneratorDescription) -> Sequence[int]:
    """The token ids of the log. Raises `RequestProblem`."""
    token_ids = list(chain.from_iterable(message.token_ids for message in log))
    if len(token_ids) > engine.max_model_len:
        said = f"it has {len(token_ids)} tokens, and the model takes at most {engine.max_model_len}"
        raise _refused("message_log", said, len(token_ids))
    for place, message in enumerate(log):
        if unknown := unknown_token(f"rollout.message_log[{place}].token_ids", message.token_ids, engine.vocab_size):
            raise invalid_request(unknown)
        try:
            GivenMessage.model_validate(message.model_dump(include=CHECKED_FIELDS, exclude_unset=True))
        except ValidationError as error:
            [problem, *_] = error.errors(include_url=False)
            raise _refused(f"message_log[{place}]", problem["msg"].removeprefix("Value error, "), None) from error
    return token_ids


def _refuse_other_place(
    origin: GenerationOrigin, number: int, last: GenerationOrigin | None, log: Sequence[Message]
) -> None:
    """Raises `RequestProblem` unless the generation is at a place of the log, after the one before."""
    field = f"replay.generations[{number}]"
    if not 0 <= origin.message < len(log) or log[origin.message].generation_logprobs is None:
        raise _refused(f"{field}.message", "message_log has no generated message there", origin.message)
    first = last.end if last is not None and last.message == origin.message else 0
    in_order = last is None or last.message <= origin.message
    if not (in_order and first <= origin.start < origin.end <= len(log[origin.message].token_ids)):
        said = f"[{origin.start}, {origin.end}) of message {origin.message} is not a place after the one before it"
        raise _refused(field, said, origin.start)


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


def _refused(field: str, message: str, value: str | int | None) -> RequestProblem:
    return invalid_request(FieldProblem(field=f"rollout.{field}", message=message, value=value))


@dataclass(frozen=True, slots=True)
class PartComparison:
    """A part of the log against what was generated now."""

    ids_part_at: int | None
    """The first place of the part at which the ids differ, or one of both has ended; `None` if they are equal."""
    logprobs_part_at: int | None
    """The first place before that at which the log-probabilities differ by more than allowed."""
    largest_difference: float | None
    mean_difference: float | None
    compared: int
    """How many log-probabilities were compared."""


def compared(
    ids: Sequence[int],
    logprobs: Sequence[float],
    now_ids: Sequence[int],
    now_logprobs: Sequence[float],
    is_whole: bool,
    within: float = ROUNDING,
) -> PartComparison:
    """Compares recorded tokens with those of now.

    Args:
        is_whole: whether the recorded generation has ended by itself, so that now there may not be more tokens either.
        within: largest difference of two log-probabilities that counts as none. NaN is a difference.
    """
    shorter = min(len(ids), len(now_ids))
    same = next((place for place in range(shorter) if ids[place] != now_ids[place]), shorter)
    has_ended = same == len(ids) and (not is_whole or len(now_ids) == len(ids))
    differences = [abs(logprobs[place] - now_logprobs[place]) for place in range(same)]
    return PartComparison(
        None if has_ended else same,
        next((place for place, difference in enumerate(differences) if not difference <= within), None),
        max(differences) if differences else None,
        math.fsum(differences) / same if differences else None,
        same,
    )
