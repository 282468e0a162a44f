"""A source whose drafts the caller writes: for tests, demonstrations and experiments."""

from collections.abc import Callable, Mapping, Sequence

from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome

# Given the context, the draft to make, or None for none.
DraftFunction = Callable[[DraftContext], Draft | Sequence[int] | None]
# Drafts by output position (tokens already generated), or by (request id, output position).
Script = Mapping[int | tuple[str, int], Draft | Sequence[int]]


class ScriptedSource(DraftSource):
    """Proposes what it is told to, chains and trees, right or wrong.

    A script may hold ids that are not in the vocabulary, and -1: a target must never see them.
    A draft beyond the budget is cut (of a tree, its last nodes). What the source was told is
    kept in `outcomes`, `finished` and `released`.

    Args:
        script: a function of the context, or a mapping from output position or
            (request id, output position) to a draft; a list of ids is a chain.
        max_draft_tokens: longest draft this source says it makes.
        name: shown as the source of its tokens.
    """

    def __init__(
        self, script: DraftFunction | Script, max_draft_tokens: int = 64, name: str = "scripted"
    ) -> None:
        self.name = name
        self.max_draft_tokens = max_draft_tokens
        self.outcomes: list[Outcome] = []
        self.finished: list[str] = []
        self.released: list[str] = []
        self._script = script

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(c, b) for c, b in zip(contexts, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes.extend(outcomes)

    def finish(self, context: DraftContext) -> None:
        self.finished.append(context.request_id)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    def _draft(self, context: DraftContext, budget: int) -> Draft:
        written = self._written(context)
        if written is None:
            return Draft()
        draft = written if isinstance(written, Draft) else Draft(list(written))
        cut = Draft(
            token_ids=draft.token_ids[:budget],
            parents=draft.parents[:budget],
            probs=None if draft.probs is None else draft.probs[:budget],
            confidence=draft.confidence[:budget],
            source=draft.source or self.name,
        )
        cut.check()
        return cut

    def _written(self, context: DraftContext) -> Draft | Sequence[int] | None:
        if callable(self._script):
            return self._script(context)
        position = len(context.token_ids) - context.num_prompt_tokens
        by_request = self._script.get((context.request_id, position))
        return self._script.get(position) if by_request is None else by_request
