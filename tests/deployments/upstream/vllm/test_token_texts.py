"""Stop strings with special tokens in them, through vLLM's own output processor."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor

from deployments.generation.engine_requests import sampling_params
from deployments.protocols.generation import GenerationRequest, SamplingOptions
from deployments.upstream.vllm.token_texts import install_token_texts
from tests.paths import SMALL_MODEL

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
tokenizer: Any = AutoTokenizer.from_pretrained(SMALL_MODEL)
SPECIAL = "<|im_start|>"
MARKER = "<think>"
"""An added token that is not special: texts have it."""


def ended(params: SamplingParams, text: str) -> tuple[str, str, Any]:
    """The text of the tokens that an answer keeps, its own text, and what has stopped it."""
    processor = OutputProcessor(tokenizer, log_stats=False)
    install_token_texts(SimpleNamespace(output_processor=processor))
    request = EngineCoreRequest("r", [5, 6], None, params, None, 0.0, None, None, None)
    request.external_req_id = "r"
    processor.add_request(request, None)
    output: RequestOutput | None = None
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        processed = processor.process_outputs([EngineCoreOutput("r", [token_id])], weight_version="0")
        for made in processed.request_outputs:
            assert isinstance(made, RequestOutput)
            output = made
        if processed.reqs_to_abort:
            break
    assert output is not None
    [completion] = output.outputs
    return tokenizer.decode(completion.token_ids), completion.text, completion.stop_reason


@pytest.mark.parametrize(
    ("stop", "kept", "text"),
    [
        (SPECIAL, f"ab{SPECIAL}", "ab"),
        (f"b{SPECIAL}", f"ab{SPECIAL}", "ab"),
        (f"{SPECIAL}c", f"ab{SPECIAL}c", "abc"),
        (MARKER, f"ab{SPECIAL}cd{MARKER}", "abcd"),
    ],
)
def test_an_answer_ends_with_a_special_token_of_a_stop_string(stop: str, kept: str, text: str) -> None:
    assert ended(SamplingParams(stop=["never", stop]), f"ab{SPECIAL}cd{MARKER}e") == (kept, text, stop)


def test_a_stop_string_that_the_text_shows_is_found_there() -> None:
    params = SamplingParams(stop=[SPECIAL], skip_special_tokens=False, include_stop_str_in_output=True)
    assert ended(params, f"ab{SPECIAL}cd") == (f"ab{SPECIAL}", f"ab{SPECIAL}", SPECIAL)


def test_a_rollout_ends_with_a_special_token_that_is_a_stop_string() -> None:
    request = GenerationRequest("g", [5, 6], 9, (SPECIAL,), SamplingOptions())
    kept, _, stopped_by = ended(sampling_params(request), f"ab{SPECIAL}cd")
    assert (kept, stopped_by) == (f"ab{SPECIAL}", SPECIAL)
