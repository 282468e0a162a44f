"""Requests, comparisons and drafts that the engine tests share."""

import random

from fakes import ALPHABET

from outrider.drafting.source import Draft
from outrider.results import RequestOutput
from outrider.sampling_params import SamplingParams

VOCAB = len(ALPHABET.pieces)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True)


def params(**changes) -> SamplingParams:
    values = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **changes}
    return SamplingParams(**values)


def prompts(count: int, sampling: SamplingParams = GREEDY) -> dict:
    return {f"r{i}": ([1 + i, 2, 3, 4 + i % 3], sampling) for i in range(count)}


def ids_of(results: dict[str, RequestOutput]) -> dict[str, list[int]]:
    """Output ids by what sources know as request ids."""
    return {
        name if len(result.outputs) == 1 else f"{name}#{output.index}": output.token_ids
        for name, result in results.items()
        for output in result.outputs
    }


def assert_same(found: dict[str, RequestOutput], plain: dict[str, RequestOutput]) -> None:
    for name, result in plain.items():
        for mine, theirs in zip(found[name].outputs, result.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert (mine.text, mine.finish_reason) == (theirs.text, theirs.finish_reason)
            assert mine.stop_reason == theirs.stop_reason
            assert mine.logprobs == theirs.logprobs
            assert len(mine.token_sources) == len(mine.token_ids)


def wrong(token: int) -> int:
    return 1 + token % (VOCAB - 1)


def exact(rest, context) -> Draft:
    return Draft(rest[:8])


def all_wrong(rest, context) -> Draft:
    return Draft([wrong(token) for token in rest[:5]])


def half_right(rest, context) -> Draft:
    return Draft([*rest[:3], *(wrong(token) for token in rest[3:6])])


def right_with_junk(rest, context) -> Draft:
    return Draft([*rest[:2], -1, *rest[3:4], VOCAB, 10**6])


def tree_with_branch_last(rest, context) -> Draft:
    """Two wrong branches first, so that the accepted one has to be moved."""
    if len(rest) < 3:
        return Draft()
    one, two, three = rest[:3]
    ids = [wrong(one), wrong(wrong(one)), one, wrong(two), two, wrong(three), three]
    return Draft(ids, parents=[-1, 0, -1, 2, 2, 4, 4])


def random_tree(rest, context) -> Draft:
    """Grown by chance from right and wrong tokens, ids outside the vocabulary among them."""
    rng = random.Random(len(context.token_ids) * 7919 + len(rest))
    parents: list[int] = []
    tokens: list[int] = []
    right: dict[int, int] = {-1: 0}  # node on the right path -> its depth
    for index in range(rng.randrange(12)):
        parent = rng.randrange(-1, index)
        depth = right.get(parent)
        is_right = depth is not None and depth < len(rest) and rng.random() < 0.6
        token = rest[depth] if is_right and depth is not None else rng.randrange(-1, VOCAB + 2)
        if depth is not None and depth < len(rest) and token == rest[depth]:
            right[index] = depth + 1
        parents.append(parent)
        tokens.append(token)
    return Draft(tokens, parents=parents)


SCRIPTS = [
    *(exact, all_wrong, half_right, right_with_junk, tree_with_branch_last, random_tree),
]
