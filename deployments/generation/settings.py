"""The `engine:` and `responses:` sections of a Serve config where an engine runs. Imports neither Ray nor vLLM."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ImportString, model_validator

from deployments.protocols.chat import FromHub, SplitSpecialTokens
from deployments.strict_settings import StrictSettings


class ResponseSettings(StrictSettings):
    """Parts of responses that environments and answers show beside their text. Token ids never depend on it."""

    tool_call_parser: str | None = None
    """vLLM's parser of the model's tool calls, by its name there (`--tool-call-parser`), such as `hermes`. Without it
    responses have no `tool_calls`."""
    reasoning_parser: str | None = None
    """vLLM's parser of the model's reasoning, by its name there (`--reasoning-parser`), such as `qwen3`. Without it
    responses have no `reasoning_content`."""
    skip_special_tokens: bool = True
    """Whether the text of a response leaves out special tokens. With false it has them, apart from the one that ends
    the turn: for environments that look for call markers which are special tokens. The parsers see them either way."""
    parser_processes: int = Field(default=1, ge=1)
    """Processes of one ingress replica that run the parsers. The first needs half a GB, each further one less."""
    parse_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds of processor time for one response. A response that needs more is not parsed, and says so."""

    @property
    def has_parsers(self) -> bool:
        return self.tool_call_parser is not None or self.reasoning_parser is not None


RESERVED_ENGINE_ARGS = {
    "reasoning_parser": "set responses.reasoning_parser, which the engine gets too",
    "logprobs_mode": "log-probabilities are always those of the sampled distribution",
    "data_parallel_size": "a replica is one engine, and more of them are replicas: set num_replicas of the deployment "
    "Generator",
    "worker_extension_cls": "the service needs its own worker extension to swap weights",
    "scheduler_cls": "the service needs its own scheduler to hold outputs",
}

_INEXACT = """
spec_method spec_model spec_tokens diffusion_config watermark_config logits_processors enable_trace_replay
default_mm_loras enable_prompt_embeds enable_mm_embeds skip_tokenizer_init tokens_only enable_eplb model_weights
"""
INEXACT_ENGINE_ARGS = frozenset(_INEXACT.split())
"""Arguments of vLLM that break exactness or the record in silence. Values that ask for nothing are taken.
`docs/deploy.md` has the reason for each, and lists those that change what is sampled and are taken."""
_DRAFTS_ANYWHERE = ("ngram", "draft_model", "custom_class")
_DRAFTS_ON_GPUS = ("ngram_gpu", "suffix", "eagle", "eagle3", "mtp", "dflash", "dspark", "medusa")
DRAFT_METHODS = {"cpu": _DRAFTS_ANYWHERE, "gpu": (*_DRAFTS_ANYWHERE, *_DRAFTS_ON_GPUS)}
"""Methods of speculative decoding that are exact on a device, by vLLM's names."""
_MOST_DRAFTS = 128
"""vLLM verifies no more in one step, and dies of them."""
_DRAFTS_IN_STEP = ("ngram", "suffix", "custom_class")
"""Methods of speculative decoding that draft on the host, between two steps: no step is scheduled before."""
_NOT_FOR_VLLM = {
    "replica",
    "device",
    "engines_per_gpu",
    "split_special_tokens",
    "num_cpus",
    "hang_timeout_s",
    "grammar_time_limit_s",
    "environment_variables",
}
"""Fields of `EngineSettings` that are the service's own."""
_COMPILED_AT_FIRST_USE = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
"""Kernels that vLLM would compile with nvcc in the middle of a generation: the image has no nvcc, and with one it takes
minutes, in which the engine seems to hang."""
_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The worker of an engine on processors in the process of its core, as on one GPU: one process less that imports vLLM,
and no message between the two in each step."""
_PARTS_OF_A_GPU = 10_000
"""Ray reserves cards to four decimal places."""
_FITS_MEMORY = -1
"""vLLM's own number for it."""
_HIGHEST_MEMORY_UTILIZATION = 0.95
"""New weights are loaded beside the old ones, one layer at a time: a card of 80 GB keeps 4 GB for it, more than the
embedding of 152,000 tokens and 8,192 values takes (2.5 GB)."""
_MOST_LOGPROBS = 256
"""Likeliest tokens that a caller may have named for each one: those that top-k leaves, for a sampling mask. vLLM's own
bound of 20 is for readers of chats."""
_NO_DOMAIN = "none.invalid"
"""No host has this name (RFC 2606). vLLM takes an empty list for all hosts."""


