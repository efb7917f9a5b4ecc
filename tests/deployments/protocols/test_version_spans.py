"""The spans of weight versions of a response that several generations have made."""

from hypothesis import given
from hypothesis import strategies as st

from deployments.protocols.generation import WeightSpan
from deployments.protocols.weight_versions import joined_spans

VERSIONS = st.lists(st.sampled_from("123"))
"""Of each token of a part."""


def spans_of(versions: list[str]) -> list[WeightSpan]:
    """The fewest spans that cover the tokens."""
    spans: list[WeightSpan] = []
    for token, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = WeightSpan(version, spans[-1].start, token + 1)
        else:
            spans.append(WeightSpan(version, token, token + 1))
    return spans


@given(VERSIONS, VERSIONS)
def test_the_spans_of_two_parts_are_those_of_all_their_tokens(first: list[str], second: list[str]) -> None:
    assert joined_spans(spans_of(first), spans_of(second), len(first), WeightSpan) == spans_of(first + second)
