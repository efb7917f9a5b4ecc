"""Structured outputs as the engine validates and compiles them, once and in a process of its own.

vLLM validates them in the replica with each call, and compiles them in the engine without a limit. It has no public way
to do either before, or to pass over what was validated.

Needed with vLLM 0.32; no upstream issue is known. `test_grammar_checks.py` fails where a newer vLLM compiles otherwise.
"""

from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest


class CheckedOutputs(StructuredOutputsParams):
    """Outputs that were validated and compiled before: vLLM does not validate them again."""


def skip_checked_outputs() -> None:
    """Lets vLLM's validation pass over `CheckedOutputs`. May be called more than once."""
    validate = SamplingParams._validate_structured_outputs
    if getattr(validate, "skips_checked", False):
        return

    def validate_unchecked(self: SamplingParams, *arguments: Any) -> None:
        if not isinstance(self.structured_outputs, CheckedOutputs):
            validate(self, *arguments)

    validate_unchecked.skips_checked = True  # type: ignore[attr-defined]
    SamplingParams._validate_structured_outputs = validate_unchecked  # type: ignore[method-assign,assignment]


def validated(wanted: StructuredOutputsParams, config: VllmConfig, tokenizer: Any) -> StructuredOutputsParams:
    """The result of vLLM's validation, which names the backend; raises what vLLM raises."""
    params = SamplingParams(structured_outputs=wanted)
    params._validate_structured_outputs(config.model_config, config.structured_outputs_config, tokenizer)
    assert params.structured_outputs is not None
    return params.structured_outputs


def compiled(manager: StructuredOutputManager, valid: StructuredOutputsParams) -> StructuredOutputGrammar:
    """Compiles as the engine does, with the backend of its first request."""
    request: Any = SimpleNamespace(
        request_id="",
        sampling_params=SamplingParams(structured_outputs=valid),
        structured_output_request=StructuredOutputRequest(valid),
    )
    manager.grammar_init(request)
    grammar: StructuredOutputGrammar = request.structured_output_request._grammar.result()
    return grammar
