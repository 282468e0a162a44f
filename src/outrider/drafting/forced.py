"""Drafts of what a grammar forces: brackets, keys, the rest of a word that has no other end."""

from collections.abc import Sequence

from outrider.drafting.source import Draft, DraftContext, DraftSource

# The characters are certain; how the target divides them into tokens is not, but in 20 JSON answers
# of SmolLM2 (10 greedy, 10 at temperature 0.8) it kept all 294 tokens that were drafted.
CONFIDENCE = 0.99


class ForcedSource(DraftSource):
    """Proposes the tokens that the grammar of a request leaves no choice about."""

    name = "forced"
    needs_grammar = True
    max_draft_tokens = 32

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft]:
        return [_draft(*each) for each in zip(contexts, budgets, strict=True)]


def _draft(context: DraftContext, budget: int) -> Draft:
    if context.grammar is None:
        return Draft()
    token_ids = context.grammar.forced(context.token_ids[context.num_prompt_tokens :], budget)
    return Draft(token_ids, confidence=[CONFIDENCE] * len(token_ids))
