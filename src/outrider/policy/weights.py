"""What a token of a request is worth, next to one of another: priorities and deadlines."""

from outrider.terms import Terms

PRIORITY_STEP = 1.5  # worth of a token, from one priority to the next
MOST_STEPS = 4  # priorities further apart weigh the same
MOST_HASTE = 4.0  # worth of a token of a request that is late as much as it can be


def weight_of(terms: Terms, waited: float, num_done: int, num_left: int) -> float:
    """1 for a request that nobody hurries.

    A request whose pace so far would miss its deadline weighs by as much as it is too slow. One
    that is past it, or so late that nothing helps, weighs no more: others can still be in time.

    Args:
        waited: seconds since its arrival.
        num_done: output tokens so far.
        num_left: at most to come.
    """
    steps = min(MOST_STEPS, max(-MOST_STEPS, -terms.priority))
    weight = PRIORITY_STEP**steps
    if terms.deadline is None or waited >= terms.deadline or not num_done:
        return weight
    haste = (num_left / (terms.deadline - waited)) / (num_done / waited)
    return weight * haste if 1.0 < haste <= MOST_HASTE else weight
