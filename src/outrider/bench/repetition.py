"""Answers that end in a loop: a small model repeats itself, and that is easy to draft.

Speed-ups over such text say little about real use, so a bench counts it apart.
"""

from collections.abc import Sequence

LONGEST_PERIOD = 64  # tokens of what is repeated
MIN_COPIES = 3  # copies of it at the end of the answer …
MIN_TOKENS = 24  # … and tokens in them, so that "ha ha ha" and a row of dots are no loop


def loop_start(token_ids: Sequence[int]) -> int | None:
    """Where the answer starts to repeat itself up to its end; None where it does not.

    That is the end of the first copy: what comes from there on is all known. The last copy may
    be cut short. Of several periods the one with the longest loop counts.
    """
    best: int | None = None
    for period in range(1, min(LONGEST_PERIOD, len(token_ids) // MIN_COPIES) + 1):
        start = len(token_ids)
        while start > period and token_ids[start - 1] == token_ids[start - 1 - period]:
            start -= 1
        looped = len(token_ids) - start + period  # with the first copy
        long_enough = looped >= max(MIN_TOKENS, MIN_COPIES * period)
        if long_enough and (best is None or start < best):
            best = start
    return best
