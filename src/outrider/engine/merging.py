"""Puts the drafts of several sources for one request into one tree with shared prefixes."""

from collections.abc import Sequence

from outrider.drafting.source import Draft
from outrider.engine.drafts import matched, prefix, straightened, subset

LEAST = 0.005  # chance that a draft is wrong somewhere, at least
# A tree takes as long as a chain of so many more tokens, and a share of its own: 0.6 ms for 4 rows
# of 4.8 ms, 0.9 for 8 of 5.6, 1.8 for 16 of 8.2 on two CPUs.
TREE_ROWS, TREE_SHARE = 2, 0.25


def merge(drafts: Sequence[Draft], chances: Sequence[Sequence[float]]) -> tuple[Draft, list[float]]:
    """One draft of all tokens that have a chance, and what is left of the chances.

    A token that several sources propose after the same path counts once, with the best of their
    odds, and belongs to the one that gave them, of equals to the first. Tokens that exclude each
    other are weighed by their odds against none of what their source proposes: of a sure token and
    a likely one the sure one keeps most of its chance. Alone, a draft keeps its chances.

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
    odds: list[float] = []
    owners: list[tuple[int, str]] = []  # of each token: which draft, and which source
    places: dict[tuple[int, int], int] = {}
    for index in order:
        draft, mine = drafts[index], _odds(drafts[index], chances[index])
        above = draft.parents
        found: list[int] = []
        for i, (token, value) in enumerate(zip(draft.token_ids, mine)):  # noqa: B905
            parent = i - 1 if not above else above[i]
            where = found[parent] if parent >= 0 else -1
            place = places.setdefault((where, token), len(tokens))
            if place == len(tokens):
                tokens.append(token)
                parents.append(where)
                odds.append(value)
                owners.append((index, draft.source_of(i)))
            elif (value, -index) > (odds[place], -owners[place][0]):
                odds[place], owners[place] = value, (index, draft.source_of(i))
            found.append(place)
    return _finished(tokens, parents, odds, [source for _, source in owners])


def trimmed(draft: Draft, chances: list[float], least: float) -> tuple[Draft, list[float]]:
    """A tree, or its likeliest path where the rest does not pay for being a tree.

    Args:
        least: what a token has to be worth to pay for its row.
    """
    if not draft.parents:
        return draft, chances
    best: dict[int, int] = {}  # node -> its likeliest child
    for node, parent in enumerate(draft.parents):
        other = best.get(parent)
        if other is None or chances[node] > chances[other]:
            best[parent] = node
    path: list[int] = []
    node = best.get(-1, -1)
    while node >= 0:
        path.append(node)
        node = best.get(node, -1)
    along = [chances[i] for i in path]
    paying = [c for c in chances if c > least]
    on_path = [c for c in along if c > least]
    beside = sum(paying) - sum(on_path) - least * (len(paying) - len(on_path))
    if beside > tree_rows(len(paying)) * least:
        return draft, chances
    return straightened(subset(draft, path)), along


def tree_rows(num_tokens: int) -> float:
    """Rows that take as long as it takes longer to verify so many tokens as a tree, not a chain."""
    return TREE_ROWS + TREE_SHARE * num_tokens


def side_chance(
    best: Draft, chances: Sequence[float], other: Draft, others: Sequence[float]
) -> float:
    """What one more token that `other` adds to `best` has, about, if the two are merged.

    Where a draft leaves the better one, its token shares what that one leaves over.

    Args:
        chances, others: that each token and all before it on its path are accepted.
    """
    if best.parents and other.parents:
        return 1.0
    if not other.parents:
        depth = matched(best, other.token_ids)
        if depth >= len(others):
            return 0.0
        if best.parents:
            return others[depth]
        return _beside(chances, depth, others[depth] / (others[depth - 1] if depth else 1.0))
    most = 0.0
    shared = {-1: 0}  # nodes that are in the better one too, and their depth
    for node, parent in enumerate(other.parents):
        depth = shared.get(parent, -1)
        if depth < 0:
            continue
        if depth < len(best) and other.token_ids[node] == best.token_ids[depth]:
            shared[node] = depth + 1
        else:
            share = others[node] / (others[parent] if parent >= 0 else 1.0)
            most = max(most, _beside(chances, depth, share))
    return most


def _beside(chances: Sequence[float], depth: int, share: float) -> float:
    """Chance of a token that excludes the one at a depth of a chain, by what it had alone."""
    if depth > len(chances):
        return 0.0
    above = chances[depth - 1] if depth else 1.0
    if depth >= len(chances):
        return above * share
    mine = chances[depth] / above
    odds = share / max(LEAST, 1.0 - share)
    return above * odds / (1.0 + odds + mine / max(LEAST, 1.0 - mine))


def _odds(draft: Draft, chances: Sequence[float]) -> list[float]:
    """Of every token, given that those before it are right, against none of its siblings."""
    found: list[float] = []
    if not draft.is_tree:
        above = 1.0
        for chance in chances:
            share = chance / above if above else 0.0
            found.append(share / max(LEAST, 1.0 - share))
            above = chance
        return found
    shares: list[float] = []
    left = [1.0] * (len(draft) + 1)  # that no child of a node is right; [-1]: of the text
    for parent, chance in zip(draft.parents, chances, strict=True):
        above = chances[parent] if parent >= 0 else 1.0
        shares.append(chance / above if above else 0.0)
        left[parent] -= shares[-1]
    return [
        share / max(LEAST, left[parent])
        for parent, share in zip(draft.parents, shares, strict=True)
    ]


def _finished(
    tokens: list[int], parents: list[int], odds: list[float], sources: list[str]
) -> tuple[Draft, list[float]]:
    against = [1.0] * (len(tokens) + 1)  # all odds of a node's children, and of none of them
    for parent, value in zip(parents, odds, strict=True):
        against[parent] += value
    confidence = [v / against[parent] for parent, v in zip(parents, odds, strict=True)]
    chances: list[float] = []
    for parent, share in zip(parents, confidence, strict=True):
        chances.append(share * (chances[parent] if parent >= 0 else 1.0))
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
