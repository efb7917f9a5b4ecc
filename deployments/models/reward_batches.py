"""Which conversations go through a reward model together. No I/O, no torch."""

from collections.abc import Iterator, Sequence


def batches(lengths: Sequence[int], most_items: int, most_tokens: int) -> Iterator[list[int]]:
    """Divides items into batches, given their lengths in tokens: each batch is the places of its items.

    Items of similar length go together, because all of a batch are padded to its longest: a batch has at most
    `most_items` items and, padding included, `most_tokens` tokens, or one item that is longer alone. Each place is in
    exactly one batch.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        # In ascending order, the item that comes next is the longest of its batch.
        if batch and (len(batch) == most_items or (len(batch) + 1) * lengths[place] > most_tokens):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
