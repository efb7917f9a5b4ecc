"""What cannot be sent to the engine's process is refused before it is."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.serial_utils import MsgpackEncoder

from deployments.generation.serving.recording_client import refuse_unsendable

SCHEMAS = st.recursive(
    st.none() | st.integers(-(2**70), 2**70) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@example({"maxProperties": 2**64 - 1})
@example({"maxProperties": 2**64})
@example({"minimum": -(2**63)})
@example({"minimum": -(2**63) - 1})
@given(st.dictionaries(st.text(max_size=3), SCHEMAS, max_size=3))
def test_a_schema_is_refused_if_and_only_if_vllm_cannot_send_it_to_its_engine(schema: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    try:
        MsgpackEncoder().encode(params)
    except OverflowError:
        with pytest.raises(VLLMValidationError, match="write a smaller one"):
            refuse_unsendable(params)
    else:
        refuse_unsendable(params)


def test_calls_without_a_schema_are_not_refused() -> None:
    refuse_unsendable(SamplingParams())
    refuse_unsendable(SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))
