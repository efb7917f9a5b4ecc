"""Loads a model's tokenizer as its `tokenizer.json` defines it, or refuses it in a sentence.

`AutoTokenizer` picks a class by the model's config. Some classes rebuild the tokenizer from its vocabulary, in the way
of another family of models, or read another file: ids and text then differ from what the model was trained on.
"""

import sys
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.import_utils import is_torch_available

from deployments.protocols.chat import FROM_MAIN, FromHub, UnsupportedTokenizer

TOKENIZER_FILE, TEKKEN_FILE = "tokenizer.json", "tekken.json"
_PLAIN_TEXTS = (
    "Hello, world!",
    "two  spaces, three   spaces,    four",
    "a line\nanother line\n\nand a paragraph\n\n\nand more",
    "a\ttab\r\nand a carriage return",
    "def square(x):\n    if x:\n        return x**2  # twice\n",
    '{"name": "add", "arguments": {"numbers": [41, 1.5, -2e-9]}}',
    "1234567890 + 3.14159 = 1,234.00 (100%)",
    "$\\frac{1}{2^{99}} \\neq \\sqrt{2}$",
    "<p class='x'>a & b</p> <!-- c -->",
    "don't, it's, we'll, they've, I'm, you'd",
    "na\u00efve caf\u00e9, \u00fcber Stra\u00dfe, \u0141\u00f3d\u017a",
    "\u4e2d\u6587\u5b57\u7b26\uff0c\u4f60\u597d\u4e16\u754c\u3002",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f642 \U0001f44d\U0001f3fd \u2192 \u2260 \u221e",
)
"""In composed characters, which no tokenizer's normalizer changes; each must come back from its ids."""


def leave_torch_out() -> None:
    """Has transformers take torch for missing in this process, unless it has been imported: no tokenizer needs it.

    With it, the first tokenizer costs an ingress replica 600 MB and 3.6 s of processor time.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        is_torch_available.cache_clear()
        is_torch_available()
        del sys.modules["torch"]


def load_tokenizer(name_or_path: str, hub: FromHub = FROM_MAIN) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a folder or of a model of the Hub, whose ids are those of its `tokenizer.json`.

    Raises:
        UnsupportedTokenizer: it cannot be loaded, is not a fast one, or differs from the file. The message says what
            to do.
    """
    # Imported here: unless torch was left out it imports that, which takes seconds and hundreds of megabytes.
    from transformers import AutoTokenizer

    name = _resolved(name_or_path)
    try:
        file = _file_of(name, TOKENIZER_FILE, hub.for_tokenizer)
        if file is None and (tekken := _file_of(name, TEKKEN_FILE, hub.for_tokenizer)) is not None:
            raise UnsupportedTokenizer(
                f"{name} has {TEKKEN_FILE} but no {TOKENIZER_FILE}. Make one with "
                f"`transformers.integrations.mistral.convert_tekken_tokenizer({tekken!r}).save_pretrained(FOLDER)` and "
                "name FOLDER in engine.tokenizer."
            )
        # Before the tokenizer is loaded, so that the memory that the file takes is there for it.
        expected = None if file is None else _ids_of_file(file)
        # Without the argument, a tekken.json beside tokenizer.json is read by mistral-common, which has no offsets.
        tokenizer: Any = AutoTokenizer.from_pretrained(
            name, mistral_format=False, revision=hub.for_tokenizer, trust_remote_code=hub.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedTokenizer(f"The tokenizer of {name} cannot be loaded: {error}") from error
    refuse_slow(tokenizer)
    if expected is not None:
        _refuse_unlike_file(tokenizer, expected, name)
    return cast(PreTrainedTokenizerFast, tokenizer)


def refuse_slow(tokenizer: Any) -> None:
    """Raises `UnsupportedTokenizer`."""
    # Some classes of transformers have no such attribute.
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedTokenizer(
            f"The tokenizer of {tokenizer.name_or_path} ({type(tokenizer).__name__}) is a slow one, written in Python, "
            f"which gives no character offsets. Name a folder with a {TOKENIZER_FILE} in engine.tokenizer: "
            "`transformers.convert_slow_tokenizer` makes one of sentencepiece and tiktoken vocabularies."
        )


def _ids_of_file(file: str) -> list[list[int]]:
    """The ids of plain text by a `tokenizer.json`."""
    stored = Tokenizer.from_file(file)
    return [stored.encode(text, add_special_tokens=False).ids for text in _PLAIN_TEXTS]


def _refuse_unlike_file(tokenizer: PreTrainedTokenizerFast, expected: list[list[int]], name: str) -> None:
    """Raises `UnsupportedTokenizer` if the ids of plain text are not those of its file."""
    loaded = tokenizer.backend_tokenizer
    for text, ids_by_file in zip(_PLAIN_TEXTS, expected, strict=True):
        ids = loaded.encode(text, add_special_tokens=False).ids
        if ids != ids_by_file:
            raise UnsupportedTokenizer(
                f"transformers loads the tokenizer of {name} as {type(tokenizer).__name__}, which reads {text!r} as "
                f"{loaded.decode(ids)!r}, in other tokens than its {TOKENIZER_FILE} does. Set "
                '"tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, in a copy of the folder that '
                "engine.tokenizer names, and give the trainer the same copy. If the tokenizer is right as it is "
                "loaded, save that (`save_pretrained`)."
            )


def refuse_lossy(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises `UnsupportedTokenizer` if plain text does not come back from its ids.

    Characters that the tokenizer does not know, and says so by its unknown token, are left out of the comparison.
    """
    backend, unknown = tokenizer.backend_tokenizer, tokenizer.unk_token_id
    for text in _PLAIN_TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        decoded = backend.decode(ids)
        if decoded.strip() != text.strip() and unknown not in ids:
            raise UnsupportedTokenizer(
                f"The tokenizer of {tokenizer.name_or_path} loses text: {text!r} comes back from its ids as "
                f"{decoded!r}. Its {TOKENIZER_FILE} is not that of the model, or was saved after a wrong class had "
                "loaded it: take the original files, and name their folder in engine.tokenizer."
            )


def _resolved(name_or_path: str) -> str:
    """The absolute path of a local folder, or the name of a model of the hub as it is."""
    local = Path(name_or_path)
    return str(local.resolve()) if local.is_dir() else name_or_path


def _file_of(name: str, filename: str, revision: str | None) -> str | None:
    """The local path of a file of the folder or of the model of the Hub, which is downloaded; None if it has none."""
    from transformers.utils.hub import cached_file

    found: str | None = cached_file(
        name,
        filename,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def end_tokens_of(model: str, revision: str | None) -> list[int]:
    """The tokens that end a generation by the model's generation config; none if it has no such file."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(_resolved(model), revision=revision or "main").eos_token_id
    except OSError:
        return []
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
