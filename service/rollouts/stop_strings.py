"""How much of an interrupted generation can stay, so that no stop string is missed across the cut. No I/O.

The engine looks for stop strings only in the text of one generation. One that begins before the cut and ends after it
would be missed. So tokens at the end are dropped, and generated again, as long as the text ends with what could be the
beginning of a stop string.

Proof that the rest finds what an uncut generation finds: let T be the text that stays. No end of T is the beginning of
a stop string, so no occurrence begins in T and ends after it. T holds no whole occurrence either: the engine would have
ended the generation there. Hence every occurrence begins after T, where the next generation sees all of it.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

FIRST_WINDOW = 16
"""Tokens at the end that are looked at first; four times as many each time that all of them would have to go."""
Pieces = Sequence[str | None]


def tokens_to_keep(length: int, stop_strings: Sequence[str], pieces_from: Callable[[int], Pieces]) -> int:
    """How many of the first tokens of an interrupted generation can stay.

    Args:
        length: the number of its tokens.
        pieces_from: the text that each token from this index on adds; see `ChatTokenizer.pieces`.
    """
    if not stop_strings:
        return length
    window = FIRST_WINDOW
    while window < length:
        first = length - window
        # A match that begins before the window is invisible here, but none is longer than this.
        hidden = max(map(len, stop_strings)) - 1
        if (kept := last_closed_end(pieces_from(first), stop_strings, hidden)) is not None:
            return first + kept
        window *= 4
    return last_closed_end(pieces_from(0), stop_strings, hidden=0) or 0


def last_closed_end(pieces: Pieces, stop_strings: Sequence[str], hidden: int) -> int | None:
    """The highest number of first pieces after which no beginning of a stop string is open, and no character.

    Ends within the first `hidden` characters do not count. `None` if there is no such end but that of no piece.
    """
    text = "".join(piece or "" for piece in pieces)
    open_matches = [open_match_lengths(text, stop_string) for stop_string in stop_strings]
    ends = list(accumulate((len(piece or "") for piece in pieces), initial=0))
    for kept in range(len(pieces), 0, -1):
        end = ends[kept]
        is_whole = pieces[kept - 1] is not None
        if is_whole and end >= hidden and not any(lengths[end] for lengths in open_matches):
            return kept
    return None


def open_match_lengths(text: str, stop_string: str) -> list[int]:
    """At index i: how many characters at the end of `text[:i]` are a beginning of `stop_string`, at most and not all.

    The algorithm of Knuth, Morris and Pratt: linear in both lengths.
    """
    borders = [0]
    for character in stop_string[1:]:
        borders.append(longer_match(stop_string, borders, borders[-1], character))
    lengths = [0]
    for character in text:
        matched = longer_match(stop_string, borders, lengths[-1], character)
        lengths.append(borders[-1] if matched == len(stop_string) else matched)
    return lengths


def longer_match(stop_string: str, borders: Sequence[int], matched: int, character: str) -> int:
    """The longest match after one more character, given the longest one before it, which is proper."""
    while matched and stop_string[matched] != character:
        matched = borders[matched - 1]
    return matched + (stop_string[matched] == character)
