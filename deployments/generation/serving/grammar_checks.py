"""Compiles what a call's answer must fit in a process of its own, before the engine compiles it.

vLLM validates and compiles schemas, regular expressions and grammars in the replica and in the engine without a limit,
and matches tokens between two steps of the engine: `{"type": "integer", "multipleOf": 9999991}` keeps a processor busy
for minutes, others take all memory of the machine, and the regular expression `((a{0,500}){0,500}){0,500}` keeps all
generations waiting. A process can be ended, whatever it does.
"""

import asyncio
import logging
import os
import re
import resource
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from random import Random
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from deployments.failures import GenerationLost
from deployments.upstream.vllm.structured_outputs import (
    CheckedOutputs,
    backend_of,
    compiled_with,
    skip_checked_outputs,
    validated,
)
from rollout_env import TemporaryFailure
from rollout_env.worker_pool import ProcessorTimeExceeded, WorkerEnded, WorkerPool

MOST_BYTES = 256 * 1024
"""Size of a schema or grammar."""
MOST_MEMORY_BYTES = 1024**3
"""Beside what the process has at its start."""
_START_WITHIN_S = 600.0
"""Importing vLLM takes ten seconds on a machine that does nothing else."""
_LOST_AFTER_S = 60.0
MOST_KNOWN = 64
"""How many that fit are kept, so that the calls of an agent are checked once."""
_BACKEND_OF_OBJECTS = "xgrammar"
"""With which vLLM compiles `json_object`, unless its config says otherwise."""
_PRELOADED = (__name__, "vllm.v1.structured_output.backend_xgrammar", "vllm.v1.structured_output.backend_guidance")
"""Modules that a worker process imports before its first call."""
_CACHE_MB = "32"
"""Cache of compiled grammars, in the worker process."""
WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""How messages of xgrammar begin: with a time and a line of its source."""
_FIELD = "structured_outputs"
_TRIED_TOKENS = 512
_LONGEST_REASON = 500
"""Characters."""


class GrammarChecks:
    """Checks of one replica. The process starts with the first call that needs it."""

    def __init__(self, config: VllmConfig, time_limit_s: float) -> None:
        """`time_limit_s` is processor time."""
        skip_checked_outputs()
        self._config = config
        self._time_limit_s = time_limit_s
        self._pool: WorkerPool | None = None
        self._starting = asyncio.Lock()
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
                self._backends |= {_BACKEND_OF_OBJECTS}
            return
        asked = encoded(wanted)
        if len(asked) > MOST_BYTES:
            raise _refusal(f"it has {len(asked)} bytes; at most {MOST_BYTES} are taken")
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
        # A second attempt with another process: the first one was possibly out of memory.
        attempts = AsyncRetrying(retry=retry_if_exception_type(WorkerEnded), stop=stop_after_attempt(2), reraise=True)
        try:
            pool = await self._started()
            result: bytes | _Refused = await attempts(pool.run, self._time_limit_s, _compile, asked, self._backends)
        except ProcessorTimeExceeded as error:
            raise _refusal(
                f"compiling it and matching {_TRIED_TOKENS} tokens takes {error}; make it simpler"
            ) from error
        except WorkerEnded as error:
            raise _refusal("the process that compiled it ended twice; make it simpler") from error
        except TemporaryFailure as error:
            raise GenerationLost(f"A schema or grammar could not be checked. {error}") from error
        if isinstance(result, _Refused):
            raise VLLMValidationError(result.reason, parameter=result.parameter)
        return msgspec.msgpack.decode(result, type=CheckedOutputs)

    async def _started(self) -> WorkerPool:
        async with self._starting:
            if self._pool is None:
                self._pool = await WorkerPool.start(
                    1,
                    partial(_prepare, self._config, MOST_MEMORY_BYTES),
                    _PRELOADED,
                    first_call=int,
                    start_within_s=_START_WITHIN_S,
                    lost_after_s=max(_LOST_AFTER_S, 4 * self._time_limit_s),
                )
        return self._pool


def encoded(wanted: StructuredOutputsParams) -> bytes:
    """As vLLM sends it to the engine's process. Raises `VLLMValidationError` for what it cannot send."""
    try:
        return msgspec.msgpack.encode(wanted)
    except OverflowError:
        raise VLLMValidationError(
            "the JSON schema has an integer below -2**63 or above 2**64 - 1; write a smaller one", parameter="schema"
        ) from None
    except RecursionError:
        raise _refusal("it is nested too deeply") from None


