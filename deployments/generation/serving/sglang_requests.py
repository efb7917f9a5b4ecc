"""Bodies of SGLang's `/generate`, and the parameters of vLLM that they stand for. No I/O.

A field that SGLang has and this service does not is refused by its name when it asks for something: null, false, zero
and empty values ask for nothing, which is how trainers send the switches of all features that they know.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.generation.serving.answered_layers import sampling_of_session, seed_in_group
from deployments.generation.serving.served_call import ServedCall
from deployments.upstream.vllm.token_texts import skip_logprob_texts

_ALL_TOKENS = 1 << 30
"""SGLang's own number for a `top_k` that keeps all tokens; -1 is another."""
NO_INPUT_LOGPROBS = -1
_READ_BY_INGRESS = frozenset({"lora_path", "weight_version"})
_VLLM_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}


def _only_served(fields: Any, served: type[BaseModel], within: str = "") -> Any:
    """The fields without those that ask for nothing, or for the default by null.

    Raises `VLLMValidationError` for one that is not served.
    """
    if not isinstance(fields, dict):
        return fields
    for name, value in fields.items():
        if name not in served.model_fields and name not in _READ_BY_INGRESS and value:
            message = f"`{within}{name}` of SGLang's API is not served here; leave it out."
            raise VLLMValidationError(message, parameter=name)
    given = ((name, value) for name, value in fields.items() if name in served.model_fields)
    return {name: value for name, value in given if value is not None or name == "max_new_tokens"}


class _SGLangSampling(BaseModel):
    """`sampling_params`, with SGLang's defaults. Null stands for the default, but in `max_new_tokens`: for no bound."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_new_tokens: int | None = Field(default=128, ge=0)
    min_new_tokens: int = 0
    n: int = Field(default=1, ge=1)
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False

    @model_validator(mode="before")
    @classmethod
    def null_is_the_default(cls, fields: Any) -> Any:
        return _only_served(fields, cls, "sampling_params.")


class SGLangRequest(BaseModel):
    """A body of `/generate`: one prompt, or several in a list, of all of which the same is asked."""

    model_config = ConfigDict(extra="forbid")

    rid: str | None = None
    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: _SGLangSampling = _SGLangSampling()
    return_logprob: bool = False
    logprob_start_len: int = NO_INPUT_LOGPROBS
    """The first token of the prompt whose log-probability is shown; `NO_INPUT_LOGPROBS` for none."""
    stream: bool = False
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def null_is_the_default(cls, fields: Any) -> Any:
        return _only_served(fields, cls)

    @model_validator(mode="after")
    def has_one_kind_of_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise VLLMValidationError("Send either `text` or `input_ids`.", parameter="input_ids")
        if self.stream and not self.is_single:
            raise VLLMValidationError("A stream answers one prompt, once: send one call for each.", parameter="stream")
        if not self.return_logprob:
            self.logprob_start_len = NO_INPUT_LOGPROBS
        return self

    @property
    def is_single(self) -> bool:
        """Whether one prompt was sent as itself, to be answered once. The answer is a list otherwise."""
        return self.sampling_params.n == 1 and self._has_one_prompt

    @property
    def _has_one_prompt(self) -> bool:
        given: Any = self.input_ids if self.text is None else self.text
        return isinstance(given, str) or not given or isinstance(given[0], int)

    @property
    def prompts(self) -> list[Any]:
        """The texts, or the ids, of each prompt, `n` times. Raises `VLLMValidationError` for one that is no prompt."""
        given: Any = self.input_ids if self.text is None else self.text
        prompts = [given] if self._has_one_prompt else list(given)
        parameter = "input_ids" if self.text is None else "text"
        if not prompts or not all(prompts):
            raise VLLMValidationError("A prompt is empty: send at least one token.", parameter=parameter)
        if self.text is None and any(min(ids) < 0 for ids in prompts):
            raise VLLMValidationError("A token id is negative.", parameter=parameter)
        return [prompt for prompt in prompts for _ in range(self.sampling_params.n)]

    @property
    def generates(self) -> bool:
        """Whether anything of what the engine generates is shown: it generates at least one token."""
        return self.sampling_params.max_new_tokens != 0

    def build_tok_params(self, _model_config: object) -> TokenizeParams:
        """For vLLM's renderer, which tokenizes texts."""
        return TokenizeParams(max_total_tokens=None, max_output_tokens=0)


def params_of(
    request: SGLangRequest, place: int, prompt_token_ids: Sequence[int], call: ServedCall, max_model_len: int
) -> SamplingParams:
    """The parameters of vLLM for the prompt at `place`. The seeds of a prompt's `n` answers follow one another, as
    vLLM's do.

    Raises:
        VLLMValidationError: a value is out of range, or there is no room for so many tokens.
    """
    sampling = request.sampling_params
    fields: dict[str, Any] = {_VLLM_NAMES.get(name, name): value for name, value in sampling}
    fields["top_k"] = 0 if sampling.top_k in (-1, _ALL_TOKENS) else sampling.top_k
    if call.session is not None:
        given = {_VLLM_NAMES.get(name, name) for name in sampling.model_fields_set}
        fields |= {name: value for name, value in sampling_of_session(call).items() if name not in given}
        if sampling.sampling_seed is not None:
            fields["seed"] = seed_in_group(sampling.sampling_seed, call)
    fields["n"] = 1
    if fields["seed"] is not None:
        fields["seed"] += place % sampling.n
    room = max_model_len - len(prompt_token_ids)
    if room < max(fields["max_tokens"] or 0, 1):
        message = (
            f"The prompt has {len(prompt_token_ids)} tokens, and of {max_model_len} there is no room for "
            f"{fields['max_tokens']} more: shorten the prompt or lower `max_new_tokens`."
        )
        raise VLLMValidationError(message, parameter="max_new_tokens")
    fields["max_tokens"] = room if fields["max_tokens"] is None else max(fields["max_tokens"], 1)
    scores_prompt = NO_INPUT_LOGPROBS < request.logprob_start_len < len(prompt_token_ids)
    params = SamplingParams(
        **fields,
        logprobs=0 if request.return_logprob else None,
        prompt_logprobs=0 if scores_prompt else None,
        # Flat ones cost the engine less, and cannot be those of prompts.
        flat_logprobs=not scores_prompt,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )
    skip_logprob_texts(params)
    return params
