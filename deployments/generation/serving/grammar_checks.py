"""Compiles what a call's answer must fit in a process of its own, before the engine compiles it.

Child's half: `grammar_compiling.py`. vLLM validates and compiles schemas, regular expressions and grammars in the
replica and in the engine without a limit, and matches tokens between two steps of the engine:
`{"type": "integer", "multipleOf": 9999991}` keeps a processor busy for minutes, others take all memory of the machine,
and the regular expression `((a{0,500}){0,500}){0,500}` keeps all generations waiting. A process can be ended, whatever
it does.
"""

from collections import OrderedDict
from functools import partial
from hashlib import sha256

import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from deployments.failures import GenerationLost
from deployments.generation.serving.grammar_compiling import FIELD, PRELOADED, TRIED_TOKENS, Refused, compiled, prepare
from deployments.rpc.background_tasks import SharedCall
from deployments.upstream.vllm.structured_outputs import CheckedOutputs, backend_of, skip_checked_outputs
from rollout_env import TemporaryFailure
from rollout_env.worker_pool import ProcessorTimeExceeded, WorkerEnded, WorkerPool

MOST_BYTES = 256 * 1024
"""Size of a schema or grammar."""
MOST_MEMORY_BYTES = 1024**3
"""Beside what the process has at its start."""
START_WITHIN_S = 600.0
"""Importing vLLM takes ten seconds on a machine that does nothing else."""
LOST_AFTER_S = 60.0
MOST_KNOWN = 64
"""How many that fit are kept, so that the calls of an agent are checked once."""
BACKEND_OF_OBJECTS = "xgrammar"
"""With which vLLM compiles `json_object`, unless its config says otherwise."""


class GrammarChecks:
    """Checks of one replica. The process starts with the first call that needs it."""

    def __init__(self, config: VllmConfig, time_limit_s: float) -> None:
        """`time_limit_s` is processor time."""
        skip_checked_outputs()
        self._config = config
        self._time_limit_s = time_limit_s
        self._pool: WorkerPool | None = None
        self._starting = SharedCall(self._start)
        self._known: OrderedDict[bytes, CheckedOutputs] = OrderedDict()
        """By the hash of what was asked for."""
        self._backends: frozenset[str] = frozenset()
        """Backends of those that fit so far: the engine compiles with the first of them."""

    async def check(self, params: SamplingParams) -> None:
        """Replaces what the parameters ask for by what vLLM's validation makes of it.

        Raises:
            VLLMValidationError: vLLM cannot use it, or it takes too much time or memory to compile.
            GenerationLost: no process could check it.
        """
        wanted = params.structured_outputs
        if wanted is None or wanted.all_constraints_none():
            return
        if wanted.json_object is not None:
            # It is always the same grammar, and not the caller's.
            if self._config.structured_outputs_config.backend == "auto":
                self._backends |= {BACKEND_OF_OBJECTS}
            return
        asked = encoded(wanted)
        if len(asked) > MOST_BYTES:
            raise refusal(f"it has {len(asked)} bytes; at most {MOST_BYTES} are taken")
        key = sha256(asked).digest()
        if key not in self._known:
            self._keep(key, await self._compiled(asked))
        self._known.move_to_end(key)
        params.structured_outputs = self._known[key]

    def close(self) -> None:
        """Ends the process."""
        if self._pool is not None:
            self._pool.close()

    def _keep(self, key: bytes, valid: CheckedOutputs) -> None:
        self._backends |= {backend_of(valid)}
        self._known[key] = valid
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    async def _compiled(self, asked: bytes) -> CheckedOutputs:
        pool = await self._started()
        try:
            result: bytes | Refused = await attempts()(pool.run, self._time_limit_s, compiled, asked, self._backends)
        except ProcessorTimeExceeded as error:
            raise refusal(f"compiling it and matching {TRIED_TOKENS} tokens takes {error}; make it simpler") from error
        except WorkerEnded as error:
            raise refusal("the process that compiled it ended twice; make it simpler") from error
        except TemporaryFailure as error:
            raise not_checked(error) from error
        if isinstance(result, Refused):
            raise VLLMValidationError(result.reason, parameter=result.parameter)
        return msgspec.msgpack.decode(result, type=CheckedOutputs)

    async def _started(self) -> WorkerPool:
        return await self._starting.result() if self._pool is None else self._pool

    async def _start(self) -> WorkerPool:
        try:
            self._pool = await WorkerPool.start(
                1,
                partial(prepare, self._config, MOST_MEMORY_BYTES),
                PRELOADED,
                first_call=int,
                start_within_s=START_WITHIN_S,
                lost_after_s=max(LOST_AFTER_S, 4 * self._time_limit_s),
            )
        except TemporaryFailure as error:
            raise not_checked(error) from error
        return self._pool


def attempts() -> AsyncRetrying:
    """A second attempt with another process: the first one was possibly out of memory."""
    return AsyncRetrying(retry=retry_if_exception_type(WorkerEnded), stop=stop_after_attempt(2), reraise=True)


def not_checked(error: TemporaryFailure) -> GenerationLost:
    return GenerationLost(f"A schema or grammar could not be checked. {error}")


def encoded(wanted: StructuredOutputsParams) -> bytes:
    """As vLLM sends it to the engine's process. Raises `VLLMValidationError` for what it cannot send."""
    try:
        return msgspec.msgpack.encode(wanted)
    except OverflowError:
        raise VLLMValidationError(
            "the JSON schema has an integer below -2**63 or above 2**64 - 1; write a smaller one", parameter="schema"
        ) from None
    except RecursionError:
        raise refusal("it is nested too deeply") from None


def refusal(reason: str) -> VLLMValidationError:
    return VLLMValidationError(f"The schema, regular expression or grammar is refused: {reason}", parameter=FIELD)
