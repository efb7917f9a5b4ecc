"""Which tokens of an interrupted generation stay: against matching in the uncut text."""

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from service.rollouts.messages import FIRST_WINDOW, _tokens_to_keep

stop_strings_of_a_request = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)
pieces_of_tokens = st.lists(st.none() | st.text(alphabet="ab", max_size=3), max_size=80)


def kept(pieces: Sequence[str | None], *stop_strings: str) -> int:
    return _tokens_to_keep(len(pieces), stop_strings, lambda first: pieces[first:])


@example(pieces=[""], stop_strings=["ab"])
@given(pieces=pieces_of_tokens, stop_strings=stop_strings_of_a_request)
def test_looking_at_the_end_first_keeps_as_many_tokens(pieces: list[str | None], stop_strings: list[str]) -> None:
    def is_closed(count: int) -> bool:
        text = "".join(piece or "" for piece in pieces[:count])
        whole_character = count == 0 or pieces[count - 1] is not None or not stop_strings
        return whole_character and not any(
            text.endswith(stop_string[:length]) for stop_string in stop_strings for length in range(1, len(stop_string))
        )

    assert kept(pieces, *stop_strings) == max(count for count in range(len(pieces) + 1) if is_closed(count))


@given(text=st.text(alphabet="ab", max_size=60), cut=st.integers(0, 60), stop_strings=stop_strings_of_a_request)
def test_a_generation_cut_anywhere_stops_where_the_uncut_one_does(text: str, cut: int, stop_strings: list[str]) -> None:
    """One token a character; each generation sees its own text alone, as in the engine."""

    def generated(tokens: str) -> str:
        return next(
            (tokens[:end] for end in range(len(tokens) + 1) if any(stop in tokens[:end] for stop in stop_strings)),
            tokens,
        )

    whole = generated(text)
    if cut >= len(whole):
        return
    first = text[: kept(text[:cut], *stop_strings)]
    assert first + generated(text[len(first) :]) == whole


def test_a_stop_string_that_begins_before_the_window_is_found() -> None:
    assert kept(["a", "x", "y", *[""] * FIRST_WINDOW], "xyz") == 1


def test_a_long_generation_is_looked_at_only_at_its_end() -> None:
    looked_at: list[int] = []

    def pieces_from(first: int) -> list[str]:
        looked_at.append(first)
        return ["a"] * (10_000 - first)

    assert _tokens_to_keep(10_000, ["xy"], pieces_from) == 10_000
    assert looked_at == [10_000 - FIRST_WINDOW]
