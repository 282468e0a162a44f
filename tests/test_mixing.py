"""Drafts of several sources for one request: merged, chained, told apart; the text stays plain."""

import numpy as np
import pytest
from engine_cases import (
    GREEDY,
    SCRIPTS,
    SEEDED,
    VOCAB,
    all_wrong,
    assert_same,
    exact,
    half_right,
    ids_of,
    prompts,
    random_tree,
    wrong,
)
from fakes import FakeTarget, ReplaySource, make_engine, run
from hypothesis import given
from hypothesis import strategies as st
from neural_cases import toy_drafter
from table_cases import toy_table

from outrider.drafting.draft_model import DraftModelSource
from outrider.drafting.lookup import LookupSource
from outrider.drafting.neural import NeuralSource
from outrider.drafting.source import Draft, DraftContext, DraftSource
from outrider.drafting.table import TableSource
from outrider.engine.drafts import matched, shared_part, subset
from outrider.engine.merging import merge
from outrider.policy.decisions import shape
from outrider.policy.fixed import FixedLength
from outrider.policy.planner import Planner
from outrider.policy.view import StepView
from outrider.sampling_params import SamplingParams

# ---- merging


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """Every token's path from the text."""
    found: list[tuple[int, ...]] = []
    for i, token in enumerate(draft.token_ids):
        parent = draft.parents[i] if draft.is_tree else i - 1
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_shared_prefixes_are_verified_once() -> None:
    drafts = [Draft([1, 2, 3], source="a"), Draft([1, 2, 5, 6], source="b"), Draft([7], source="c")]
    merged, chances = merge(drafts, [[0.5, 0.4, 0.1], [0.6, 0.5, 0.3, 0.2], [0.2]])
    merged.check()
    assert sorted(paths_of(merged)) == [(1,), (1, 2), (1, 2, 3), (1, 2, 5), (1, 2, 5, 6), (7,)]
    by_path = dict(zip(paths_of(merged), chances, strict=True))
    # of a token that two sources say the surer one counts: 4 to 1 against 5 to 1 for 2 after 1
    # 1 after nothing: odds of 1.5 against 0.25 for 7
    assert by_path[1,] == pytest.approx(1.5 / 2.75)
    assert by_path[1, 2] == pytest.approx(1.5 / 2.75 * 5 / 6)
    sources = {path: merged.source_of(i) for i, path in enumerate(paths_of(merged))}
    assert (sources[1, 2], sources[1, 2, 3], sources[7,]) == ("b", "a", "c")
    assert paths_of(merged)[:4] == [(1,), (1, 2), (1, 2, 5), (1, 2, 5, 6)]  # the likeliest in place
    assert shape(merged) == "tree"


def test_what_excludes_each_other_is_weighed_by_its_odds() -> None:
    merged, chances = merge([Draft([1, 2]), Draft([3])], [[0.9, 0.8], [0.6]])
    first, other = 9 / 11.5, 1.5 / 11.5  # 9 to 1 and 1.5 to 1
    assert chances == pytest.approx([first, first * 8 / 9, other])
    assert merged.confidence == pytest.approx([first, 8 / 9, other])


def test_a_tree_alone_keeps_its_chances_when_it_is_merged_with_part_of_itself() -> None:
    tree = Draft([1, 2, 3], parents=[-1, -1, 0])
    merged, chances = merge([tree, Draft([1])], [[0.6, 0.3, 0.5], [0.5]])
    assert (merged.token_ids, chances) == ([1, 2, 3], pytest.approx([0.6, 0.3, 0.5]))


def test_a_draft_alone_is_itself() -> None:
    draft = Draft([1, 2, 3], source="a")
    assert merge([draft], [[0.5, 0.4, 0.3]])[0] is draft
    cut, chances = merge([draft], [[0.5, 0.4]])
    assert (cut.token_ids, chances, cut.source) == ([1, 2], [0.5, 0.4], "a")


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    count = draw(st.integers(1, 8))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    tokens = [4 * parents[:i].count(parents[i]) + draw(st.integers(0, 3)) for i in range(count)]
    confidence = [draw(st.floats(0, 1)) for _ in range(count)]
    return Draft(tokens, parents, None, confidence, draw(st.sampled_from("abc")))