class EngineSettings(BaseModel):
    """Which model runs on which hardware. Any further field is passed to vLLM's `AsyncEngineArgs` unchanged, but
    those that break exactness or the record, which are refused."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    replica: ImportString[type[Any]] | None = None
    """`package.module:Class` of the generator's replicas, in place of the one that runs vLLM: a
    `deployments.generation.generator_replica_base:GeneratorReplicaBase`. For tests and benchmarks; further fields of
    `engine` are its own then."""
    device: Literal["gpu", "cpu"] = "gpu"
    model: str
    """A local path or a Hugging Face repository."""
    tokenizer: str | None = None
    """A local path or a Hugging Face repository; by default that of `model`."""
    revision: str | None = None
    """Branch, tag or commit of a model of the Hub: of its weights, its configuration and, without `tokenizer_revision`,
    its tokenizer."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer."""
    trust_remote_code: bool = False
    """Run code that the model's repository brings, in the engine and for the tokenizer. Name a `revision` with it."""
    split_special_tokens: SplitSpecialTokens = "observations"
    """Whose texts are data, in which control tokens such as `<|im_end|>` are tokenized as ordinary text:
    `observations` are those of environments, tools' results, and in sessions all that follows an answer; `all` are
    prompts and the descriptions of tools too. With `none`, whoever spells a control token ends a message and begins
    another one."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of one node that hold one replica's model together."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages into which one replica's layers are split."""
    engines_per_gpu: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Engines, each of a replica of its own, that share a card and its memory; `num_replicas` counts engines. `auto` is
    up to 6 by the size of the weights, the card's memory and the cores of the machine that builds the application, and
    1 where two would not have each six times their weights and 8 GiB, or where the engine has its own sizes."""
    max_model_len: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Tokens of prompt and generation; by default the model's own limit, and with `auto` as much of it as the memory
    holds."""
    seed: int | None = Field(default=None, ge=0)
    """Mixed with the id of each replica into the seed of its engine. Replicas never share a random stream, and a
    replica that restarts begins a new one: to repeat a run, set the seed in its requests (`sampling.seed`)."""
    enable_lora: bool = False
    """Take LoRA adapters, as versions of the policy and as named policies."""
    max_lora_rank: int = Field(default=16, ge=1)
    """The highest rank of an adapter. Each adapter in a batch takes the memory of one with this rank."""
    num_cpus: float = Field(default=1, ge=0)
    """CPU cores that Ray reserves for one replica."""
    hang_timeout_s: float | None = Field(default=30, gt=0)
    """Seconds without a step of the engine after which an engine that has work is taken for hung: its processes are
    killed, its generations are made again at other replicas, and the replica is replaced. Pauses for new weights do not
    count. Null for no limit."""
    grammar_time_limit_s: float = Field(default=5, gt=0)
    """Seconds of processor time, of all threads, that it may take to compile a JSON schema, regular expression or
    grammar in a call of the model server's API and to match 512 tokens with it. Each new one is tried in a process of
    its own before the engine gets it; what takes longer is refused. The process starts with the first of them."""
    environment_variables: dict[str, str] = {}
    """Set in the engine's process before vLLM is imported (`VLLM_...`). Kernels that vLLM compiles at their first use
    are off unless they are turned on here: `VLLM_USE_FLASHINFER_SAMPLER`, `VLLM_USE_DEEP_GEMM`."""

    @model_validator(mode="after")
    def refuse_what_would_break(self) -> Self:
        if (problem := next(self._problems(), None)) is not None:
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        given = self.model_extra or {}
        for name in RESERVED_ENGINE_ARGS.keys() & given.keys():
            yield f"{name} cannot be set: {RESERVED_ENGINE_ARGS[name]}"
        for name in INEXACT_ENGINE_ARGS & given.keys():
            if given[name]:
                yield f"{name} would break exactness or the record (docs/deploy.md says how). Leave it out"
        if given.get("load_format") == "dummy":
            yield "load_format: dummy makes random weights, which would be recorded as those of the model"
        memory, transfer = given.get("gpu_memory_utilization") or 0, given.get("weight_transfer_config")
        if not isinstance(memory, int | float):
            yield f"gpu_memory_utilization: {memory!r} is no number"
        elif self.device == "gpu" and memory > _HIGHEST_MEMORY_UTILIZATION:
            yield (
                f"gpu_memory_utilization: {memory} leaves no memory for the layers of new weights, which are loaded "
                f"beside the old ones: give at most {_HIGHEST_MEMORY_UTILIZATION}"
            )
        if self.engines_per_gpu not in (1, "auto") and (self.device == "cpu" or self.workers > 1 or transfer):
            yield (
                f"engines_per_gpu: {self.engines_per_gpu} engines share a card only where each needs no more than it: "
                "leave out device: cpu, tensor_parallel_size, pipeline_parallel_size and weight_transfer_config"
            )
        if isinstance(transfer, dict) and transfer.get("backend") == "ipc":
            yield (
                "weight_transfer_config: the backend ipc is refused, because vLLM unpickles what a request brings for "
                "it. A trainer on the engine's own cards pushes a checkpoint by its path, or a delta"
            )
        if drafts := given.get("speculative_config"):
            yield from _draft_problems(drafts, self.device, given.get("async_scheduling"))
        yield from _offloading_problems(given, self.device)
        if given.get("distributed_executor_backend") == "ray" or given.get("nnodes", 1) != 1:
            yield (
                "an engine lies on one node: vLLM would wait for GPUs that its replica has reserved. Leave out "
                "distributed_executor_backend and nnodes, and use more GPUs of a node (tensor_parallel_size), nodes "
                "with more memory, or quantized weights"
            )

    @property
    def hub(self) -> FromHub:
        return FromHub(self.revision, self.tokenizer_revision, self.trust_remote_code)

    @property
    def process_variables(self) -> dict[str, str]:
        """The environment variables of the engine's process."""
        joined = _ONE_PROCESS if self.device == "cpu" and self.workers == 1 else {}
        return _COMPILED_AT_FIRST_USE | joined | self.environment_variables

    def ray_actor_options(self) -> dict[str, float]:
        """The cores and GPUs that Ray reserves for one replica."""
        engines = 1 if self.engines_per_gpu == "auto" else self.engines_per_gpu
        # Rounded down: thirds that are rounded up would not fit on one card together.
        gpus = self.workers if engines == 1 else int(_PARTS_OF_A_GPU / engines) / _PARTS_OF_A_GPU
        return {"num_cpus": self.num_cpus, "num_gpus": 0 if self.device == "cpu" else gpus}

    @property
    def workers(self) -> int:
        """Worker processes of one replica, each on a GPU of its own."""
        parts = self.tensor_parallel_size * self.pipeline_parallel_size
        return parts * int((self.model_extra or {}).get("prefill_context_parallel_size", 1))

    @property
    def draft_model(self) -> str | None:
        """Folder or hub name of the model that drafts, if pushes may bring its weights.

        Heads share parts with the model, and no others are known of a revision.
        """
        drafts = (self.model_extra or {}).get("speculative_config") or {}
        return drafts.get("model") if drafts.get("method") == "draft_model" and not drafts.get("revision") else None

    @property
    def highest_rank(self) -> int:
        """The highest rank of an adapter that the engine takes; 0 if it takes none."""
        return self.max_lora_rank if self.enable_lora else 0

    def engine_args(self) -> dict[str, Any]:
        """Arguments of vLLM's `AsyncEngineArgs`.

        By default the engine begins its generations in the order of their virtual times, so that requests of several
        ingress replicas share it fairly. It fetches no picture or sound that a message of a call names by its URL. It
        reads `tokenizer.json` and the chat template, as rollouts do, where it would know a format of the vendor's own.
        It samples as the request says: the defaults of the model's `generation_config.json`, a repetition penalty among
        them, would make log-probabilities that no trainer recomputes. It has no cache of images that its front end must
        keep in step with: each prompt brings what it shows.
        """
        defaults = {
            "scheduling_policy": "priority",
            "allowed_media_domains": [_NO_DOMAIN],
            "tokenizer_mode": "hf",
            "generation_config": "vllm",
            "max_logprobs": _MOST_LOGPROBS,
            "mm_processor_cache_gb": 0,
        }
        given = self.model_dump(exclude=_NOT_FOR_VLLM, exclude_none=True)
        return defaults | given | ({"max_model_len": _FITS_MEMORY} if self.max_model_len == "auto" else {})


