"""Held outputs beside those of vLLM's own schedulers: two cores in lockstep, with a model that is a function."""

import asyncio
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.upstream.vllm.held_outputs import PORTION, PORTION_WITH_STOPS, end_requests, hold_outputs
from deployments.upstream.vllm.token_texts import install_token_texts
from tests.fakes.async_llm import GeneratingLLM
from tests.paths import TINY_MODEL
from tests.virtual_time import runs

pytestmark = pytest.mark.slow
LETTERS, END_ID, MOST_TOKENS = range(ord("A"), ord("z") + 1), ord("Z"), 200


class FunctionExecutor(Executor):
    """Tokens and log-probabilities depend on the request, the place and the version of the weights alone."""

    def _init_executor(self) -> None:
        self.version = 0
        self.requests: dict[str, tuple[int, int]] = {}
        """How many tokens its prompt has, and how many likeliest ones it wants named."""

    def get_kv_cache_specs(self) -> list[Any]:
        return [{"layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)}]

    def determine_available_memory(self) -> list[int]:
        return [40 * 16 * 8 * 4 * 2]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def collective_rpc(self, method: Any, *_args: Any, **_options: Any) -> Any:
        return [["LBNHC"]] if method == "get_supported_kv_cache_layouts" else [None]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self._output: Future[ModelRunnerOutput] = Future()
        self._output.set_result(self._output_of(scheduler_output))
        return self._output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._output

    def _output_of(self, step: SchedulerOutput) -> ModelRunnerOutput:
        places: dict[str, tuple[int, int]] = {}
        """Where the tokens of a request end that are there, and where those that are computed do."""
        for new in step.scheduled_new_reqs:
            prompt, params = new.prompt_token_ids or [], new.sampling_params
            self.requests[new.req_id] = len(prompt), 0 if params is None else params.logprobs or 0
            places[new.req_id] = len(prompt), new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for name, computed, made in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            places[name] = self.requests[name][0] + made, computed
        width = 1 + max((self.requests[name][1] for name in places), default=0)
        ids, logprobs = np.zeros((len(places), width), np.int64), np.zeros((len(places), width), np.float32)
        sampled: list[list[int]] = []
        for row, (name, (end, computed)) in enumerate(places.items()):
            place = computed + step.num_scheduled_tokens[name]
            draws = np.random.default_rng(crc32(f"{name} {place} {self.version}".encode()))
            ids[row], logprobs[row] = draws.choice(LETTERS, 4)[:width], -draws.random(4)[:width]
            sampled.append([int(ids[row, 0])] if place >= end else [])
        return ModelRunnerOutput(
            req_ids=list(places),
            req_id_to_index={name: row for row, name in enumerate(places)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(ids, logprobs, ids[:, 0] % 5),
        )


class PlainScheduler(Scheduler):
    def released(self, _request_ids: Any = None) -> dict[int, Any]:
        """Nothing: the patch of the core is that of the whole process."""
        return {}


class PlainAsyncScheduler(PlainScheduler, AsyncScheduler):
    pass


class Core(EngineCoreProc):
    """vLLM's core without sockets."""

    def __init__(self, config: VllmConfig) -> None:
        self.input_queue, self.output_queue = queue.Queue(), queue.Queue()
        self.engines_running = False
        EngineCore.__init__(self, config, FunctionExecutor, log_stats=True)

    def advance(self) -> None:
        if self.has_work():
            self._process_engine_step()
        else:
            self._notify_idle_state_callbacks()


@cache
def tokenizer() -> Any:
    return get_tokenizer(str(TINY_MODEL))


@cache
def config(is_async: bool, holds: bool) -> VllmConfig:
    engine = AsyncEngineArgs(
        model=str(TINY_MODEL),
        max_model_len=512,
        enforce_eager=True,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        async_scheduling=is_async,
    ).create_engine_config()
    if holds:
        hold_outputs(engine)
    else:
        engine.scheduler_config.scheduler_cls = PlainAsyncScheduler if is_async else PlainScheduler
    return engine


class Engine:
    """A core and a front end, with the messages between them as bytes."""

    def __init__(self, is_async: bool, holds: bool) -> None:
        self.holds = holds
        self.core = Core(config(is_async, holds))
        self.front = OutputProcessor(tokenizer(), log_stats=True)
        if holds:
            install_token_texts(SimpleNamespace(output_processor=self.front))
        self.results: dict[str, RequestOutputCollector] = {}
        self.messages: list[EngineCoreOutputs] = []

    def add(self, name: str, prompt: int, params: SamplingParams) -> None:
        request = EngineCoreRequest(
            name, list(range(prompt)), None, params, None, 0.0, None, None, None, external_req_id=name
        )
        self.results[name] = RequestOutputCollector(params.output_kind, name)
        self.front.add_request(request, None, queue=self.results[name])
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> None:
        self.core.advance()
        self.deliver()

    def deliver(self) -> None:
        while not self.core.output_queue.empty():
            _, outputs = self.core.output_queue.get()
            outputs = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
            self.messages.append(outputs)
            processed = self.front.process_outputs(
                outputs.outputs, outputs.timestamp, IterationStats(), weight_version=outputs.weight_version
            )
            self.core.abort_requests(processed.reqs_to_abort)

    def interrupt(self, names: list[str]) -> None:
        if self.holds:
            names = self.core.end_requests(names)  # type: ignore[attr-defined]
        self.core.abort_requests(self.front.abort_requests(names, internal=True))
        self.deliver()

    def update(self, mode: Any) -> None:
        paused = self.core.pause_scheduler(mode, clear_cache=False)
        while paused is not None and not paused.done():
            self.step()
        self.deliver()
        self.core.model_executor.version += 1
        self.core.set_weight_version(str(self.core.model_executor.version))
        self.core.resume_scheduler()

    def finish(self) -> None:
        while self.core.has_work():
            self.step()

    def blocks(self) -> list[Any]:
        """Of each group of the cache: those of each request by number, and how many of them others can find."""
        managers = self.core.scheduler.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
        return [
            (
                {name: [block.block_id for block in blocks] for name, blocks in of_group.req_to_blocks.items()},
                dict(of_group.num_cached_block),
            )
            for of_group in managers
        ]

    def generated(self) -> dict[str, Any]:
        outputs: dict[str, Any] = {name: result.get_nowait() for name, result in self.results.items()}
        return {
            name: None if output is None else (output.outputs[0], output.num_cached_tokens, output.finished)
            for name, output in outputs.items()
        }


REQUESTS = st.tuples(st.integers(1, 100), st.integers(1, MOST_TOKENS), st.integers(0, 3), st.booleans())
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, PORTION + 8)),
        st.tuples(st.just("add"), REQUESTS),
        st.tuples(st.just("interrupt"), st.sets(st.integers(0, 9), min_size=1, max_size=3)),
        st.tuples(st.just("update"), st.sampled_from(["keep", "abort", "wait"])),
    ),
    max_size=20,
)