def products(draft: Draft) -> list[float]:
    found: list[float] = []
    for value, parent in zip(draft.confidence, draft.parents, strict=True):
        found.append(value * (found[parent] if parent >= 0 else 1.0))
    return found


@given(st.lists(trees(), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=9))
def test_merging_loses_no_path_and_makes_no_chance(drafts: list[Draft], true: list[int]) -> None:
    merged, chances = merge(drafts, [products(draft) for draft in drafts])
    merged.check()
    paths = paths_of(merged)
    assert set(paths) == {path for draft in drafts for path in paths_of(draft)}
    below = [0.0] * (len(paths) + 1)
    for i, chance in enumerate(chances):
        parent = merged.parents[i] if merged.is_tree else i - 1
        assert chance <= (chances[parent] if parent >= 0 else 1.0)
        below[parent] += chance
    if len(drafts) > 1:
        assert all(
            total <= above + 1e-9 for total, above in zip(below, [*chances, 1.0], strict=True)
        )
        assert len(set(paths)) == len(paths)
    depth = max(len(path) for path in [(), *paths] if list(path) == true[: len(path)])
    if len(drafts) > 1:
        assert matched(merged, true) == depth
    for draft in drafts:
        assert set(paths_of(shared_part(draft, merged))) == set(paths_of(draft))
    half = subset(merged, [i for i, chance in enumerate(chances) if chance >= 0.3])
    for draft in drafts:
        part = paths_of(shared_part(draft, half))
        assert set(part) == set(paths_of(draft)) & set(paths_of(half))


# ---- in the engine


class MixAll(FixedLength):
    """Submits every proposal, merged."""

    def choose(self, view: StepView) -> list[Draft]:
        chosen = []
        for ask in view.asks:
            drafts = [draft for draft in ask.drafts if draft.token_ids]
            sure = [[1.0] * len(draft) for draft in drafts]
            chosen.append(merge(drafts, sure)[0] if drafts else Draft())
        return chosen


def planner() -> Planner:
    from outrider.policy.cost import CostModel

    return Planner(CostModel(512))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("make", [MixAll, planner])
@pytest.mark.parametrize("scripts", [(half_right, exact), (all_wrong, random_tree), SCRIPTS])
def test_mixed_text_is_plain_text(sampling, make, scripts) -> None:
    plain = run(make_engine(), prompts(4, sampling))
    ids = ids_of(plain)
    sources = [ReplaySource(ids, script, name=f"s{i}") for i, script in enumerate(scripts)]
    engine = make_engine(sources, planner=make(), kv_cache_tokens=512)
    found = run(engine, prompts(4, sampling))
    assert_same(found, plain)
    for name, result in found.items():
        metrics = result.metrics.speculative_decoding
        assert metrics is not None
        said = result.outputs[0].token_sources
        for source in sources:
            split = metrics.per_source.get(source.name)
            assert said.count(source.name) == (split.num_accepted_draft_tokens if split else 0), (
                name
            )
        total = sum(s.num_draft_tokens for s in metrics.per_source.values())
        assert total == metrics.num_draft_tokens


