"""Compiles a JSON schema, regular expression or grammar as the engine does.

Runs in a worker process of the generator replica: `grammar_checks.py` is the other half.
"""

import logging
import os
import re
import resource
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from deployments.upstream.vllm.structured_outputs import backend_of, compiled_with, validated

PRELOADED = (__name__, "vllm.v1.structured_output.backend_xgrammar", "vllm.v1.structured_output.backend_guidance")
"""Modules that a worker process imports before its first call."""
_CACHE_MB = "32"
"""Cache of compiled grammars, in the worker process."""
WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""How messages of xgrammar begin: with a time and a line of its source."""
FIELD = "structured_outputs"
TRIED_TOKENS = 512
_LONGEST_REASON = 500
"""Characters."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why vLLM cannot use it."""

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
    """Takes `TRIED_TOKENS` tokens at random of those that are allowed: what compiles fast may match slowly."""
    chosen = Random(0)
    words = bitmask[0].numpy()
    for _ in range(TRIED_TOKENS):
        grammar.fill_bitmask(bitmask, 0)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        going_on = allowed[allowed != eos_token_id]
        if not len(going_on) or not grammar.accept_tokens("", [int(chosen.choice(going_on))]):
            return


compiler: _GrammarCompiler


def prepare(config: VllmConfig, most_bytes: int) -> None:
    """Prepares a worker process, which may take `most_bytes` beside the memory that it has at its start."""
    # It would log each grammar that cannot be compiled with its trace.
    logging.disable(logging.CRITICAL)
    os.environ["VLLM_XGRAMMAR_CACHE_MB"] = _CACHE_MB
    global compiler
    compiler = _GrammarCompiler(config)
    limit = psutil.Process().memory_info().data + most_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def compiled(asked: bytes, backends: frozenset[str]) -> bytes | Refused:
    """As `_GrammarCompiler.compile` for and with the MessagePack of `StructuredOutputsParams`: what is nested deeply
    cannot be pickled. What it raises is a value, because not all exceptions travel between processes.
    """
    try:
        wanted = msgspec.msgpack.decode(asked, type=StructuredOutputsParams)
        return msgspec.msgpack.encode(compiler.compile(wanted, backends))
    except MemoryError:
        return Refused("compiling it takes too much memory; make it smaller", FIELD)
    except VLLMValidationError as error:
        return Refused(str(error.args[0])[:_LONGEST_REASON], error.parameter)
    except Exception as error:  # noqa: BLE001 - the caller gets it as a sentence
        reason = WHERE.sub("", str(error))
        return Refused(f"it cannot be compiled: {reason}"[:_LONGEST_REASON], FIELD)
