"""The contract of `/info`: what a service is, so that clients and trainers can check that they match it."""

from pydantic import JsonValue

from rollout_client.contract.rollouts import Lenient


class ModelInfo(Lenient):
    """The model that generates."""

    name: str
    """The name of the model's folder at the service, or a Hugging Face repository."""
    revision: str | None = None
    """The revision of the repository; null for a folder. Pushed weights are versions of the policy, not revisions."""
    vocab_size: int
    """Token ids of prompts are below this. A model may have more ids than its tokenizer has tokens."""
    max_model_len: int
    """Tokens of a prompt with its response."""


class EncodedText(Lenient):
    """A text, and the tokens that the service's tokenizer makes of it."""

    text: str
    """What was encoded, without special tokens around it."""
    token_ids: list[int]
    """Its tokens, in order."""


class TokenizerInfo(Lenient):
    """The tokenizer and the chat template, as `rollout_client.tokenizer_check` describes any tokenizer."""

    vocabulary_sha256: str
    """Of all tokens with their ids, the added ones included; `GET /info/vocabulary` lists them."""
    vocabulary_size: int
    """Number of tokens."""
    encodings: list[EncodedText]
    """Texts that tell tokenizers of one vocabulary apart."""
    chat_template_sha256: str | None
    """Of the text of the chat template, without white space at its end; null without a template."""
    rendered_chat: str | None
    """What the chat template makes of a short chat; null if it refuses it. Tells whether a changed template matters."""


class ServiceVersions(Lenient):
    """The versions of what runs."""

    service: str
    """Of the service."""
    contract: str
    """Of the types on the wire. A client with another major number does not understand the service."""
    engine: str
    """Name and version of the engine."""
    ray: str
    """Of Ray."""
    transformers: str
    """Of transformers, which renders the chat template."""


class ServiceInfo(Lenient):
    """The answer of `GET /info`."""

    model: ModelInfo
    """Which model it is, and how long its conversations may be."""
    tokenizer: TokenizerInfo
    """How text becomes tokens."""
    limits: dict[str, JsonValue]
    """What a request may ask for, what may be in flight, and what one engine runs at once; null for no limit."""
    versions: ServiceVersions
    """What runs."""
    policy_version: int | None
    """The current version of the weights; null while it is not known."""
    tasks: list[str]
    """The tasks that can be played."""


class Vocabulary(Lenient):
    """The answer of `GET /info/vocabulary`."""

    tokens: list[str | None]
    """The token of each id; null for an id that no token has."""
