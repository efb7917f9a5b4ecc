"""How a generator replica describes itself: its load at one moment, and the limits of its engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How busy a generator replica is at one moment."""

    ongoing_generations: int
    """Generations that run or wait in the engine."""
    waiting_generations: int = 0
    """Those of them that have no token yet: they wait in the engine's queue, or their prompt is being computed."""
    kv_tokens: int = 0
    """Tokens of the prompts and responses of all ongoing generations; what the KV cache must hold to run them all."""
    ingresses: int = 1
    """Ingress replicas that have generations here."""
    virtual_time: int = 0
    """The highest `GenerationRequest.virtual_time` of a generation that has ended here."""


@dataclass(frozen=True, slots=True)
class GeneratorDescription:
    """Limits of the engine behind a generator: a prompt with its response has at most `max_model_len` tokens."""

    model: str
    max_model_len: int
    vocab_size: int
    revision: str | None = None
    """Commit of a model that is a Hugging Face repository."""
    engine: str = ""
    """Name and version of the engine."""
    model_names: tuple[str, ...] = ()
    """Names that calls may give as their `model`; the first is that in answers."""
    dtype: str = ""
    """That of its weights, such as `bfloat16`; empty if it is not known."""
    transfer_backend: str | None = None
    """The backend of `weight_transfer_config`, by which trainers send weights straight into the engine."""
    max_num_seqs: int | None = None
    """Generations that the engine runs at once; further ones wait in it. `None`: unknown."""
    kv_cache_size_tokens: int | None = None
    """Tokens that its KV cache holds. `None`: unknown, or without bound."""
    kv_block_tokens: int = 1
    """Tokens of one block of its KV cache: its prefix cache has whole blocks."""
    max_loras: int | None = None
    """Different adapters that one batch of the engine holds; it passes over the generations of others. `None`: no
    bound, or no adapters."""
    max_lora_rank: int | None = None
    """The highest rank of an adapter; 0 if the engine takes none. `None`: no bound."""
    max_logprobs: int | None = None
    """How many of the most likely tokens the engine names for each token. `None`: no bound."""
    returns_experts: bool = False
    """Whether the engine returns the experts that each token was routed to."""
    takes_images: bool = False
    """Whether prompts may show images."""
    settings_hash: str = ""
    """Differs between engines whose settings, or version, may compute other numbers; empty if it is not known."""
    is_batch_invariant: bool = False
    """Whether the generations beside one do not change its numbers (`VLLM_BATCH_INVARIANT=1`)."""
    image_token_ids: tuple[int, ...] = ()
    """The tokens that mean an image where prompts may show some: what templates write for one, and what the model
    replaces by what it sees."""
    drafts: str | None = None
    """The method of speculative decoding; `None` if the engine drafts no tokens."""
