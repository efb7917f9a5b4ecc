"""What an answer must fit is compiled in a process of its own before the engine does; a real one, with vLLM in it."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.serial_utils import MsgpackEncoder

from deployments.generation.serving import grammar_checks
from deployments.generation.serving.grammar_checks import MOST_BYTES, GrammarChecks, encoded
from deployments.upstream.vllm.structured_outputs import CheckedOutputs, validated
from tests.paths import TINY_MODEL

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
SLOW_TO_COMPILE = {"type": "integer", "multipleOf": 9999991}
SLOW_TO_MATCH = "((a{0,500}){0,500}){0,500}"
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
def test_a_schema_is_refused_iff_vllm_cannot_send_it_to_its_engine(schema: dict[str, Any]) -> None:
    wanted = StructuredOutputsParams(json=schema)
    try:
        MsgpackEncoder().encode(SamplingParams(structured_outputs=wanted))
    except OverflowError:
        with pytest.raises(VLLMValidationError, match="write a smaller one"):
            encoded(wanted)
    else:
        encoded(wanted)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def asking(**wanted: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))


def config_with(backend: Any) -> VllmConfig:
    outputs = StructuredOutputsConfig(backend=backend)
    arguments = AsyncEngineArgs(model=str(TINY_MODEL), max_model_len=256, structured_outputs_config=outputs)
    return arguments.create_engine_config()


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return config_with("xgrammar")


@pytest.fixture
def checks(config: VllmConfig) -> Iterator[GrammarChecks]:
    with closing(GrammarChecks(config, time_limit_s=2.0)) as checks:
        yield checks


async def test_calls_without_a_grammar_need_no_process(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("deployments.generation.serving.grammar_checks.WorkerPool.start", never)
    checks = GrammarChecks(config, time_limit_s=2.0)
    free, json_object = SamplingParams(), asking(json_object=True)

    await checks.check(free)
    await checks.check(json_object)
    with pytest.raises(VLLMValidationError, match=f"at most {MOST_BYTES} are taken"):
        await checks.check(asking(choice=["x" * MOST_BYTES]))
    assert free.structured_outputs is None
    assert not isinstance(json_object.structured_outputs, CheckedOutputs)


@pytest.mark.timeout(300)
async def test_what_fits_is_as_in_vllm_and_what_does_not_is_refused(config: VllmConfig, checks: GrammarChecks) -> None:
    tokenizer: Any = cached_tokenizer_from_config(config.model_config)
    fitting: list[dict[str, Any]] = [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"choice": ["yes", "no"]},
        {"regex": "[ab]{3}"},
    ]
    for wanted in fitting:
        params = asking(**wanted)
        await checks.check(params)
        by_vllm = validated(StructuredOutputsParams(**wanted), config, tokenizer)
        assert isinstance(params.structured_outputs, CheckedOutputs)
        assert MsgpackEncoder().encode(params.structured_outputs) == MsgpackEncoder().encode(by_vllm)
        again = asking(**wanted)
        await checks.check(again)
        assert again.structured_outputs is params.structured_outputs
    with pytest.raises(VLLMValidationError, match="not supported by xgrammar"):
        await checks.check(asking(json={"type": "integer", "multipleOf": 2}))
    for depth in (65, 500, 5000):
        with pytest.raises(VLLMValidationError, match="nested too deeply"):
            await checks.check(asking(json=nested(depth)))
    with pytest.raises(VLLMValidationError, match="The parenthesis is not closed"):
        await checks.check(asking(regex="(("))
    with pytest.raises(VLLMValidationError, match="takes more than 2 s of processor time; make it simpler"):
        await checks.check(asking(regex=SLOW_TO_MATCH))
    # The process that was ended is replaced.
    await checks.check(asking(choice=["after"]))


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_schema_that_compiles_for_too_long_is_refused() -> None:
    # This backend takes more of JSON schemas, and any time for some.
    with closing(GrammarChecks(config_with("guidance"), time_limit_s=2.0)) as guided:
        await guided.check(asking(json={"type": "integer", "multipleOf": 2}))
        with pytest.raises(VLLMValidationError, match="takes more than 2 s of processor time; make it simpler"):
            await guided.check(asking(json=SLOW_TO_COMPILE))


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_what_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Room for the threads of the compilers.
    monkeypatch.setattr(grammar_checks, "MOST_MEMORY_BYTES", 256 * 1024**2)
    guided = GrammarChecks(config_with("guidance"), time_limit_s=30.0)
    with pytest.raises(VLLMValidationError, match=r"too much memory|that compiled it ended"):
        await guided.check(asking(json={"type": "integer", "multipleOf": 1000003}))
    await guided.check(asking(choice=["after"]))
    guided.close()


def test_vllm_validates_what_was_not_checked_and_nothing_else(config: VllmConfig) -> None:
    GrammarChecks(config, time_limit_s=2.0)
    with pytest.raises(VLLMValidationError, match="cannot be an empty list"):
        validated(StructuredOutputsParams(choice=[]), config, object())
    validated(CheckedOutputs(choice=[]), config, object())
