"""Settings of the session store: where records of agents' sessions are kept, how many, and how large they may be."""

from pydantic import Field

from deployments.storage.storage import StorageSettings

GIB = 2**30
_HARMONY_MODELS = frozenset({"gpt_oss"})
"""Types of models whose prompts vLLM writes in the harmony format, past the chat template and a session's own ids."""


class ModelNotRecordable(Exception):
    """Sessions are configured beside a model whose calls they cannot record."""


def refuse_unrecordable(model_type: str | None) -> None:
    """Raises `ModelNotRecordable`. `model_type` is that of the model's config."""
    if model_type in _HARMONY_MODELS:
        raise ModelNotRecordable(
            f"sessions record no calls of a model of type {model_type}: vLLM writes its prompts in the harmony format, "
            "not with the model's chat template; leave `sessions` and agents out, and play its tasks with environments"
        )


class SessionsSettings(StorageSettings):
    max_bytes: int = Field(default=4 * GIB, ge=1)
    """Bound of all records together, in memory; the database takes about half more. Beyond it the caller whose records
    are the largest loses the session that is idle for the longest time."""
    lease_s: float = Field(default=10, gt=0)
    """A generator replica that was not heard of for so many seconds has lost its calls: they end without a record."""
    base_url: str | None = Field(default=None, pattern=r"^https?://[^/]+(/.*)?$")
    """The service's address as agents reach it, such as `https://rollouts.example.com`, for the `base_url` of sessions.
    Default: what the request that opens a session was sent to."""
