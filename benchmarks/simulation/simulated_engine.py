"""An engine without a model: it answers each generation with made-up tokens after the time of a real one."""

import asyncio
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from benchmarks.simulation.timing import TimedGenerations, Timing
from deployments.failures import RolloutFailure
from deployments.protocols.generation import (
    NO_COLUMNS,
    Engine,
    Generation,
    GenerationRequest,
    ScoredPrompt,
    ScoringRequest,
    WeightSpan,
    packed_ids,
    packed_logprobs,
    takes_no_images,
)
from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad
from deployments.protocols.token_columns import EXPERTS, MASK, MASK_SIZES, numbers_of, packed_rows
from rollout_client.contract.base import label_of
from rollout_client.contract.messages import PackedNumbers
from rollout_client.contract.policy import PauseMode

INITIAL_VERSION = 0


@dataclass(slots=True, eq=False)
class Submitted:
    """A generation that runs or waits. One that is interrupted has its result before its time has passed."""

    request: GenerationRequest
    length: int
    result: asyncio.Future[Generation]
    versions: list[tuple[int, int]]
    """Each version of the weights that generates some of its tokens, with the place of the first one."""

    def note_version(self, version: int, tokens: int) -> None:
        """Tokens from place `tokens` on are of this version."""
        if self.versions[-1][1] == tokens:
            self.versions.pop()
        self.versions.append((version, tokens))

    def spans(self, length: int) -> tuple[WeightSpan, ...]:
        """Those of its first `length` tokens."""
        ends = [start for _, start in self.versions[1:]] + [length]
        return tuple(
            WeightSpan(label_of(self.request.policy, version), start, min(end, length))
            for (version, start), end in zip(self.versions, ends, strict=True)
            if start < length
        )


