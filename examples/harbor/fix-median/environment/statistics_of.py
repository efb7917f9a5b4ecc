def median(numbers: list[float]) -> float:
    """The middle of the numbers; of two in the middle, their mean."""
    return sorted(numbers)[len(numbers) // 2]
