"""Which drafts are kept: pure accept rules.

- `accept_matching`, the default: a draft token is kept where it is the token the target chose
  with its own noise. The text does not depend on the drafts.
- `accept_rejection`: the classical rule. A token drawn from draft_probs is kept with probability
  target_probs / draft_probs, else replaced by one from what is left of the target's distribution;
  among siblings of a tree what is left is offered to the next one.
- `accept_block`: block verification of a chain (arXiv 2403.10444), which decides about a prefix
  as a whole and keeps at least as many tokens as the classical rule.

The last two keep the target's distribution only if whether draft j is submitted depends on the
drafts before j alone. A draft token outside the vocabulary is never kept, by any rule.

Shape legend: n draft tokens, V vocabulary. Row 0 of the targets' rows follows the text, row
i + 1 follows draft token i.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.target.noise import ACCEPT, RESIDUAL, exponentials, purpose_key, uniform


@dataclass(slots=True)
class Verdict:
    """What one verification keeps: the accepted draft tokens, and one token of the target."""

    accepted: list[int]  # indices into the draft, by depth
    bonus_token: int

    @property
    def num_accepted_drafts(self) -> int:
        return len(self.accepted)


def accept_matching(
    draft_ids: Sequence[int], parents: Sequence[int], chosen: Sequence[int]
) -> Verdict:
    """Follow the draft as long as it says what the target chose.

    ``chosen`` holds the target's token of each row, n + 1 (a list is fastest).
    """
    if not parents:
        depth = 0
        for token_id in draft_ids:
            if token_id != chosen[depth]:
                break
            depth += 1
        return Verdict(list(range(depth)), int(chosen[depth]))
    accepted: list[int] = []
    node, wanted = -1, chosen[0]
    for i, (token_id, parent) in enumerate(zip(draft_ids, parents, strict=True)):
        if parent == node and token_id == wanted:  # children come after their parent
            accepted.append(i)
            node, wanted = i, chosen[i + 1]
    return Verdict(accepted, int(wanted))


def accept_rejection(
    draft_ids: Sequence[int],
    parents: Sequence[int],
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    noise_key: int,
    position: int,
) -> Verdict:
    """The classical rule, for chains and trees.

    Args:
        target_probs: float32 [n + 1, V].
        draft_probs: float32 [n, V], what each token was drawn from (a sibling drawn without
            replacement: the distribution without the earlier ones); None: tokens not drawn at all.
        noise_key: of the request.
        position: in the text, of the first draft token.
    """
    accept_key = purpose_key(noise_key, ACCEPT, position)
    accepted: list[int] = []
    left = _row(target_probs, 0)
    node = -1
    for i, token_id in enumerate(draft_ids):
        if (parents[i] if parents else i - 1) != node:
            continue
        drawn_from = None if draft_probs is None else _row(draft_probs, i)
        if uniform(accept_key, i) < _ratio(left, drawn_from, token_id):
            accepted.append(i)
            node, left = i, _row(target_probs, i + 1)
        else:
            left = _residual(left, drawn_from, token_id)
    return Verdict(accepted, _draw(left, purpose_key(noise_key, RESIDUAL, position)))


def accept_block(
    draft_ids: Sequence[int],
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    noise_key: int,
    position: int,
) -> Verdict:
    """Block verification of a chain; arguments as for `accept_rejection`.

    Drafts must be drawn with noise of their own in each step (`draft_noise_key`): the decision
    looks at every token of the draft, also at those it does not keep.
    """
    accept_key = purpose_key(noise_key, ACCEPT, position)
    num_drafts = len(draft_ids)
    # The number kept is the last length whose test succeeds; only its remainder is drawn from.
    num_accepted, left = 0, None
    joint = 1.0  # min(1, ...) of the running product of ratios, p_i in the paper
    for length in range(num_drafts + 1):
        target = _row(target_probs, length)
        if length:
            before = _row(target_probs, length - 1)
            drawn_from = None if draft_probs is None else _row(draft_probs, length - 1)
            joint = min(1.0, joint * _ratio(before, drawn_from, draft_ids[length - 1]))
        remainder, test = target, joint
        if length < num_drafts:
            drawn_from = None if draft_probs is None else _row(draft_probs, length)
            remainder = _difference(joint * target, drawn_from, draft_ids[length])
            mass = float(remainder.sum())
            test = mass / (mass + 1.0 - joint) if mass + 1.0 - joint > 0 else 1.0
        if length == 0 or uniform(accept_key, length) < test:
            num_accepted = length
            left = remainder if remainder.any() else target
    assert left is not None
    bonus_token = _draw(left, purpose_key(noise_key, RESIDUAL, position))
    return Verdict(list(range(num_accepted)), bonus_token)


def _row(probs: torch.Tensor, i: int) -> np.ndarray:
    """One distribution, float64 [V]."""
    return probs[i].detach().cpu().numpy().astype(np.float64)


def _ratio(target: np.ndarray, drawn_from: np.ndarray | None, token_id: int) -> float:
    """target / draft probability of a token; 0 for one that cannot have been drawn."""
    if not 0 <= token_id < len(target):
        return 0.0
    drawn = 1.0 if drawn_from is None else float(drawn_from[token_id])
    return float(target[token_id]) / drawn if drawn > 0 else 0.0


def _difference(target: np.ndarray, drawn_from: np.ndarray | None, token_id: int) -> np.ndarray:
    """max(target - draft, 0), float64 [V], a draft that was not drawn having probability 1."""
    if drawn_from is not None:
        return np.maximum(target - drawn_from, 0.0)
    left = target.copy()
    if 0 <= token_id < len(left):
        left[token_id] = 0.0  # no probability is above 1
    return left


def _residual(target: np.ndarray, drawn_from: np.ndarray | None, token_id: int) -> np.ndarray:
    """What is left of the target's distribution, float64 [V], once a draft token is rejected."""
    left = _difference(target, drawn_from, token_id)
    total = float(left.sum())
    return left / total if total > 0 else target  # equal distributions reject by rounding only


def _draw(weights: np.ndarray, key: int) -> int:
    """A token with probability proportional to its weight: an exponential race."""
    ids = np.flatnonzero(weights)
    return int(ids[np.argmin(exponentials(key, ids) / weights[ids])])
