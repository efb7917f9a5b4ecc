"""Lets vLLM's front end make no texts of tokens for log-probabilities that are recorded and shown to nobody.

vLLM decodes each token once more for its log-probability, which takes about a fifth of the front end's processor time.
Requests that do not decode at all have none of it, but calls of a model server's API need their text.
"""

from typing import Any

from vllm.sampling_params import SamplingParams

TEXTS_ARE_UNSEEN = "logprob_texts_are_unseen"


def mark_texts_unseen(params: SamplingParams) -> None:
    params.extra_args = {**(params.extra_args or {}), TEXTS_ARE_UNSEEN: True}


def make_no_unseen_texts(llm: Any) -> None:
    """Args: `llm` is an `AsyncLLM`."""
    processor = llm.output_processor
    add_request = processor.add_request

    def add(request: Any, *args: Any, **options: Any) -> None:
        add_request(request, *args, **options)
        params = request.sampling_params
        if params is not None and (params.extra_args or {}).get(TEXTS_ARE_UNSEEN):
            processor.request_states[request.request_id].logprobs_processor.tokenizer = None

    processor.add_request = add
