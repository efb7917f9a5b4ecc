"""Private names of other packages, listed in `docs/contributing.md`: that they exist, and that no others are used."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow

PAGE = (REPOSITORY / "docs" / "contributing.md").read_text()
ROWS: list[tuple[str, str]] = re.findall(r"^\| `([\w.]+)` \| `(\w+\.py)` \|$", PAGE, re.MULTILINE)
UPSTREAM = REPOSITORY / "deployments" / "upstream"
PACKAGES = {"vllm", "ray", "grpc", "torch", "transformers", "uvicorn", "uvloop", "asyncio"}
WITH_THEIR_OWNERS = {
    "deployments/chat/chat_template.py: transformers.utils.chat_template_utils._compile_jinja_template"
}
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
OF_NAMED_TUPLES = {"_replace"}


@cache
def source_of(module: str) -> ast.Module | None:
    """The syntax tree of an installed module, found without importing it; `None` for what is compiled."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], *rest)
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text()) if source.is_file() else None


def is_there(name: str) -> bool:
    """Whether the longest part of the name that is a module defines the rest of it."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if (module := source_of(".".join(parts[:length]))) is not None:
            return defines(module, parts[length:]) or is_compiled(parts, length)
    return False


def is_compiled(parts: list[str], length: int) -> bool:
    """The same for a compiled module, which has no source: it is imported."""
    if find_spec(parts[0]) is None or length == len(parts) - 1:
        return False
    try:
        found: object = import_module(".".join(parts[: length + 1]))
    except ModuleNotFoundError:
        return False
    for part in parts[length + 1 :]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def defines(scope: ast.AST, names: list[str]) -> bool:
    first, *rest = names
    if rest:
        classes = [node for node in ast.walk(scope) if isinstance(node, ast.ClassDef) and node.name == first]
        return any(defines(one, rest) for one in classes)
    return first in set(names_in(scope))


def names_in(scope: ast.AST) -> Iterator[str]:
    for node in ast.walk(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@cache
def product_files() -> list[tuple[Path, ast.Module]]:
    rooms = ("deployments", "service", "clients")
    paths = [path for room in rooms for path in sorted((REPOSITORY / room).rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


def private_imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package in PACKAGES and any(map(PRIVATE.fullmatch, parts)):
                yield name


def private_attributes(module: ast.Module) -> Iterator[str]:
    """The private attributes of other objects than those of the module's own classes."""
    found = [node for node in ast.walk(module) if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr)]
    of_self = {id(node) for node in found if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    own = {node.attr for node in found if id(node) in of_self and isinstance(node.ctx, ast.Store)}
    for node in found:
        if id(node) not in of_self and node.attr not in own | OF_NAMED_TUPLES:
            yield node.attr


@pytest.mark.parametrize(("name", "module"), ROWS)
def test_each_private_name_is_in_the_installed_package_and_used(name: str, module: str) -> None:
    assert is_there(name), f"{name} is gone: see docs/contributing.md"
    [path] = UPSTREAM.rglob(module)
    assert name.rpartition(".")[2] in path.read_text()


def test_the_page_lists_every_private_import_and_it_is_in_upstream() -> None:
    listed = {name for name, _ in ROWS}
    for path, module in product_files():
        for name in private_imports(module):
            if f"{path.relative_to(REPOSITORY)}: {name}" in WITH_THEIR_OWNERS:
                continue
            assert path.is_relative_to(UPSTREAM), f"{path}: {name} belongs into deployments/upstream"
            # A class may be listed by its private attributes.
            assert any(one == name or one.startswith(f"{name}.") for one in listed), f"docs/contributing.md: {name}"


def test_the_page_lists_every_private_attribute_and_it_is_in_upstream() -> None:
    listed = {last for name, _ in ROWS if PRIVATE.fullmatch(last := name.rpartition(".")[2])}
    for path, module in product_files():
        for attribute in private_attributes(module):
            if path.is_relative_to(UPSTREAM):
                assert attribute in listed, f"docs/contributing.md does not list {attribute} of {path.name}"
            else:
                assert attribute not in listed - {"_init", "_tags", "_config"}, f"{path}: {attribute}"
