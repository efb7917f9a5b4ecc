"""Texts of tokens: vLLM's detokenizer outside of its engine, stop strings that are special tokens, and no texts for
log-probabilities that nobody is shown.

Needed with vLLM 0.32, which

- makes a detokenizer of an `EngineCoreRequest` alone;
- looks for stop strings in the text that it shows, which leaves special tokens out by default: a `stop` of `<|im_end|>`
  is ignored (#2123, closed: give its id). SGLang looks for them in the text with special tokens;
- decodes each token once more for its log-probability: a fifth of the front end's processor time. Requests that do not
  decode at all have none of it, but calls of a model server's API need their text.

No upstream issue of the first and of the last is known.
"""

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from deployments.upstream.vllm.held_outputs import PortionLogprobs

TEXTS_ARE_UNSEEN = "logprob_texts_are_unseen"


class _StoppedBySpecialTokens(IncrementalDetokenizer):
    """The text of `shown`, which also ends where a stop string of `stopping` does: that one sees special tokens."""

    def __init__(self, shown: IncrementalDetokenizer, stopping: IncrementalDetokenizer) -> None:
        self._shown = shown
        self._stopping = stopping

    @property
    def output_token_ids(self) -> list[int]:
        return self._shown.output_token_ids

    def num_output_tokens(self) -> int:
        return self._shown.num_output_tokens()

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        for place, token_id in enumerate(new_token_ids, 1):
            is_last = stop_terminated and place == len(new_token_ids)
            seen = self._stopping.update([token_id], is_last)
            if (stop := self._shown.update([token_id], is_last) or seen) is not None:
                return stop
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        return self._shown.get_next_output_text(finished, delta)


def detokenizer_of(tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams) -> IncrementalDetokenizer:
    """The detokenizer of a request."""
    return _stopped_by_special_tokens(
        _bare_detokenizer(tokenizer, prompt_token_ids, params), tokenizer, prompt_token_ids, params
    )


def _bare_detokenizer(
    tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams
) -> IncrementalDetokenizer:
    """vLLM's, made of the few fields of a request that it reads."""
    request: Any = SimpleNamespace(
        request_id="", prompt_token_ids=list(prompt_token_ids), prompt_embeds=None, sampling_params=params
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def _stopped_by_special_tokens(
    shown: IncrementalDetokenizer, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams
) -> IncrementalDetokenizer:
    """The detokenizer, ended by those of the request's stop strings too that have special tokens in them."""
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    if not (stops and params.skip_special_tokens and params.detokenize):
        return shown
    special = _special_texts(tokenizer)
    if not (stops := [stop for stop in stops if any(text in stop for text in special)]):
        return shown
    of_stops = copy(params)
    of_stops.stop, of_stops.skip_special_tokens = stops, False
    return _StoppedBySpecialTokens(shown, _bare_detokenizer(tokenizer, prompt_token_ids, of_stops))


@lru_cache(maxsize=8)
def _special_texts(tokenizer: Any) -> frozenset[str]:
    """The texts of the tokens that a text without special tokens leaves out."""
    return frozenset(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)


def skip_logprob_texts(params: SamplingParams) -> None:
    """Marks parameters whose log-probabilities need no texts."""
    params.extra_args = {**(params.extra_args or {}), TEXTS_ARE_UNSEEN: True}


def install_token_texts(llm: Any) -> None:
    """Lets this `AsyncLLM` stop at special tokens in stop strings, and leave out what `skip_logprob_texts` marks.

    It reads log-probabilities of many tokens at once.
    """
    processor = llm.output_processor
    add_request = processor.add_request

    def add(request: Any, *args: Any, **options: Any) -> None:
        add_request(request, *args, **options)
        params = request.sampling_params
        if params is None:
            return
        state = processor.request_states[request.request_id]
        state.logprobs_processor = PortionLogprobs(**vars(state.logprobs_processor))
        if (params.extra_args or {}).get(TEXTS_ARE_UNSEEN):
            state.logprobs_processor.tokenizer = None
        if processor.tokenizer is not None:
            state.detokenizer = _stopped_by_special_tokens(
                state.detokenizer, processor.tokenizer, request.prompt_token_ids or (), params
            )

    processor.add_request = add
