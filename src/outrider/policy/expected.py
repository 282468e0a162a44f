"""What drafts of one length are worth before anything is decoded: speed-up and break-even.

With the chance a_k that the k-th draft token is kept, given all before it, a step of K draft
tokens yields 1 + a_1 + a_1 a_2 + … tokens. It costs v = T((K + 1) rows) / T(1 row) plain steps for
the target, and c for the draft: once for a drafter that drafts in one forward, K times for a
serial one. The speed-up is the quotient (Leviathan et al., arXiv 2211.17192, who take v = 1, so
that drafts without a price could never lose).
"""

from collections.abc import Sequence
from dataclasses import dataclass

HALVINGS = 40  # of [0, 1], in which a break-even is looked for


@dataclass(frozen=True, slots=True)
class Expected:
    """Drafts of one length."""

    num_draft_tokens: int
    tokens_per_step: float  # of one request, with the one that the target adds
    step_cost: float  # in plain steps
    break_even: float | None  # chance of every token at which it is as fast as plain; None: never

    @property
    def speedup(self) -> float:
        return self.tokens_per_step / self.step_cost


def tokens_per_step(acceptance: Sequence[float], num_draft_tokens: int) -> float:
    """Tokens that a step of so many draft tokens yields.

    Args:
        acceptance: chance of each depth, given all before it; the last one holds for deeper ones.
    """
    total = survival = 1.0
    for depth in range(num_draft_tokens):
        survival *= acceptance[min(depth, len(acceptance) - 1)]
        total += survival
    return total


def expected(
    acceptance: Sequence[float],
    draft_cost: float,
    verify_costs: Sequence[float],
    is_serial: bool = False,
) -> list[Expected]:
    """Drafts of 1, 2, … tokens.

    Args:
        acceptance: as for `tokens_per_step`.
        draft_cost: of one forward of the drafter, in plain steps of the target.
        verify_costs: of the target's forward with 1, 2, … draft tokens, in plain steps.
        is_serial: the drafter needs one forward per draft token.
    """
    found = []
    for count, verify in enumerate(verify_costs, start=1):
        cost = draft_cost * (count if is_serial else 1) + verify
        yields = tokens_per_step(acceptance, count)
        found.append(Expected(count, yields, cost, _break_even(count, cost)))
    return found


def _break_even(num_draft_tokens: int, cost: float) -> float | None:
    """The chance of every token at which a step yields as many tokens as it costs plain steps."""
    if cost > num_draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if tokens_per_step([middle], num_draft_tokens) < cost:
            low = middle
        else:
            high = middle
    return high
