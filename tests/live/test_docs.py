"""Every code block of the README and the docs works as it stands, against the running service.

Python blocks of one page run in order, in one namespace. Of shell blocks, `make` targets and what pip would install are
looked up, everything else is run. YAML blocks are settings that the service accepts; JSON blocks can be read.
`<!-- test: imports -->` before a block says that it needs what is not here (another trainer, GPUs): it is compiled and
its imports are made.
"""

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import ServiceSettings
from tests.paths import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "clients" / "README.md",
    REPOSITORY / "clients" / "rollout_env" / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
DOCUMENTED_URL = "http://127.0.0.1:8000"
DOCUMENTED_MODELS, SERVED_MODEL = ("models/smollm2", "Qwen/Qwen2.5-0.5B-Instruct"), "models/tiny"
"""A page may be about a model that is fetched first."""
BLOCK = re.compile(r"^(?:<!-- test: (?P<mark>\w+) -->\n)?```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```$", re.M | re.S)
TESTED_LANGUAGES = {"python", "bash", "yaml", "json"}
SETTINGS: dict[str, Any] = {
    "engine": {"device": "cpu", "model": "models/tiny"},
    "environments": {"math": {"import_path": "deployments.tasks.math:MathEnvironment"}},
}


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    code: str
    mark: str | None
    place: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start("code")].count("\n")
        yield Block(match["language"], match["code"], match["mark"], f"{page.relative_to(REPOSITORY)}:{line}")


ALL_BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON_PAGES = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


def blocks(language: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in ALL_BLOCKS if block.language == language]


def test_every_block_is_of_a_language_that_is_tested_or_plain_text() -> None:
    assert {block.language for block in ALL_BLOCKS} - TESTED_LANGUAGES <= {"text"}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(REPOSITORY))) for page in PYTHON_PAGES])
def test_the_python_of_a_page_runs(page: Path, service_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks_of(page):
        if block.language != "python":
            continue
        source = block.code.replace(DOCUMENTED_URL, service_url)
        for model in DOCUMENTED_MODELS:
            source = source.replace(model, SERVED_MODEL)
        tree = ast.parse(source, block.place)
        if block.mark == "imports":
            tree = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        code = compile(tree, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, namespace))
        else:
            exec(code, namespace)


@pytest.mark.parametrize("block", blocks("bash"))
def test_the_shell_commands_of_a_block_run(block: Block, service_url: str) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ROLLOUT_URL": service_url}
    lines = block.code.replace(DOCUMENTED_URL, service_url).splitlines()
    script = "\n".join(looked_up(line) for line in lines)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"type":"urn:rollout:problem' not in done.stdout


def looked_up(line: str) -> str:
    """Of a command that sets something up, what says whether it could work; every other command as it is."""
    if line.startswith("make "):
        return f"make --dry-run {line.removeprefix('make ')}"
    if line.startswith("pip install "):
        folders = re.findall(r"\./[\w/]+", line)
        return " && ".join(f"test -f {folder}/pyproject.toml" for folder in folders)
    return line


@pytest.mark.parametrize("block", blocks("yaml"))
def test_the_settings_of_a_block_are_accepted(block: Block) -> None:
    said = yaml.safe_load(block.code)
    if "applications" in said:
        said = said["applications"][0]["args"]
    ServiceSettings.model_validate({**SETTINGS, **said})


@pytest.mark.parametrize("block", blocks("json"))
def test_the_json_of_a_block_can_be_read(block: Block) -> None:
    json.loads(block.code)