_ENGINE_ARGS_CLASSES = {"EngineArgs", "AsyncEngineArgs"}


def _vllm_source(*path: str) -> list[ast.stmt] | None:
    """The statements of one file of vLLM's; None if vLLM is not installed."""
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return None
    return ast.parse(Path(vllm.submodule_search_locations[0], *path).read_text(encoding="utf-8")).body


def engine_fields() -> frozenset[str] | None:
    """The names of all fields of `AsyncEngineArgs`; None if vLLM is not installed.

    Its source is read, not imported, as importing vLLM takes seconds.
    """
    if (source := _vllm_source("engine", "arg_utils.py")) is None:
        return None
    return frozenset(
        statement.target.id
        for definition in source
        if isinstance(definition, ast.ClassDef) and definition.name in _ENGINE_ARGS_CLASSES
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )


def _draft_problems(drafts: Any, device: str, async_scheduling: bool | None) -> Iterator[str]:
    """Settings of speculative decoding that would make it inexact, or would not start."""
    # vLLM takes names of settings with hyphens too.
    drafts = {str(name).replace("-", "_"): value for name, value in drafts.items()} if isinstance(drafts, dict) else {}
    method, tokens = drafts.get("method"), drafts.get("num_speculative_tokens")
    if method not in (methods := DRAFT_METHODS[device]):
        where = "processors" if device == "cpu" else "GPUs"
        yield f"speculative_config.method: {method!r} is none of those for {where}: {', '.join(methods)}"
        return
    if isinstance(tokens, int) and tokens > _MOST_DRAFTS:
        yield f"speculative_config.num_speculative_tokens: {tokens}; at most {_MOST_DRAFTS} are verified in one step"
    if method == "suffix" and find_spec("arctic_inference") is None:
        yield "speculative_config.method: 'suffix' needs the package arctic-inference, which is not installed"
    if drafts.get("rejection_sample_method", "standard") != "standard" or any("synthetic" in name for name in drafts):
        yield (
            "speculative_config: only rejection_sample_method: standard is known to keep the distribution of the "
            "model's tokens. Leave out rejection_sample_method and all synthetic_..."
        )
    if method in _DRAFTS_IN_STEP and async_scheduling:
        yield f"async_scheduling: speculative_config.method {method!r} drafts between two steps. Leave it out"


