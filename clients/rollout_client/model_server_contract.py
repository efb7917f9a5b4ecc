"""The bodies of OpenAI's and Anthropic's APIs under the service, as far as OpenAPI shows them.

Their fields are those of OpenAI's and Anthropic's references, as vLLM's own server takes and gives them; the official
clients have types for all of them.
"""

from pydantic import BaseModel, ConfigDict


class ModelServerCall(BaseModel):
    """A body of OpenAI's or Anthropic's API. Its fields are those that vLLM's server of the same route takes."""

    model_config = ConfigDict(extra="allow")


class ModelServerAnswer(BaseModel):
    """An answer of OpenAI's or Anthropic's API, or an error in its form, as vLLM's server gives them."""

    model_config = ConfigDict(extra="allow")
