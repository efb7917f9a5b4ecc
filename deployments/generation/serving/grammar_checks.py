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
from functools import partial
from hashlib import sha256
from random import Random
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from deployments.failures import GenerationLost
from deployments.upstream.vllm.structured_outputs import CheckedOutputs, compiled, skip_checked_outputs, validated
from rollout_env import TemporaryFailure
from rollout_env.worker_pool import ProcessorTimeExceeded, WorkerEnded, WorkerPool

MOST_BYTES = 256 * 1024
"""Size of a schema or grammar."""
MOST_MEMORY_BYTES = 1024**3
"""Beside what the process has at its start."""
_START_WITHIN_S = 600.0
"""Importing vLLM takes ten seconds on a machine that does nothing else."""
_LOST_AFTER_S = 60.0
_MOST_KNOWN = 64
"""How many that fit are kept, so that the calls of an agent are checked once."""
_PRELOADED = (__name__, "vllm.v1.structured_output.backend_xgrammar")
"""Modules that a worker process imports before its first call."""
_CACHE_MB = "32"
"""Cache of compiled grammars, in the worker process."""
WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""How messages of xgrammar begin: with a time and a line of its source."""
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
        self._known: dict[bytes, CheckedOutputs] = {}
        """By the hash of what was asked for."""

    async def check(self, params: SamplingParams) -> None:
        """Replaces what the parameters ask for by what vLLM's validation makes of it.

        Raises:
            VLLMValidationError: vLLM cannot use it, or it takes too much time or memory to compile.
            GenerationLost: no process could check it.
        """
        wanted = params.structured_outputs
        # A JSON object is always the same grammar, and not the caller's.
        if wanted is None or wanted.all_constraints_none() or wanted.json_object is not None:
            return
        asked = encoded(wanted)
        if len(asked) > MOST_BYTES:
            raise _refusal(f"it has {len(asked)} bytes; at most {MOST_BYTES} are taken")
        key = sha256(asked).digest()
        if (valid := self._known.get(key)) is None:
            valid = await self._compiled(asked)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = valid
        params.structured_outputs = valid

    def close(self) -> None:
        """Ends the process."""
        if self._pool is not None:
            self._pool.close()

    async def _compiled(self, asked: bytes) -> CheckedOutputs:
        try:
            pool = await self._started()
            result: bytes | str = await pool.run(self._time_limit_s, _compile, asked)
        except ProcessorTimeExceeded as error:
            raise _refusal(
                f"compiling it and matching {_TRIED_TOKENS} tokens takes {error}; make it simpler"
            ) from error
        except WorkerEnded as error:
            raise _refusal("the process that compiled it ended; make it simpler") from error
        except TemporaryFailure as error:
            raise GenerationLost(f"A schema or grammar could not be checked. {error}") from error
        if isinstance(result, str):
            raise _refusal(result)
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
        raise _refusal("it has an integer below -2**63 or above 2**64 - 1; write a smaller one") from None
    except RecursionError:
        raise _refusal("it is nested too deeply") from None


def _refusal(reason: str) -> VLLMValidationError:
    message = f"The schema, regular expression or grammar is refused: {reason}"
    return VLLMValidationError(message, parameter="structured_outputs")


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


_manager: StructuredOutputManager
"""vLLM's own compiler, in a worker process."""
_tokenizer: Any


def _prepare(config: VllmConfig, most_bytes: int) -> None:
    """Prepares a worker process, which may take `most_bytes` beside the memory that it has at its start."""
    # It would log each grammar that cannot be compiled with its trace.
    logging.disable(logging.CRITICAL)
    os.environ["VLLM_XGRAMMAR_CACHE_MB"] = _CACHE_MB
    global _manager, _tokenizer
    _manager, _tokenizer = StructuredOutputManager(config), cached_tokenizer_from_config(config.model_config)
    limit = psutil.Process().memory_info().data + most_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _compile(asked: bytes) -> bytes | str:
    """Validates a grammar, compiles it, and matches tokens with it, in a worker process.

    Both sides are the MessagePack of `StructuredOutputsParams`: what is nested deeply cannot be pickled. Returns why
    vLLM cannot use it as a text, because not all exceptions travel between processes.
    """
    try:
        wanted = msgspec.msgpack.decode(asked, type=StructuredOutputsParams)
        valid = validated(wanted, _manager.vllm_config, _tokenizer)
        grammar = compiled(_manager, valid)
        assert _manager.backend is not None
        _match_tokens(grammar, _manager.backend.allocate_token_bitmask(1), _tokenizer.eos_token_id)
        return msgspec.msgpack.encode(valid)
    except MemoryError:
        return "compiling it takes too much memory; make it smaller"
    except Exception as error:  # noqa: BLE001 - the caller gets it as a sentence
        reason = WHERE.sub("", str(error.args[0] if isinstance(error, VLLMValidationError) else error))
        return f"it cannot be compiled: {reason}"[:_LONGEST_REASON]
