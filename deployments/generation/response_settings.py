"""The `responses:` section of a Serve config: what is read out of the text of responses. Imports no vLLM."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field

from deployments.strict_settings import StrictSettings

ParserKind = Literal["tool", "reasoning"]
TABLES: dict[ParserKind, tuple[str, str]] = {
    "tool": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""The packages of vLLM with parsers, and where each lists their names."""


class ResponseSettings(StrictSettings):
    """What environments and answers show of responses beside their text. Token ids never depend on it."""

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
    """Of processor time for one response, in seconds. A response that needs more is not parsed, and says so."""

    @property
    def has_parsers(self) -> bool:
        return self.tool_call_parser is not None or self.reasoning_parser is not None


def parser_names(kind: ParserKind) -> frozenset[str] | None:
    """The names of vLLM's parsers, read from its source, as importing it takes seconds; None if it is not installed."""
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return None
    package, table = TABLES[kind]
    source = Path(vllm.submodule_search_locations[0], package, "__init__.py").read_text(encoding="utf-8")
    return frozenset(
        key.value
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)
        for target in statement.targets
        if isinstance(target, ast.Name) and target.id == table
        for key in statement.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )
