"""The tokenizer of the embedded models: one token a byte, whose id is the byte, then tokens of their own."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, by byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


def byte_tokenizer(special: Sequence[str], markers: Sequence[str] = ()) -> Tokenizer:
    """Any text comes back as it was, however it is split.

    Args:
        special: tokens from id 256 on, which decoding can skip.
        markers: tokens after these, which are part of the text and never skipped.
    """
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in markers])
    return tokenizer
