"""Names that vLLM's source lists: engine arguments and parsers. Read, not imported, as importing vLLM takes seconds.

vLLM has no other way to know them without that.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

ParserKind = Literal["tool", "reasoning"]
TABLES: dict[ParserKind, tuple[str, str]] = {
    "tool": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""The packages of vLLM with parsers, and where each lists their names."""
ENGINE_ARGS_CLASSES = {"EngineArgs", "AsyncEngineArgs"}


def _vllm_source(*path: str) -> list[ast.stmt] | None:
    """The statements of one file of vLLM's; None if vLLM is not installed."""
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return None
    return ast.parse(Path(vllm.submodule_search_locations[0], *path).read_text(encoding="utf-8")).body


def parser_names(kind: ParserKind) -> frozenset[str] | None:
    """The names of vLLM's parsers; None if vLLM is not installed."""
    package, table = TABLES[kind]
    if (source := _vllm_source(package, "__init__.py")) is None:
        return None
    return frozenset(
        key.value
        for statement in source
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)
        for target in statement.targets
        if isinstance(target, ast.Name) and target.id == table
        for key in statement.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


def engine_fields() -> frozenset[str] | None:
    """The names of all fields of `AsyncEngineArgs`; None if vLLM is not installed."""
    if (source := _vllm_source("engine", "arg_utils.py")) is None:
        return None
    return frozenset(
        statement.target.id
        for definition in source
        if isinstance(definition, ast.ClassDef) and definition.name in ENGINE_ARGS_CLASSES
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
