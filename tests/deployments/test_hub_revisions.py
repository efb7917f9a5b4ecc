"""A model of the Hub at a revision: tokenizer, parsers, ends of a turn and version 0 are of it, as the engine is.

The Hub is a folder as its cache has it, in a process that reaches no other.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.generation.settings import EngineSettings
from deployments.protocols.chat import FROM_MAIN, FromHub
from tests.paths import REPOSITORY, SMALL_MODEL, TINY_MODEL

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
LOADS = """
import json
import sys
from pathlib import Path
from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.generation.response_parser import ParserChoice, _VLLMResponseParser
from deployments.policy.versions import InitialVersion
from deployments.protocols.chat import FromHub

found = {}
for name, hub in (("main", FromHub()), ("v2", FromHub("v2")), ("mixed", FromHub("v2", "main"))):
    tokenizer = TransformersChatTokenizer.load("acme/model", "acme/model", hub=hub)
    parser = _VLLMResponseParser(ParserChoice("acme/model", "hermes", None, hub=hub))
    initial = InitialVersion("acme/model", Path(sys.argv[1]) / name / "file", None, hub.revision)
    found[name] = [
        tokenizer.info.vocabulary_size, len(parser._tokenizer), sorted(tokenizer.ends_of_turn), initial.checksum,
        len(initial.layout.tensors),
    ]
print(json.dumps(found))
"""


def test_an_engine_says_how_its_model_is_loaded() -> None:
    given = EngineSettings(model="acme/model", revision="v2", tokenizer_revision="v1", trust_remote_code=True)
    assert given.hub == FromHub("v2", "v1", trust_remote_code=True)
    assert given.hub.for_tokenizer == "v1"
    assert EngineSettings(model="m", revision="v2").hub.for_tokenizer == "v2"
    assert EngineSettings(model="m").hub == FROM_MAIN
    assert given.engine_args()["trust_remote_code"] is True


@pytest.mark.long
@pytest.mark.slow
def test_each_part_of_a_model_is_that_of_the_revision(tmp_path: Path) -> None:
    hub = tmp_path / "home" / "hub" / "models--acme--model"
    for (name, commit), model in zip(COMMITS.items(), (TINY_MODEL, SMALL_MODEL), strict=True):
        shutil.copytree(model, hub / "snapshots" / commit, ignore=shutil.ignore_patterns("*.py", "recipe"))
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / name).write_text(commit)
        (hub / ".no_exist" / commit).mkdir(parents=True)
        (hub / ".no_exist" / commit / "tekken.json").touch()
    variables = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    program = [sys.executable, "-c", LOADS, str(tmp_path)]
    printed = subprocess.run(program, env=os.environ | variables, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    main, v2, mixed = (found[name] for name in ("main", "v2", "mixed"))
    assert all(of_main != of_v2 for of_main, of_v2 in zip(main, v2, strict=True))
    assert mixed == [*main[:2], mixed[2], *v2[3:]]