def _offloading_problems(given: dict[str, Any], device: str) -> Iterator[str]:
    """Settings of KV cache offloading that vLLM fails on with a traceback, would ignore, or keeps across weights."""
    size, backend = given.get("kv_offloading_size"), given.get("kv_offloading_backend")
    if size is None:
        if backend is not None:
            yield f"kv_offloading_backend: {backend!r} does nothing alone. Set kv_offloading_size too, or leave it out"
        return
    if not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
        yield f"kv_offloading_size: {size!r} is no number of GiB above 0, of host memory for one engine's cache"
    elif device == "cpu":
        yield (
            f"kv_offloading_size: {size} GiB cannot be used with device: cpu, as vLLM offloads the cache of GPUs only. "
            "Leave it out, and enlarge the cache itself (kv_cache_memory_bytes)"
        )
    if backend not in (None, "native"):
        yield (
            f"kv_offloading_backend: {backend!r} keeps blocks in another process, which new weights do not empty: "
            "generations would continue from the cache of older weights. Use native"
        )
    connector = (given.get("kv_transfer_config") or {}).get("kv_connector")
    if connector is not None:
        yield (
            f"kv_transfer_config.kv_connector: vLLM replaces {connector!r} with its own connector for "
            "kv_offloading_size. Leave one of the two out"
        )
