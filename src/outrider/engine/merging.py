"""Puts the drafts of several sources for one request into one tree with shared prefixes."""

from collections.abc import Sequence

from outrider.drafting.source import Draft
from outrider.engine.drafts import prefix


def merge(drafts: Sequence[Draft], chances: Sequence[Sequence[float]]) -> tuple[Draft, list[float]]:
    """One draft of all tokens that have a chance, and what is left of the chances.

    A token that several sources propose after the same path counts once, with the best of their
    chances, and belongs to the one that gave it, of equals to the first. Tokens that exclude each
    other share the chance of their parent.

    Args:
        drafts: of at least one token each.
        chances: that each token and all before it on its path are accepted. Tokens behind the end
            of a list are left out.
    """
    if len(drafts) == 1 and len(chances[0]) == len(drafts[0]):
        return drafts[0], list(chances[0])
    if len(drafts) == 1 and not drafts[0].is_tree:
        return prefix(drafts[0], len(chances[0])), list(chances[0])
    # The likeliest first: its path then lies in its place in the KV and need not be moved.
    order = sorted(range(len(drafts)), key=lambda i: -sum(chances[i]))
    tokens: list[int] = []
    parents: list[int] = []
    raw: list[float] = []
    owners: list[tuple[int, str]] = []  # of each token: which draft, and which source
    places: dict[tuple[int, int], int] = {}
    for index in order:
        draft, mine = drafts[index], chances[index]
        above = draft.parents
        found: list[int] = []
        for i, (token, chance) in enumerate(zip(draft.token_ids, mine)):  # noqa: B905
            parent = i - 1 if not above else above[i]
            where = found[parent] if parent >= 0 else -1
            place = places.setdefault((where, token), len(tokens))
            if place == len(tokens):
                tokens.append(token)
                parents.append(where)
                raw.append(chance)
                owners.append((index, draft.source_of(i)))
            elif (chance, -index) > (raw[place], -owners[place][0]):
                raw[place], owners[place] = chance, (index, draft.source_of(i))
            found.append(place)
    return _finished(tokens, parents, raw, [source for _, source in owners])


def _finished(
    tokens: list[int], parents: list[int], raw: list[float], sources: list[str]
) -> tuple[Draft, list[float]]:
    below = [0.0] * (len(tokens) + 1)  # raw chances of each node's children; [-1]: of the text
    for parent, chance in zip(parents, raw, strict=True):
        below[parent] += chance
    chances: list[float] = []
    confidence: list[float] = []
    for parent, said in zip(parents, raw, strict=True):
        above, whole = (chances[parent], raw[parent]) if parent >= 0 else (1.0, 1.0)
        share = said / max(whole, below[parent]) if said else 0.0
        chances.append(above * share)
        confidence.append(share)
    is_chain = all(parent == i - 1 for i, parent in enumerate(parents))
    is_mixed = len(set(sources)) > 1
    draft = Draft(
        tokens,
        [] if is_chain else parents,
        None,
        confidence,
        sources[0] if sources else "",
        sources if is_mixed else [],
    )
    return draft, chances


def joined(draft: Draft, more: Draft) -> Draft:
    """A chain and what another source says after its last token."""
    assert not draft.is_tree and not more.is_tree, (draft, more)
    return Draft(
        [*draft.token_ids, *more.token_ids],
        confidence=[*draft.confidence, *more.confidence],
        source=draft.source,
        sources=[*[draft.source] * len(draft), *[more.source] * len(more)],
    )
