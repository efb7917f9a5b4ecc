"""Names of vLLM's engine arguments. Its source is read, not imported, as importing vLLM takes seconds.

vLLM has no other way to know them without that.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

ENGINE_ARGS_CLASSES = {"EngineArgs", "AsyncEngineArgs"}


def _vllm_source(*path: str) -> list[ast.stmt] | None:
    """The statements of one file of vLLM's; None if vLLM is not installed."""
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return None
    return ast.parse(Path(vllm.submodule_search_locations[0], *path).read_text(encoding="utf-8")).body


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
