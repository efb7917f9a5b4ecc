"""Streamed reasoning, however many tokens an event has."""

from typing import Any

import pytest

from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow
THOUGHT = "<think>2+3=5</think>The answer is 5."


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9, 100])
def test_the_reasoning_of_a_stream_has_no_start_of_a_thought(size: int) -> None:
    from transformers import AutoTokenizer
    from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

    from deployments.generation.serving.reasoning_start import leave_out_start_of_reasoning

    for _ in range(2):
        leave_out_start_of_reasoning()
    tokenizer: Any = AutoTokenizer.from_pretrained(REPOSITORY / "models" / "small")
    parser = DeepSeekR1ReasoningParser(tokenizer)
    ids = tokenizer.encode(THOUGHT, add_special_tokens=False)
    reasoning, content = "", ""
    for begin in range(0, len(ids), size):
        before, until = ids[:begin], ids[: begin + size]
        previous, current, delta = (tokenizer.decode(some) for some in (before, until, until[begin:]))
        message = parser.extract_reasoning_streaming(previous, current, delta, before, until, until[begin:])
        if message is not None:
            reasoning += message.reasoning or ""
            content += message.content or ""
    assert (reasoning, content) == ("2+3=5", "The answer is 5.")
