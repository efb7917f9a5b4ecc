"""Whether a trainer's tokenizer makes the tokens that the service's makes, and what differs if not.

Service and trainer describe their tokenizers by the same function. What is compared is behaviour: tokens with their
ids, the tokens of some texts, and a rendered chat. So a tokenizer equals one that was saved and loaded again, also by
another version of transformers. A tokenizer is one of transformers, fast or slow; transformers itself is not imported.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout_client.contract.info import EncodedText, ServiceInfo, TokenizerInfo
from rollout_client.errors import TokenizerDiffers, shortened

PROBES = (
    "What is 12345 + 678.90?  Let x = -3e5;\n\n\tfor i in range(10): print(i)\r\n",
    "na\u00efve caf\u00e9 \u2013 \u201cquoted\u201d \u4f60\u597d \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u0645\u0631\u062d\u0628\u0627 \U0001f642",
    "  </s><|im_end|><think>\\boxed{42}</think>  ",
)
"""Numbers and white space, other scripts, and possible special tokens."""
CHAT = (
    {"role": "user", "content": "Question"},
    {"role": "assistant", "content": "Answer"},
    {"role": "user", "content": "And then?"},
)
MOST_SHOWN_TOKENS = 3
LONGEST_SHOWN_TEXT = 200


def tokenizer_info(tokenizer: Any) -> TokenizerInfo:
    """Describes a tokenizer of transformers."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return TokenizerInfo(
        vocabulary_sha256=_vocabulary_sha256(vocabulary),
        vocabulary_size=len(vocabulary),
        encodings=[EncodedText(text=text, token_ids=_encoded(tokenizer, text)) for text in PROBES],
        chat_template_sha256=_chat_template_sha256(tokenizer.chat_template),
        rendered_chat=_rendered_chat(tokenizer),
    )


def tokens_by_id(tokenizer: Any) -> list[str | None]:
    """The token of each id; `None` for an id that no token has."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    tokens: list[str | None] = [None] * (1 + max(vocabulary.values(), default=-1))
    for token, id_ in vocabulary.items():
        tokens[id_] = token
    return tokens


def has_other_vocabulary(tokenizer: Any, info: ServiceInfo) -> bool:
    return _vocabulary_sha256(tokenizer.get_vocab()) != info.tokenizer.vocabulary_sha256


def check_tokenizer(tokenizer: Any, info: ServiceInfo, service_tokens: Sequence[str | None] | None) -> None:
    """Compares `tokenizer` with the service's.

    Args:
        service_tokens: the tokens of the service by id, where its vocabulary is another one.

    Raises:
        TokenizerDiffers: `tokenizer` makes other tokens than the service's; its message says which.
    """
    if differences := list(differences_of(tokenizer, info, service_tokens)):
        raise TokenizerDiffers(differences)


def differences_of(
    tokenizer: Any, info: ServiceInfo, service_tokens: Sequence[str | None] | None = None
) -> Iterator[str]:
    """One sentence for each thing that differs."""
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= info.model.vocab_size:
        yield (
            f"the tokenizer has token ids up to {highest}, and the service's model has only those below "
            f"{info.model.vocab_size}"
        )
    different_tokens = list(_vocabulary_differences(tokens_by_id(tokenizer), service_tokens)) if service_tokens else []
    yield from different_tokens or _encoding_differences(tokenizer, info.tokenizer)
    yield from _template_differences(tokenizer, info.tokenizer)


def _vocabulary_differences(ours: Sequence[str | None], theirs: Sequence[str | None]) -> Iterator[str]:
    """The first ids that have different tokens, and how many there are."""
    most = max(len(ours), len(theirs))
    padded = [[*tokens, *[None] * (most - len(tokens))] for tokens in (ours, theirs)]
    different = [(id_, here, there) for id_, (here, there) in enumerate(zip(*padded, strict=True)) if here != there]
    for id_, here, there in different[:MOST_SHOWN_TOKENS]:
        one, other = ("missing" if token is None else repr(token) for token in (here, there))
        yield f"token {id_} is {one} here and {other} at the service"
    if len(different) > MOST_SHOWN_TOKENS:
        yield f"{len(different) - MOST_SHOWN_TOKENS} more tokens differ"


def _encoding_differences(tokenizer: Any, info: TokenizerInfo) -> Iterator[str]:
    for probe in info.encodings:
        ids = _encoded(tokenizer, probe.text)
        if ids != probe.token_ids:
            yield f"the text {probe.text!r} has the tokens {ids} here and {probe.token_ids} at the service"


def _template_differences(tokenizer: Any, info: TokenizerInfo) -> Iterator[str]:
    """A template with another text that renders alike is not a difference: trainers mark the generated part in
    theirs."""
    # The service renders all messages; a trainer without a template cannot render any differently.
    has_own = tokenizer.chat_template is not None
    is_same = _chat_template_sha256(tokenizer.chat_template) == info.chat_template_sha256
    if has_own and not is_same and (rendered := _rendered_chat(tokenizer)) != info.rendered_chat:
        both = (rendered, info.rendered_chat)
        here, there = ("nothing" if text is None else repr(shortened(text, LONGEST_SHOWN_TEXT)) for text in both)
        yield f"the chat template makes {here} of a short chat here and {there} at the service"


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    return _sha256_of(json.dumps(sorted((id_, token) for token, id_ in vocabulary.items())))


def _chat_template_sha256(chat_template: Any) -> str | None:
    """A template is a text or, for a tokenizer with several, texts by name."""
    if chat_template is None:
        return None
    is_text = isinstance(chat_template, str)
    return _sha256_of(chat_template.rstrip() if is_text else json.dumps(chat_template, sort_keys=True))


def _rendered_chat(tokenizer: Any) -> str | None:
    if tokenizer.chat_template is None:
        return None
    try:
        return str(tokenizer.apply_chat_template([*CHAT], tokenize=False, add_generation_prompt=True))
    except Exception:  # noqa: BLE001 - a template raises what it wants
        return None


def _sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
