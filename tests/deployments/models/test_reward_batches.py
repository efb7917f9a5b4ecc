"""The law of batches: each item in exactly one, none larger than permitted, those of similar length together."""

from hypothesis import given
from hypothesis import strategies as st

from deployments.models.reward_replica import batches


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 8), st.integers(1, 100))
def test_each_item_is_in_one_batch_that_is_no_larger_than_permitted(
    lengths: list[int], most_items: int, most_tokens: int
) -> None:
    made = list(batches(lengths, most_items, most_tokens))
    assert sorted(place for batch in made for place in batch) == list(range(len(lengths)))
    for batch in made:
        assert 1 <= len(batch) <= most_items
        padded = len(batch) * max(lengths[place] for place in batch)
        assert padded <= most_tokens or len(batch) == 1
    ordered = [lengths[place] for batch in made for place in batch]
    assert ordered == sorted(ordered)


def test_items_of_similar_length_go_together() -> None:
    assert list(batches([9, 1, 8, 2], 2, 100)) == [[1, 3], [2, 0]]
    assert list(batches([3, 3, 3, 50], 9, 9)) == [[0, 1, 2], [3]]