@pytest.mark.parametrize("is_async", [False, True])
@given(requests=st.lists(REQUESTS, min_size=1, max_size=5), steps=STEPS)
def test_what_is_generated_does_not_depend_on_what_is_held(is_async: bool, requests: Any, steps: Any) -> None:
    plain, holding = engines = Engine(is_async, holds=False), Engine(is_async, holds=True)
    for action, of_action in [*(("add", request) for request in requests), *steps]:
        for engine in engines:
            names = list(engine.results)
            match action:
                case "step":
                    for _ in range(of_action):
                        engine.step()
                case "add":
                    prompt, most, named, ignores_end = of_action
                    engine.add(f"{len(names)}", prompt, params_of(most, named, ignores_end))
                case "interrupt":
                    engine.interrupt([names[place] for place in of_action if place < len(names)])
                case "update":
                    engine.update(of_action)
        assert holding.blocks() == plain.blocks()
    for engine in engines:
        engine.finish()
    assert holding.generated() == plain.generated()


STOPS = st.lists(st.sampled_from(["a", "Q", "be", "never"]), max_size=2)


@pytest.mark.parametrize("is_async", [False, True])
@given(requests=st.lists(st.tuples(REQUESTS, STOPS), min_size=1, max_size=6))
def test_tokens_after_a_stop_string_are_dropped(is_async: bool, requests: Any) -> None:
    engines = Engine(is_async, holds=False), Engine(is_async, holds=True)
    for engine in engines:
        for number, ((prompt, most, named, ignores_end), stops) in enumerate(requests):
            engine.add(f"{number}", prompt, params_of(most, named, ignores_end, stops))
        engine.finish()
    # What was found in the cache depends on how long others run.
    plain, holding = ({name: output for name, (output, *_) in engine.generated().items()} for engine in engines)
    assert holding == plain


@pytest.mark.parametrize("is_async", [False, True])
def test_a_portion_is_one_message_and_the_first_token_another(is_async: bool) -> None:
    sent = {}
    for stops in ((), ("never",)):
        engine = Engine(is_async, holds=True)
        engine.add("a", 5, params_of(1 + 2 * PORTION + 3, stops=stops))
        engine.finish()
        sent[stops] = [len(output.new_token_ids) for message in engine.messages for output in message.outputs]
    assert sent[()] == [1, PORTION, PORTION, 3]
    assert sent[("never",)] == [1, *[PORTION_WITH_STOPS] * (2 * PORTION // PORTION_WITH_STOPS), 3]


@pytest.mark.parametrize("holds", [False, True])
def test_vllm_itself_holds_nothing_and_thins_streams_in_its_front_end(holds: bool) -> None:
    engine = Engine(is_async=False, holds=holds)
    params = params_of(9)
    params.output_kind, params.stream_interval = RequestOutputKind.DELTA, 4
    engine.add("a", 5, params)
    engine.finish()
    assert [len(output.new_token_ids) for message in engine.messages for output in message.outputs] == [1] * 9


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_ends_before_its_first_token_is_in_no_message(is_async: bool) -> None:
    engine = Engine(is_async, holds=True)
    engine.add("a", 5, params_of(9))
    engine.interrupt(["a"])
    output: Any = engine.results["a"].get_nowait()
    assert (output.finished, output.outputs[0].token_ids, engine.messages) == (True, [], [])


class MuteCore(GeneratingLLM):
    def __init__(self, answer: Exception | None) -> None:
        super().__init__()
        self.answer = answer

    async def call_utility_async(self, _method: str, _engine_ids: Sequence[str]) -> list[str]:
        if self.answer is not None:
            raise self.answer
        await asyncio.Event().wait()
        return []


@pytest.mark.parametrize("answer", [None, EngineDeadError(), Exception("Server shutting down")])
@runs
async def test_requests_of_a_core_that_does_not_answer_end_all_the_same(answer: Exception | None) -> None:
    llm = MuteCore(answer)
    await end_requests(llm, ["a"])
    assert llm.aborted == ["a"]


def params_of(most: int, named: int = 0, ignores_end: bool = True, stops: Sequence[str] = ()) -> SamplingParams:
    params = SamplingParams(
        max_tokens=most,
        logprobs=named,
        flat_logprobs=True,
        ignore_eos=ignores_end,
        stop=list(stops),
        include_stop_str_in_output=True,
        detokenize=bool(stops),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    params.update_from_generation_config({}, END_ID)
    return params
