"""One completion of vLLM's serving layers, made by several requests of the engine. No I/O.

An update of the weights may end a request early, with the tokens that it has. The next request goes on after them, with
the new weights, and the outputs of all look like those of one. Where the tokens after an interruption would not be
sampled as they were before it, the completion begins anew, unless its caller has some of it already. So does one whose
prompt's log-probabilities are wanted and were not all computed with the same weights. A stream that is
interrupted within a character or a stop string goes on too. The engine's text of a request knows no tokens of the
requests before it, so `_FollowedText` gives the tokens of all of them to vLLM's own detokenizer: characters, stop
strings and the text held back for these are as they are without an interruption.

Guarantee: no token is in the outputs twice, and none is missing.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.protocols.generation import derived_seed
from deployments.protocols.weight_versions import joined_spans
from deployments.upstream.vllm.token_texts import detokenizer_of


class _FollowedText:
    def __init__(
        self, tokenizer: Any, prompt_token_ids: list[int], params: SamplingParams, token_ids: Sequence[int]
    ) -> None:
        """`token_ids` are those of the requests that have ended, which hold no stop string."""
        self._detokenizer = detokenizer_of(tokenizer, prompt_token_ids, params)
        self.stop_string: str | None = None
        """The one that has ended the text."""
        self.add(token_ids, ends_by_token=False)

    def add(self, token_ids: Sequence[int], ends_by_token: bool) -> int:
        """How many of the tokens belong to the text: it ends with the one that completes a stop string.

        Args:
            ends_by_token: whether the last one is a token that ends a response.
        """
        if self.stop_string is not None:
            return 0
        for place, token_id in enumerate(token_ids):
            is_end = ends_by_token and place == len(token_ids) - 1
            self.stop_string = self._detokenizer.update([token_id], is_end)
            if self.stop_string is not None:
                return place + 1
        return len(token_ids)

    def text(self, has_ended: bool) -> str:
        """All of it; before its end without what can be the beginning of a stop string that is not shown."""
        return self._detokenizer.get_next_output_text(finished=has_ended, delta=False)


CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
TOKENS_OF_CHARACTER = 8
"""A character has at most 4 bytes; some tokenizers put a space of their own before the first."""


class ContinuedCompletion:
    """The requests and outputs of one choice of an answer."""

    def __init__(self, prompt_token_ids: Sequence[int], params: SamplingParams, tokenizer: Any, index: int = 0) -> None:
        """Begins a completion without tokens.

        Args:
            params: of one choice.
            tokenizer: the engine's. It decodes a character that is not whole as `CUT_CHARACTER`.
            index: of the choice.
        """
        self._prompt_token_ids = list(prompt_token_ids)
        self._params = params
        self._tokenizer = tokenizer
        self._index = index
        self._is_delta = params.output_kind == RequestOutputKind.DELTA
        self.begin_anew()

    def begin_anew(self) -> None:
        """Drops all outputs so far."""
        self._token_ids: list[int] = []
        """Tokens of all requests so far."""
        self._text = ""
        self._tokens_before = 0
        """Number of tokens of the requests that have ended."""
        self._tokens_sent = 0
        """Before the last output of a stream."""
        self._before: CompletionOutput | None = None
        """The last output of the request before."""
        self._first: RequestOutput | None = None
        self._followed: _FollowedText | None = None
        """Text of a stream that was interrupted where the engine's text cannot go on."""
        self._was_stopped = False
        self._experts: NDArray[Any] | None = None
        """Rows of the requests that have ended: a token keeps those with which the token after it was sampled."""

    @property
    def must_be_stopped(self) -> bool:
        """Whether the request goes on although a stop string has ended the completion. To be asked after `add`.

        Its last output, when it is aborted, ends the completion.
        """
        return not self._was_stopped and self._followed is not None and self._followed.stop_string is not None

    def next_prompt(self) -> list[int]:
        self._tokens_before = len(self._token_ids)
        return self._prompt_token_ids + self._token_ids

    def next_params(self) -> SamplingParams:
        """Parameters of the next request. It has a seed of its own: with the first one it would repeat its draws.

        To be called after `next_prompt`.
        """
        there = self._tokens_before
        if not there:
            return self._params
        params = self._params.clone()
        if params.max_tokens is not None:
            params.max_tokens -= there
        params.min_tokens = max(params.min_tokens - there, 0)
        params.seed = None if params.seed is None else derived_seed(params.seed, there)
        params.prompt_logprobs = None
        params.routed_experts_prompt_start += 0 if self._experts is None else len(self._experts)
        if self._followed is not None:
            params.stop = []
        return params

    def add(self, output: RequestOutput, label: str | None) -> RequestOutput:
        """The output of a request as one of the whole completion.

        Args:
            label: what the request's tokens are labelled with, if an adapter makes them. vLLM's own spans name only
                full weights.
        """
        completion = output.outputs[0]
        if self._followed is not None:
            self._follow(self._followed, output)
        new_ids, new_text = list(completion.token_ids), completion.text
        if self._is_delta:
            self._tokens_sent = len(self._token_ids)
        else:
            del self._token_ids[self._tokens_before :]
        self._token_ids += new_ids
        if label is not None and completion.finished():
            completion.weight_versions = [WeightVersionSpan(label, 0, len(self._token_ids) - self._tokens_before)]
        if completion.finished():
            completion.routed_experts = self._rows_so_far(completion.routed_experts)
        if (before := self._before) is not None:
            self._join(before, completion)
        if self._first is None:
            self._first = output
        elif self._first is not output:
            output.prompt_token_ids = self._prompt_token_ids
            output.num_cached_tokens = self._first.num_cached_tokens
            if not self._is_delta:
                output.prompt_logprobs = self._first.prompt_logprobs
        completion.index = self._index
        self._text = self._text + new_text if self._is_delta else completion.text
        return output

    def _join(self, before: CompletionOutput, completion: CompletionOutput) -> None:
        """Puts what `before` has in front of `completion`, apart from what a stream has sent."""
        if completion.cumulative_logprob is not None:
            completion.cumulative_logprob += before.cumulative_logprob or 0.0
        if completion.weight_versions is not None:
            completion.weight_versions = joined_spans(
                before.weight_versions or [], completion.weight_versions, self._tokens_before, WeightVersionSpan
            )
        if not self._is_delta:
            completion.text = before.text + completion.text
            completion.token_ids = [*before.token_ids, *completion.token_ids]
            completion.logprobs = _joined_logprobs(before.logprobs, completion.logprobs)

    def _rows_so_far(self, rows: NDArray[Any] | None) -> NDArray[Any] | None:
        """The experts of all tokens but the last one, without those after a stop string; `None` if there are none."""
        parts = [part for part in (self._experts, rows) if part is not None]
        computed = len(self._prompt_token_ids) + len(self._token_ids) - 1
        return np.concatenate(parts)[: computed - self._params.routed_experts_prompt_start] if parts else None

    def _follow(self, followed: _FollowedText, output: RequestOutput) -> None:
        """Puts the text in the place of the engine's, and ends the output where a stop string does."""
        completion = output.outputs[0]
        ids, has_ended = list(completion.token_ids), completion.finished()
        kept = followed.add(ids, ends_by_token=completion.finish_reason == "stop")
        completion.token_ids = ids[:kept]
        if completion.logprobs is not None:
            completion.logprobs = completion.logprobs[:kept]
        if followed.stop_string is not None and has_ended:
            self._was_stopped = True
            completion.finish_reason, completion.stop_reason = "stop", followed.stop_string
            made = len(self._token_ids) + kept - self._tokens_before
            completion.weight_versions = _cut_spans(completion.weight_versions or [], made)
        completion.text = followed.text(has_ended or followed.stop_string is not None)[len(self._text) :]

    def interrupt(self, output: RequestOutput) -> bool:
        """The last output that `add` returned is where a request was interrupted. Whether the completion goes on.

        If it does, that output is one in the middle of a stream, which is empty where the completion begins anew; one
        that is not streamed has no such output.
        """
        completion = output.outputs[0]
        if self._was_stopped or (self._tokens_sent and self._depends_on_response()):
            return False
        is_open = self._followed is not None or self._ends_open()
        # Without a token it may have a part of the prompt's log-probabilities.
        if self._depends_on_response() or not self._token_ids or (is_open and not self._tokens_sent):
            completion.text, completion.token_ids, completion.logprobs = "", [], None
            completion.finish_reason = completion.stop_reason = completion.routed_experts = None
            output.finished = False
            self.begin_anew()
            return True
        if is_open:
            self._follow_from_here(completion)
        self._before = CompletionOutput(
            completion.index,
            completion.text,
            list(completion.token_ids),
            completion.cumulative_logprob,
            completion.logprobs,
            weight_versions=completion.weight_versions,
        )
        self._experts = completion.routed_experts
        completion.finish_reason = completion.stop_reason = completion.routed_experts = None
        output.finished = False
        return True

    def _follow_from_here(self, completion: CompletionOutput) -> None:
        """The text goes on here. What the engine held back until its end is held back again."""
        if self._followed is None:
            self._followed = _FollowedText(self._tokenizer, self._prompt_token_ids, self._params, self._token_ids)
        before = self._text.removesuffix(completion.text)
        completion.text = self._followed.text(has_ended=False)[len(before) :]
        self._text = before + completion.text

    def _depends_on_response(self) -> bool:
        """Whether tokens are sampled by what depends on those of the response before them, and not of the prompt."""
        params = self._params
        return bool(
            params.structured_outputs is not None
            or params.presence_penalty
            or params.frequency_penalty
            or params.bad_words
            or params.thinking_token_budget is not None
            or params.repetition_detection is not None
        )

    def _ends_open(self) -> bool:
        """Whether the next request's text would miss a stop string or a character that has begun in this one."""
        if not self._params.detokenize:
            return False
        stops = _stops_of(self._params)
        # With special tokens, which the text may leave out.
        last = self._tokenizer.decode(self._token_ids[-max(TOKENS_OF_CHARACTER, *map(len, stops), 0) :])
        return any(_ends_in_stop_string(text, stops) for text in (self._text, last)) or last.endswith(CUT_CHARACTER)


