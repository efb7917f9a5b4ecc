"""The contract of the routes beside SGLang's `/generate`, as programs that were written for SGLang read them.

Fields have SGLang's names. The bodies of `/generate` and vLLM's `/inference/v1/generate` are `ModelServerCall`s.
"""

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from rollout_client.contract.base import Lenient, Strict


class VersionConstraint(Strict):
    """`weight_version` of a call of token ids: which weights may answer it, as miles' external rollout services take
    it. A call that no weights satisfy within the service's limit is refused (409) and may be made again."""

    min_version: int | None = Field(default=None, ge=0)
    """Version of the oldest weights that may begin the answer."""
    exact_version: int | None = Field(default=None, ge=0)
    """The version that makes all of the answer; 409 if another one takes its place."""


class AbortRequest(Strict):
    """The body of `POST /abort_request`."""

    rid: str | None = None
    """The calls whose `rid` begins with it end with the tokens that they have, as `finish_reason` `abort`. SGLang's
    clients send an empty one beside `abort_all`: it names nothing."""
    abort_all: bool = False
    """In its place: all calls of `/generate` of the caller's key, those of its sessions too."""

    @field_validator("rid", mode="before")
    @classmethod
    def empty_names_nothing(cls, rid: Any) -> Any:
        return None if rid in ("", []) else rid

    @model_validator(mode="after")
    def names_calls(self) -> Self:
        if (self.rid is not None) == self.abort_all:
            raise ValueError("send either rid or abort_all: true")
        return self


class SGLangModelInfo(Lenient):
    """The answer of `GET /model_info`."""

    model_path: str
    """The model, by its name in `/info`."""
    tokenizer_path: str
    """The same: the tokenizer is the model's."""
    is_generation: bool = True
    """Always true."""
    preferred_sampling_params: None = None
    """Always null: there are none."""
    weight_version: str
    """The current version of the policy without a name."""


class SGLangWorker(Lenient):
    """An address that takes calls of `/generate`."""

    url: str
    """The address."""
    worker_type: str = "regular"
    """Always `regular`."""
    is_healthy: bool = True
    """Always true; ask `/health`."""


class SGLangWorkers(Lenient):
    """The answer of `GET /workers`, with which a trainer finds the engines behind SGLang's router."""

    workers: list[SGLangWorker]
    """The service itself: it chooses among its replicas."""


class SGLangLoad(Lenient):
    """The load of a worker."""

    dp_rank: int = 0
    """Always 0."""
    num_running_reqs: int
    """Calls of `/generate` of the caller's key in flight at this ingress replica."""
    num_waiting_reqs: int = 0
    """Always 0: those that wait are in `num_running_reqs`."""


class SGLangLoads(Lenient):
    """The answer of `GET /loads`, by which a trainer sees that its calls have ended."""

    loads: list[SGLangLoad]
    """One: that of the service."""
