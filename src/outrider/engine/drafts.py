"""Makes what a source said fit for the target: cut at the room there is, at bad ids, at the plan.

Parents come before their children in a draft, so the first n tokens of a tree are a tree.
"""

from collections.abc import Sequence

from outrider.drafting.source import Draft


def depths(draft: Draft) -> list[int]:
    """Depth of every draft token below the last token of the text; the first is 1."""
    if not draft.is_tree:
        return list(range(1, len(draft) + 1))
    found: list[int] = []
    for parent in draft.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def prefix(draft: Draft, num_tokens: int) -> Draft:
    """The first `num_tokens` tokens of a draft."""
    if num_tokens >= len(draft):
        return draft
    return Draft(
        token_ids=draft.token_ids[:num_tokens],
        parents=draft.parents[:num_tokens],
        probs=None if draft.probs is None else draft.probs[:num_tokens],
        confidence=draft.confidence[:num_tokens],
        source=draft.source,
        sources=draft.sources[:num_tokens],
    )


def subset(draft: Draft, kept: Sequence[int]) -> Draft:
    """The tokens at the ascending indices `kept`, which hold every parent of theirs."""
    if len(kept) == len(draft):
        return draft
    if not draft.is_tree:
        assert not kept or kept[-1] == len(kept) - 1, kept
        return prefix(draft, len(kept))
    new_index = {old: new for new, old in enumerate(kept)}
    new_index[-1] = -1
    return Draft(
        token_ids=[draft.token_ids[i] for i in kept],
        parents=[new_index[draft.parents[i]] for i in kept],
        probs=None if draft.probs is None else draft.probs[list(kept)],
        confidence=[draft.confidence[i] for i in kept] if draft.confidence else [],
        source=draft.source,
        sources=[draft.sources[i] for i in kept] if draft.sources else [],
    )


def straightened(draft: Draft) -> Draft:
    """A tree without branches as a chain."""
    if draft.is_tree and all(parent == i - 1 for i, parent in enumerate(draft.parents)):
        draft.parents = []
    return draft


def cut_depth(draft: Draft, max_depth: int) -> Draft:
    """The tokens at most `max_depth` below the text."""
    if not draft.is_tree:
        return prefix(draft, max(0, max_depth))
    return subset(draft, [i for i, depth in enumerate(depths(draft)) if depth <= max_depth])


def cut_unknown(draft: Draft, vocab_size: int) -> tuple[Draft, list[int]]:
    """Drop ids outside the vocabulary and all that follows them; also the depths of what went."""
    ids = draft.token_ids
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return draft, []
    known = [0 <= token < vocab_size for token in ids]
    parents = draft.parents or range(-1, len(ids) - 1)
    for index, parent in enumerate(parents):
        known[index] = known[index] and (parent < 0 or known[parent])
    dropped = [depth for depth, keep in zip(depths(draft), known, strict=True) if not keep]
    return subset(draft, [i for i, keep in enumerate(known) if keep]), dropped


def matched(draft: Draft, true_ids: Sequence[int]) -> int:
    """Depth to which a draft says what the text went on with."""
    depth = 0
    if not draft.is_tree:
        for said, true in zip(draft.token_ids, true_ids):  # noqa: B905 (the shorter one ends it)
            if said != true:
                break
            depth += 1
        return depth
    node = -1
    for index, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if parent == node and depth < len(true_ids) and token == true_ids[depth]:
            node, depth = index, depth + 1
    return depth


def shared_part(own: Draft, submitted: Draft) -> Draft:
    """What of a source's own draft is in the tree that was submitted."""
    if own is submitted:
        return own
    if not own.is_tree and not submitted.is_tree:
        return prefix(own, matched(own, submitted.token_ids))
    parents = submitted.parents or range(-1, len(submitted) - 1)
    places: dict[tuple[int, int], int] = {}
    for index, pair in enumerate(zip(parents, submitted.token_ids, strict=True)):
        places.setdefault(pair, index)
    found: dict[int, int] = {-1: -1}  # own node -> submitted node
    for index, parent in enumerate(own.parents or range(-1, len(own) - 1)):
        place = places.get((found[parent], own.token_ids[index])) if parent in found else None
        if place is not None:
            found[index] = place
    del found[-1]
    return subset(own, list(found))