def params_of_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Those of one choice of `params.n`, as vLLM itself makes them."""
    if params.n == 1:
        return params
    of_choice = copy(params)
    of_choice.n = 1
    of_choice.seed = None if params.seed is None else params.seed + index
    return of_choice


def _stops_of(params: SamplingParams) -> list[str]:
    return [params.stop] if isinstance(params.stop, str) else list(params.stop or ())


def _ends_in_stop_string(text: str, stop_strings: Sequence[str]) -> bool:
    """Whether the end of the text can be the beginning of a stop string."""
    return any(text.endswith(stop[:length]) for stop in stop_strings for length in range(1, len(stop)))


def _cut_spans(spans: Sequence[WeightVersionSpan], tokens: int) -> list[WeightVersionSpan]:
    """Those of the first `tokens`."""
    return [WeightVersionSpan(span.version, span.start, min(span.end, tokens)) for span in spans if span.start < tokens]


def _joined_logprobs(first: Any, second: Any) -> Any:
    if isinstance(first, FlatLogprobs) and isinstance(second, FlatLogprobs):
        shift = len(first.logprobs)
        return FlatLogprobs(
            start_indices=[*first.start_indices, *(start + shift for start in second.start_indices)],
            end_indices=[*first.end_indices, *(end + shift for end in second.end_indices)],
            token_ids=first.token_ids + second.token_ids,
            logprobs=first.logprobs + second.logprobs,
            ranks=first.ranks + second.ranks,
            decoded_tokens=first.decoded_tokens + second.decoded_tokens,
        )
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    return second