def _refusal(reason: str) -> VLLMValidationError:
    return VLLMValidationError(f"The schema, regular expression or grammar is refused: {reason}", parameter=_FIELD)


@dataclass(frozen=True, slots=True)
class _Refused:
    """Why vLLM cannot use it, as the process says."""

    reason: str
    parameter: str | None


class _GrammarCompiler:
    """vLLM's own, with a manager for each of its backends: an engine keeps to the first one that it needs."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._tokenizer: Any = cached_tokenizer_from_config(config.model_config)
        self._managers: dict[str, StructuredOutputManager] = {}
        """By the name of the backend."""

    def compile(self, wanted: StructuredOutputsParams, backends: frozenset[str]) -> StructuredOutputsParams:
        """Validates it, compiles it, and matches tokens with it.

        Args:
            backends: with which it is compiled beside the one that suits it.

        Returns:
            The result of vLLM's validation.

        Raises:
            Exception: what vLLM and its backends raise.
        """
        valid = validated(wanted, self._config, self._tokenizer)
        for backend in sorted({backend_of(valid), *backends}):
            self._compile_with(backend, valid)
        return valid

    def _compile_with(self, name: str, valid: StructuredOutputsParams) -> None:
        if (manager := self._managers.get(name)) is None:
            manager = self._managers[name] = StructuredOutputManager(self._config)
        grammar = compiled_with(manager, name, valid)
        assert manager.backend is not None
        _match_tokens(grammar, manager.backend.allocate_token_bitmask(1), self._tokenizer.eos_token_id)


def _match_tokens(grammar: StructuredOutputGrammar, bitmask: torch.Tensor, eos_token_id: int | None) -> None:
    """Takes `_TRIED_TOKENS` tokens at random of those that are allowed: what compiles fast may match slowly."""
    chosen = Random(0)
    words = bitmask[0].numpy()
    for _ in range(_TRIED_TOKENS):
        grammar.fill_bitmask(bitmask, 0)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        going_on = allowed[allowed != eos_token_id]
        if not len(going_on) or not grammar.accept_tokens("", [int(chosen.choice(going_on))]):
            return


_compiler: _GrammarCompiler


def _prepare(config: VllmConfig, most_bytes: int) -> None:
    """Prepares a worker process, which may take `most_bytes` beside the memory that it has at its start."""
    # It would log each grammar that cannot be compiled with its trace.
    logging.disable(logging.CRITICAL)
    os.environ["VLLM_XGRAMMAR_CACHE_MB"] = _CACHE_MB
    global _compiler
    _compiler = _GrammarCompiler(config)
    limit = psutil.Process().memory_info().data + most_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _compile(asked: bytes, backends: frozenset[str]) -> bytes | _Refused:
    """As `_GrammarCompiler.compile` for and with the MessagePack of `StructuredOutputsParams`: what is nested deeply
    cannot be pickled. What it raises is a value, because not all exceptions travel between processes.
    """
    try:
        wanted = msgspec.msgpack.decode(asked, type=StructuredOutputsParams)
        return msgspec.msgpack.encode(_compiler.compile(wanted, backends))
    except MemoryError:
        return _Refused("compiling it takes too much memory; make it smaller", _FIELD)
    except VLLMValidationError as error:
        return _Refused(str(error.args[0])[:_LONGEST_REASON], error.parameter)
    except Exception as error:  # noqa: BLE001 - the caller gets it as a sentence
        reason = WHERE.sub("", str(error))
        return _Refused(f"it cannot be compiled: {reason}"[:_LONGEST_REASON], _FIELD)
