"""Tinker's sampling API: its requests as calls of text completions and of `/score`, their results as its client reads.

The client is `tinker` of PyPI. It reads results in protocol buffers alone, whose messages (`tinker_public.proto`) have
few fields; their arrays are numbers of four bytes. No I/O.

Guarantee: what a request asks for and is not here is refused. Nothing of it is ignored.
"""

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from deployments.protocols.generation import ScoredPrompt, packed_ids, packed_logprobs
from rollout_client.contract.base import NAME, NUMBER, FieldProblem, PolicyDemand, Priority, Strict
from rollout_client.contract.info import MOST_TOP_K
from rollout_client.contract.messages import TokenId
from service.problems import invalid_request, validation_problem
from service.rollout_requests.parsing import ParsedScoreRequest, ScoreBounds, sequence_problems

_RETRIES = 3
"""A sequence is scored again as often as a call of a model server is made again."""
_SCHEME = "tinker://"
_MODEL_PATH = re.compile(
    rf"{_SCHEME}(?:(?P<name>{NAME})(?:/(?:sampler_weights/)?(?P<number>{NUMBER}))?|(?P<unnamed>{NUMBER}))\Z"
)
_MODEL_PATHS = (
    f"send {_SCHEME}POLICY for the current version of a named policy, "
    f"{_SCHEME}POLICY/VERSION or {_SCHEME}VERSION for one"
)
_SAMPLER = re.compile(
    rf"(?P<session>[0-9a-f]{{32}}-(?P<priority>[\w.]+)):[0-9]+:(?P<name>(?:{NAME})?):(?P<version>(?:{NUMBER})?)\Z"
)
_UNKNOWN_LOGPROB = float("nan")
_UNKNOWN_TOP_LOGPROB = -99999.0
"""Beside token 0, where there is no likely token, as Tinker's client reads it."""
_priority_of: TypeAdapter[Priority] = TypeAdapter(Priority)


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling session: whose weights sample, and the share of the engines. Its id says all of it."""

    id: str
    session: str
    """All samplers of one client share the engines as one party."""
    priority: Priority
    demand: PolicyDemand

    @classmethod
    def of_id(cls, sampler_id: str) -> Self:
        """Raises `RequestProblem` (422)."""
        if (found := _SAMPLER.match(sampler_id)) is None:
            message = "it is not a sampler of this service; make one by create_sampling_session"
            raise invalid_request(FieldProblem(field="sampling_session_id", message=message, value=sampler_id))
        version = int(found["version"]) if found["version"] else None
        priority = _read_priority("sampling_session_id", found["priority"])
        return cls(sampler_id, found["session"], priority, PolicyDemand(name=found["name"] or None, version=version))

    @property
    def model_path(self) -> str | None:
        """`None` for the current weights of the policy without a name."""
        named = [str(part) for part in (self.demand.name, self.demand.version) if part is not None]
        return _SCHEME + "/".join(named) if named else None


def new_session(user_metadata: Mapping[str, Any] | None) -> str:
    """The id of a client's session, which says its priority. Raises `RequestProblem` (422)."""
    given = str((user_metadata or {}).get("priority", "train"))
    return f"{uuid4().hex}-{_read_priority('user_metadata.priority', given)}"


def _read_priority(field: str, given: str) -> Priority:
    try:
        return _priority_of.validate_python(given if given.isalpha() else float(given))
    except (ValidationError, ValueError) as error:
        message = "a priority is interactive, train, batch or a number from 0.001 to 1000"
        raise invalid_request(FieldProblem(field=field, message=message, value=given)) from error


class SamplingSessionRequest(Strict):
    """The body of `create_sampling_session`."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None

    @property
    def sampler(self) -> Sampler:
        """Raises `RequestProblem` (422): no policy or session has such a name."""
        demand = PolicyDemand() if self.model_path is None else _demand_of(self.model_path)
        version = "" if demand.version is None else demand.version
        return Sampler.of_id(f"{self.session_id}:{self.sampling_session_seq_id}:{demand.name or ''}:{version}")


def _demand_of(model_path: str) -> PolicyDemand:
    """The weights that a path names. Raises `RequestProblem` (422)."""
    if (found := _MODEL_PATH.match(model_path)) is None:
        message = f"it names no weights of this service: {_MODEL_PATHS}"
        raise invalid_request(FieldProblem(field="model_path", message=message, value=model_path))
    number = found["number"] or found["unnamed"]
    return PolicyDemand(name=found["name"], version=None if number is None else int(number))


class _TextChunk(Strict):
    """A part of a prompt. Those that show images or play sounds are not taken."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[TokenId] = Field(fail_fast=True)


