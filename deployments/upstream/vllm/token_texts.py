"""Texts of tokens: vLLM's detokenizer outside of its engine, and none for log-probabilities that nobody is shown.

Needed with vLLM 0.32, which makes a detokenizer of an `EngineCoreRequest` alone, and decodes each token once more for
its log-probability: a fifth of the front end's processor time. Requests that do not decode at all have none of it, but
calls of a model server's API need their text. No upstream issue is known.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

TEXTS_ARE_UNSEEN = "logprob_texts_are_unseen"


def detokenizer_of(tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams) -> IncrementalDetokenizer:
    """The detokenizer of a request, made of the few fields that it reads."""
    request: Any = SimpleNamespace(
        request_id="", prompt_token_ids=list(prompt_token_ids), prompt_embeds=None, sampling_params=params
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def skip_logprob_texts(params: SamplingParams) -> None:
    """Marks parameters whose log-probabilities need no texts."""
    params.extra_args = {**(params.extra_args or {}), TEXTS_ARE_UNSEEN: True}


def install_logprob_text_skipping(llm: Any) -> None:
    """Lets this `AsyncLLM` make no texts for what `skip_logprob_texts` has marked."""
    processor = llm.output_processor
    add_request = processor.add_request

    def add(request: Any, *args: Any, **options: Any) -> None:
        add_request(request, *args, **options)
        params = request.sampling_params
        if params is not None and (params.extra_args or {}).get(TEXTS_ARE_UNSEEN):
            processor.request_states[request.request_id].logprobs_processor.tokenizer = None

    processor.add_request = add