class SimulatedEngine(Engine):
    """Each generation is as long and takes as long as `timing` says; one of `max_new_tokens` tokens ends by `length`.

    Its weights are nothing but the number of their version, which labels the tokens that are generated meanwhile.
    The tokens are letters; their number and ids depend on the prompt and the seed alone. The log-probability of each is
    that of a letter drawn with equal probabilities. One timer serves all generations.
    """

    def __init__(self, timing: Timing, description: GeneratorDescription, letters: Sequence[int]) -> None:
        """`letters` are the token ids that responses consist of, at least one."""
        self._timing = timing
        self._description = description
        self._generations: TimedGenerations[Submitted] = TimedGenerations(timing)
        self._submitted: dict[str, Submitted] = {}
        """By `generation_id`."""
        self.version = INITIAL_VERSION
        self.named: dict[str, int] = {}
        """By name, the version of each named policy, which labels the tokens of its generations."""
        self._kv_tokens = 0
        """Tokens of the prompts and whole responses of the generations that run or wait."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_at: float | None = None
        self._letters = len(letters)
        # So long that each response is one slice, whichever letter it begins with.
        self._cycle = packed_ids(letters) * (2 + description.max_model_len // len(letters))
        self._logprob = packed_logprobs([-math.log(len(letters))])
        self._entropy = packed_logprobs([math.log(len(letters))])
        self._experts_row = timing.routed_experts or (0, 0)
        self._experts = random.Random(0).randbytes(math.prod(self._experts_row) * description.max_model_len)
        """Those of the token at each place, whatever it is."""

    @classmethod
    def start(cls, timing: Timing, model: str, tokenizer: str | None, max_model_len: int) -> Self:
        """`model` and `tokenizer` are folders or Hugging Face repositories; only the tokenizer is read.

        Raises:
            Exception: what the tokenizers library raises when there is no tokenizer.
        """
        name = tokenizer or model
        file = Path(name) / "tokenizer.json"
        loaded = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
        vocabulary = loaded.get_vocab()
        letters = sorted(id_ for token, id_ in vocabulary.items() if token.isascii() and token.isalpha())
        vocab_size = max(vocabulary.values()) + 1
        description = GeneratorDescription(
            model,
            max_model_len,
            vocab_size,
            engine="simulated",
            settings_hash="simulated",
            max_num_seqs=timing.max_num_seqs,
            returns_experts=timing.routed_experts is not None,
        )
        return cls(timing, description, letters)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Returns when the generation's time has passed; cancelling the call lets the next waiting generation start.

        Raises `GenerationRejected` for a prompt that shows images.
        """
        if request.images:
            raise takes_no_images([span.name for span in request.images])
        loop = asyncio.get_running_loop()
        length = self._length(request)
        version = self._version_of(request)
        generation = Submitted(request, length, loop.create_future(), [(version, 0)])
        self._submitted[request.generation_id] = generation
        tokens = len(request.prompt_token_ids) + length
        self._wake_finished()
        self._generations.submit(generation, length, loop.time(), request.virtual_time)
        self._wake_finished()
        self._kv_tokens += tokens
        try:
            return await generation.result
        except asyncio.CancelledError:
            self._wake_finished()
            self._generations.cancel(generation, loop.time())
            self._wake_finished()
            raise
        finally:
            self._kv_tokens -= tokens
            # A retry of the same generation has the same id and may have taken the place.
            if self._submitted.get(request.generation_id) is generation:
                del self._submitted[request.generation_id]

    async def interrupt(self, generation_ids: Iterable[str], failure: RolloutFailure | None = None) -> None:
        now = asyncio.get_running_loop().time()
        self._wake_finished()
        for generation in [self._submitted[name] for name in generation_ids if name in self._submitted]:
            if not generation.result.done():
                length = self._tokens_at(now, generation)
                self._generations.cancel(generation, now)
                response = self._response(generation, length)
                generation.result.set_result(replace(response, finish_reason="abort", failure=failure))
        self._wake_finished()

    async def pause(self, seconds: float) -> None:
        """Generates nothing for so long."""
        if not seconds:
            return
        self._wake_finished()
        self._generations.pause(seconds, asyncio.get_running_loop().time())
        self._wake_finished()
        await asyncio.sleep(seconds)

    async def change_version(self, version: int, mode: PauseMode) -> None:
        """Later tokens are of this version; with the mode `wait`, only those of generations that have not started."""
        now = asyncio.get_running_loop().time()
        self._wake_finished()
        self.version = version
        for generation in self._submitted.values():
            if generation.request.policy is not None:
                continue
            has_started = self._generations.end_of(generation) is not None
            if not generation.result.done() and not (mode == "wait" and has_started):
                generation.note_version(version, self._tokens_at(now, generation))
        if mode == "abort":
            await self.interrupt(list(self._submitted))

    def _version_of(self, request: GenerationRequest) -> int:
        return self.version if request.policy is None else self.named[request.policy]

    def _tokens_at(self, now: float, generation: Submitted) -> int:
        """How many tokens the generation has."""
        end = self._generations.end_of(generation)
        if end is None:
            return 0
        left_s = end - self._generations.progressed_to(now)
        return max(generation.length - self._timing.tokens_missing(left_s), 0)

    def describe(self) -> GeneratorDescription:
        return self._description

    def load(self) -> ReplicaLoad:
        generations = self._generations
        return ReplicaLoad(len(generations), len(generations) - generations.running, self._kv_tokens)

    def _wake_finished(self) -> None:
        """Wakes the callers whose generations have ended, and sets the timer to the next end."""
        loop = asyncio.get_running_loop()
        for generation in self._generations.pop_finished(loop.time()):
            if not generation.result.done():
                generation.result.set_result(self._response(generation, generation.length))
        self._set_timer(self._generations.next_end)

    def _set_timer(self, due_at: float | None) -> None:
        if due_at == self._timer_due_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_at = due_at
        self._timer = None if due_at is None else asyncio.get_running_loop().call_at(due_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_due_at = None
        self._wake_finished()

    def _length(self, request: GenerationRequest) -> int:
        longest, spread = request.max_new_tokens, self._timing.length_spread
        if not spread:
            return longest
        drawn = random.Random(sum(request.prompt_token_ids) + (request.sampling.seed or 0)).random()
        return max(longest - int(drawn * spread * (longest + 1)), 1)

    def _response(self, generation: Submitted, length: int) -> Generation:
        request = generation.request
        first = (sum(request.prompt_token_ids) + (request.sampling.seed or 0)) % self._letters
        if isinstance(request, ScoringRequest) and length:
            return self._scores(request, generation.versions[0][0])
        return Generation(
            token_ids=self._cycle[first : first + length],
            logprobs=self._logprob * length,
            finish_reason="length" if length == request.max_new_tokens else "stop",
            weight_versions=generation.spans(length),
            columns=self._columns(request, length) if request.include != NO_COLUMNS and length else {},
            batch_size=len(self._generations) + 1,
        )

    def _columns(self, request: GenerationRequest, length: int) -> dict[str, PackedNumbers]:
        """All letters are as likely, and could be sampled at each place, whatever `top_k` says."""
        include, columns, letters = request.include, dict[str, PackedNumbers](), self._cycle[: self._letters]
        if top := min(include.top_logprobs, self._letters):
            columns["top_token_ids"] = packed_rows(letters[:top] * length, "int32", [top])
            columns["top_logprobs"] = packed_rows(self._logprob * (top * length), "float32", [top])
        if include.sampling_mask:
            columns[MASK] = packed_rows(letters * length, "int32")
            columns[MASK_SIZES] = packed_rows([self._letters] * length, "uint16")
        if include.entropy:
            columns["entropy"] = packed_rows(self._entropy * length, "float32")
        if include.routed_experts:
            width = math.prod(self._experts_row)
            computed = len(request.prompt_token_ids) + length - 1
            rows = self._experts[request.experts_from * width : computed * width]
            columns[EXPERTS] = numbers_of(rows, "uint8", self._experts_row)
        return columns

    def _scores(self, request: ScoringRequest, version: int) -> ScoredPrompt:
        """The log-probability of each token is that of a letter, whatever it is; the same letters are the likeliest."""
        positions = len(request.prompt_token_ids) - max(request.start, 1)
        letters = self._cycle[: request.top_k]
        return ScoredPrompt(
            packed_ids(()),
            packed_logprobs(()),
            "length",
            prompt_logprobs=self._logprob * positions,
            top_token_ids=letters * positions,
            top_logprobs=self._logprob * (len(letters) * positions),
            weight_version=label_of(request.policy, version),
        )