class _ModelInput(Strict):
    """The parts of a prompt, in order."""

    chunks: list[_TextChunk]


class _SamplingParams(Strict):
    """How tokens are sampled."""

    max_tokens: int | None = Field(default=None, ge=1)
    """By default, and at most, what the model has room for."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    """Texts or token ids; `[]` for none, not even the model's own."""
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)

    @property
    def stops(self) -> dict[str, Any]:
        """As fields of a text completion."""
        if self.stop is None:
            return {}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        field = "stop" if all(isinstance(each, str) for each in stop) else "stop_token_ids"
        return {field: stop} if stop else {"ignore_eos": True}


class _SampleRequest(Strict):
    """The body of `asample`."""

    type: Literal["sample"] = "sample"
    sampling_session_id: str
    seq_id: int = Field(ge=0)
    """Unique in the session: the same one again is the same call."""
    num_samples: int = Field(default=1, ge=1)
    prompt: _ModelInput
    sampling_params: _SamplingParams
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    """Log-probabilities of so many tokens at the end of the prompt; by default of all."""
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MOST_TOP_K)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MOST_TOP_K)
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None
    """The service has no such numbers."""


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A parsed `asample`."""

    asked: _SampleRequest
    sampler: Sampler
    prompt_ids: "array[int]"
    max_tokens: int
    """Most tokens of a response."""
    score: ParsedScoreRequest | None
    """Scores the prompt; `None` if nothing of it is asked for, or nothing of it has a log-probability."""

    @property
    def name(self) -> str:
        """Unique among all calls."""
        return f"{self.sampler.id}:{self.asked.seq_id}"

    @property
    def most_tokens(self) -> int:
        """Length of prompt and response together, of each sample."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def choices(self) -> int:
        """Samples of the text completion: greedy ones are equal, and vLLM refuses several."""
        return 1 if self.asked.sampling_params.temperature == 0 else self.asked.num_samples

    def completion(self) -> bytes:
        """The body of a text completion that samples.

        Every option is written: those that are left out are the model's, and Tinker has defaults of its own.
        """
        sampling = self.asked.sampling_params
        fields: dict[str, Any] = {
            "prompt": list(self.prompt_ids),
            "n": self.choices,
            "max_tokens": self.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": sampling.seed,
            **sampling.stops,
            "logprobs": self.asked.topk_sample_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return orjson.dumps(fields)


def parsed_sample_call(body: bytes | bytearray, bounds: ScoreBounds) -> SampleCall:
    """Parses an `asample`. Raises `RequestProblem`: 400 or 422, its problems."""
    try:
        asked = _SampleRequest.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise validation_problem(error) from error
    sampler = Sampler.of_id(asked.sampling_session_id)
    prompt = list(chain.from_iterable(chunk.tokens for chunk in asked.prompt.chunks))
    for problem in _sample_problems(asked, prompt, bounds):
        raise invalid_request(problem)
    room = bounds.max_model_len - len(prompt)
    max_tokens = min(asked.sampling_params.max_tokens or room, room)
    return SampleCall(asked, sampler, packed_ids(prompt), max_tokens, _score_of(asked, prompt, sampler))


def _sample_problems(request: _SampleRequest, prompt: Sequence[int], bounds: ScoreBounds) -> Iterable[FieldProblem]:
    if not prompt:
        yield FieldProblem(field="prompt", message="it has no tokens; send at least one", value=0)
        return
    if request.num_samples > bounds.max_sequences:
        message = f"they are more than limits.max_rollouts_per_request allows, which is {bounds.max_sequences}"
        yield FieldProblem(field="num_samples", message=f"{message}; ask for fewer", value=request.num_samples)
    if len(prompt) >= bounds.max_model_len:
        message = f"it has {len(prompt)} tokens and leaves no room: the model takes {bounds.max_model_len}; shorten it"
        yield FieldProblem(field="prompt", message=message, value=len(prompt))
    yield from sequence_problems("prompt", prompt, 0, request.topk_prompt_logprobs, bounds)


def _score_of(request: _SampleRequest, prompt: Sequence[int], sampler: Sampler) -> ParsedScoreRequest | None:
    wanted = request.prompt_logprobs or request.topk_prompt_logprobs
    if not wanted or len(prompt) == 1:
        return None
    start = max(len(prompt) - (request.prompt_logprobs_last_n or len(prompt)), 0)
    sequences, top_k = [packed_ids(prompt)], request.topk_prompt_logprobs
    return ParsedScoreRequest(sequences, [start], top_k, sampler.demand, sampler.priority, _RETRIES)


_STOP_REASONS: Mapping[str, int] = {"stop": 0, "length": 1}
_TOKEN_ID = "token_id:"


def sample_result(call: SampleCall, completion: bytes, score: ScoredPrompt | None) -> bytes:
    """A `SampleResponse`.

    Args:
        completion: the answer to the call's text completion.

    Raises:
        ValueError: it ended in another way than a sample does.
    """
    choices = orjson.loads(completion)["choices"]
    sequences = [_message(1, *_sequence(choice, call.asked.topk_sample_logprobs)) for choice in choices]
    return b"".join([*sequences * (call.asked.num_samples // call.choices), *_prompt_fields(call, score)])


def _sequence(choice: Mapping[str, Any], top_k: int) -> Iterable[bytes]:
    """The fields of a `SampledSequence`."""
    if (reason := choice["finish_reason"]) not in _STOP_REASONS:
        raise ValueError(f"A sample ended by {reason!r}.")
    yield _number(1, _STOP_REASONS[reason])
    yield _message(2, packed_ids(choice["token_ids"]).tobytes())
    yield _message(3, packed_logprobs(choice["logprobs"]["token_logprobs"]).tobytes())
    if top_k:
        yield _message(4, *_top_logprobs([_likeliest(row, top_k) for row in choice["logprobs"]["top_logprobs"]], top_k))


def _likeliest(row: Mapping[str, float] | None, top_k: int) -> list[tuple[int, float]]:
    """The most likely tokens of one position. The one that was sampled is in the row too, however likely."""
    named = ((int(name.removeprefix(_TOKEN_ID)), logprob) for name, logprob in (row or {}).items())
    return sorted(named, key=lambda token: -token[1])[:top_k]


def _prompt_fields(call: SampleCall, score: ScoredPrompt | None) -> Iterable[bytes]:
    """The fields of a `SampleResponse` that are of the prompt."""
    length, scored = len(call.prompt_ids), [] if score is None else list(score.prompt_logprobs)
    if call.asked.prompt_logprobs:
        unknown = [_UNKNOWN_LOGPROB] * (length - len(scored))
        yield _message(2, packed_logprobs([*unknown, *scored]).tobytes())
    if score is not None and (top_k := call.asked.topk_prompt_logprobs):
        pairs = list(zip(score.top_token_ids, score.top_logprobs, strict=True))
        rows = [pairs[begin : begin + top_k] for begin in range(0, len(pairs), top_k)]
        unscored: list[list[tuple[int, float]]] = [[]] * (length - len(rows))
        yield _message(3, *_top_logprobs([*unscored, *rows], top_k))


def _top_logprobs(rows: Sequence[Sequence[tuple[int, float]]], top_k: int) -> Iterable[bytes]:
    """The fields of a `TopkLogprobs`, whose rows all have `top_k` tokens."""
    padded = [[*row, *[(0, _UNKNOWN_TOP_LOGPROB)] * (top_k - len(row))] for row in rows]
    yield _message(1, packed_ids(token_id for row in padded for token_id, _ in row).tobytes())
    yield _message(2, packed_logprobs(logprob for row in padded for _, logprob in row).tobytes())
    yield _number(3, top_k)
    yield _number(4, len(rows))


def _message(field: int, *parts: bytes) -> bytes:
    """A field of bytes, or of a message with these fields, in protocol buffers."""
    return b"".join([_varint(field << 3 | 2), _varint(sum(map(len, parts))), *parts])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