def test_every_token_is_named_by_who_proposed_it() -> None:
    plain = run(make_engine(), prompts(1))
    ids = ids_of(plain)
    near = ReplaySource(ids, lambda rest, _: Draft(rest[:2]), name="near")
    far = ReplaySource(ids, lambda rest, _: Draft([*rest[:4], *map(wrong, rest[4:6])]), name="far")
    engine = make_engine([near, far], planner=MixAll())
    found = run(engine, prompts(1))
    assert_same(found, plain)
    assert found["r0"].outputs[0].token_sources[1:11] == [
        *["near", "near", "far", "far", "target"],
        *["near", "near", "far", "far", "target"],
    ]
    split = engine.metrics.per_source
    assert split["far"].draft_tokens_per_position[:6] == [0, 0, 8, 7, 7, 7]
    assert split["near"].accepted_per_position == [8, 8]
    # each is told of all of its own draft that was submitted
    assert {len(o.draft) for o in near.outcomes} == {2}
    assert {o.num_accepted_drafts for o in near.outcomes} == {2}
    assert far.outcomes[0].draft.token_ids[:4] == far.outcomes[0].accepted_ids[:4]
    assert [len(o.accepted_ids) for o in far.outcomes[:7]] == [5] * 7
    assert engine.metrics.acceptance_histogram[4] == 7


def test_a_source_learns_of_its_own_part_of_a_tree() -> None:
    plain = run(make_engine(), prompts(1))
    ids = ids_of(plain)
    right = ReplaySource(ids, lambda rest, _: Draft(rest[:4]), name="right")
    half = ReplaySource(
        ids, lambda rest, _: Draft([*rest[:1], *map(wrong, rest[1:4])]), name="half"
    )
    run(make_engine([half, right], planner=MixAll()), prompts(1))
    first = half.outcomes[0]
    assert (len(first.draft), first.num_accepted_drafts) == (4, 1)
    assert first.accepted_ids == ids["r0"][1:3]  # its own token, and what came instead of the next
    assert right.outcomes[0].num_accepted_drafts == 4


class Extending(ReplaySource):
    """Says nothing of its own, and goes on from what others say."""

    can_extend = True

    def __init__(self, outputs: dict[str, list[int]], name: str = "more") -> None:
        super().__init__(outputs, lambda rest, context: Draft(), name=name)
        self.asked: list[tuple[int, list[int], int]] = []

    def extend(self, contexts, chains, budgets):
        drafts = []
        for context, chain, budget in zip(contexts, chains, budgets, strict=True):
            done = len(context.token_ids) - context.num_prompt_tokens
            self.asked.append((done, list(chain), budget))
            rest = self.outputs[context.request_id][done + len(chain) :]
            drafts.append(Draft(rest[: min(4, budget)], confidence=[0.9] * len(rest[:4][:budget])))
        return drafts


def test_a_source_goes_on_from_the_last_token_of_another_ones_chain() -> None:
    plain = run(make_engine(), prompts(2))
    ids = ids_of(plain)
    first = ReplaySource(
        ids, lambda rest, _: Draft(rest[:3], confidence=[0.95] * len(rest[:3])), name="first"
    )
    more = Extending(ids)
    engine = make_engine([first, more], planner=planner())
    found = run(engine, prompts(2))
    assert_same(found, plain)
    assert found["r0"].outputs[0].token_sources[1:9] == [
        *["first"] * 3,
        *["more"] * 4,
        "target",
    ]
    assert more.outcomes == []
    shapes = {choice.shape for step in engine.planner.decisions for choice in step.choices}
    assert "chain" in shapes
    for done, chain, budget in more.asked:
        assert 0 < len(chain) + budget <= 40 - done


def test_no_chain_is_gone_on_from_that_would_end_early() -> None:
    ids = ids_of(run(make_engine(), prompts(1)))
    first = ReplaySource(
        ids, lambda rest, _: Draft([*map(wrong, rest[:3])], confidence=[0.3, 0.2, 0.1][: len(rest)])
    )
    more = Extending(ids)
    run(make_engine([first, more], planner=planner()), prompts(1))
    assert more.asked == []


def test_why_a_mix_was_chosen_can_be_read() -> None:
    plain = run(make_engine(), prompts(2))
    ids = ids_of(plain)
    sure = ReplaySource(
        ids, lambda rest, _: Draft(rest[:4], confidence=[0.9] * len(rest[:4])), name="a"
    )
    other = ReplaySource(
        ids,
        lambda rest, _: Draft([*map(wrong, rest[:2])], confidence=[0.4] * len(rest[:2])),
        name="b",
    )
    engine = make_engine([sure, other], planner=planner())
    run(engine, prompts(2))
    assert engine.planner.decisions[0].asked == {
        "a": 1,
        "b": 1,
    }  # a source is tried with one request
    step = next(s for s in engine.planner.decisions if s.asked == {"a": 2, "b": 2})
    assert step.asked == {"a": 2, "b": 2} and step.num_rows == 2
    choice = step.choices[0]
    assert [(c.source, c.num_tokens) for c in choice.considered] == [("a", 4), ("b", 2)]
    # 0.9 + 0.81 + … as it says itself, and more since it was right all the time
    assert 0.9 + 0.81 + 0.729 + 0.6561 < choice.considered[0].expected < 4
    assert choice.chosen["a"] == 4 and choice.shape in ("one", "tree")
    assert step.plain_tokens == 2 < step.expected_tokens
    assert step.plain_seconds < step.expected_seconds and step.expected_speedup > 1.5


# ---- sources that go on from a chain say what they would say of a text


def context(tokens: list[int], request_id: str) -> DraftContext:
    return DraftContext(request_id, np.array(tokens, np.int32), 1, GREEDY)


def of_kind(kind: str) -> DraftSource:
    if kind == "lookup":
        return LookupSource(min_survival=0.0)
    if kind == "table":
        corpus = [[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 6
        return TableSource(toy_table(corpus), branches=2, min_survival=0.0)
    if kind == "pard":
        return NeuralSource(toy_drafter("pard", VOCAB))
    return DraftModelSource(FakeTarget(VOCAB), 4)


TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]


@pytest.mark.parametrize("kind", ["lookup", "table", "pard", "draft_model"])
@pytest.mark.parametrize("chain", [[4], [4, 5], [20, 4, 5]])
def test_to_go_on_from_a_chain_is_to_draft_for_the_longer_text(kind: str, chain: list[int]) -> None:
    source = of_kind(kind)
    source.bind(FakeTarget(VOCAB), None, 4)
    assert source.can_extend
    (first,) = source.propose([context(TEXT, "a")], [4])
    held = source.held_tokens("a")
    (found,) = source.extend([context(TEXT, "a")], [chain], [3])
    (whole,) = source.propose([context([*TEXT, *chain], "b")], [3])
    assert not whole.is_tree and found.token_ids == whole.token_ids != []
    assert len(found.confidence) == len(found)
    assert source.held_tokens("a") == held
    # nothing of it is left: the text goes on another way, and drafts are those of a fresh request
    longer = [*TEXT, 4, 11]
    (after,) = source.propose([context(longer, "a")], [4])
    (fresh,) = of_kind_bound(kind).propose([context(longer, "z")], [4])
    assert after.token_ids == fresh.token_ids
    assert first.token_ids


def of_kind_bound(kind: str) -> DraftSource:
    source = of_kind(kind)
    source.bind(FakeTarget(VOCAB), None, 4)
    return source


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_real_sources_together_leave_the_text_plain(sampling: SamplingParams) -> None:
    plain = run(make_engine(), prompts(4, sampling))
    corpus = [np.array(ids) for ids in ids_of(plain).values()]
    sources = [
        LookupSource(min_survival=0.0),
        TableSource(toy_table(corpus, VOCAB), min_survival=0.0),
        NeuralSource(toy_drafter("dspark", VOCAB)),
        NeuralSource(toy_drafter("pard", VOCAB)),
        DraftModelSource(FakeTarget(VOCAB), 4),
    ]
    engine = make_engine(sources, planner=planner(), kv_cache_tokens=256)
    found = run(engine, prompts(4, sampling))
    assert_same(found, plain)
    assert engine.metrics.rejection_causes.get("kv_mismatch", 0) == 0
    assert engine.metrics.num_accepted_draft_tokens > 60
    assert not engine.speculation.guard.failures
    for source in sources[2:]:
        source.check_integrity()  # pyright: ignore[reportAttributeAccessIssue]
