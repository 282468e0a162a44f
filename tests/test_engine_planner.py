"""What is drafted and submitted follows from chances and costs."""

import numpy as np
import pytest

from outrider.drafting.source import Draft, DraftSource
from outrider.engine.drafts import cut_depth, cut_unknown, prefix, subset
from outrider.policy.cost import CostModel
from outrider.policy.feedback import DraftOutcome, record
from outrider.policy.planner import EXPLORE_EVERY, Planner
from outrider.policy.restrict import Allowed
from outrider.policy.view import Ask, StepView
from outrider.results import SpeculativeMetrics

pytestmark = pytest.mark.measured_costs


def make_planner(per_row: float, base: float = 0.010, **options) -> Planner:
    """A planner that has measured steps of `base` seconds and `per_row` per further row."""
    cost = CostModel(64)
    for rows in range(1, 65):
        for _ in range(3):
            cost.observe(rows, base + per_row * (rows - 1))
    return Planner(cost, **options)


def chain(*confidence: float, source: str = "s") -> Draft:
    return Draft(list(range(len(confidence))), confidence=list(confidence), source=source)


def view_of(*proposals: list[Draft], row_budget: int = 50) -> StepView:
    asks = [Ask(f"r{i}", 20, drafts=list(drafts)) for i, drafts in enumerate(proposals)]
    return StepView(asks, len(asks), row_budget)


def choose(planner: Planner, *proposals: list[Draft], row_budget: int = 50) -> list[Draft]:
    return planner.choose(view_of(*proposals, row_budget=row_budget))


def sizes(planner: Planner, *proposals: list[Draft], row_budget: int = 50) -> list[int]:
    return [len(draft) for draft in choose(planner, *proposals, row_budget=row_budget)]


def test_tokens_are_submitted_while_they_pay():
    # a row costs 10 % of a step: the chance of a token must be above about that
    draft = chain(0.9, 0.9, 0.5, 0.2, 0.2)  # survival 0.9 0.81 0.405 0.081 0.016
    assert sizes(make_planner(0.001), [draft]) == [3]
    assert sizes(make_planner(0.00001), [draft]) == [5]
    assert sizes(make_planner(0.012), [draft]) == [0]


def test_the_best_count_maximises_tokens_per_second():
    rng = np.random.default_rng(1)
    for _ in range(50):
        drafts = [chain(*rng.uniform(0.2, 1, rng.integers(0, 9))) for _ in range(4)]
        planner = make_planner(float(rng.uniform(0.0001, 0.002)))
        chosen = sizes(planner, *[[draft] for draft in drafts])
        survival = [np.cumprod(draft.confidence) for draft in drafts]

        def rate(counts, survival=survival, planner=planner):
            tokens = 4 + sum(s[:n].sum() for s, n in zip(survival, counts, strict=True))
            return tokens / planner.cost.curve()[4 + sum(counts)]

        for index in range(4):
            for change in (-1, 1):
                other = [n + change * (i == index) for i, n in enumerate(chosen)]
                if 0 <= other[index] <= len(drafts[index]):
                    assert rate(chosen) >= rate(other) * (1 - 1e-9)


def test_of_sources_that_say_the_same_the_one_that_promises_most_is_named():
    drafts = [chain(0.9, 0.9, source="a"), chain(*[0.8] * 6, source="b")]
    chosen = choose(make_planner(0.0001), drafts)[0]
    assert (chosen.token_ids, chosen.parents) == ([0, 1, 2, 3, 4, 5], [])
    assert (chosen.source, chosen.sources) == ("b", [])


def test_rows_are_shared_by_chance_between_requests():
    assert sizes(make_planner(0.0), [chain(*[0.9] * 8)], [chain(*[0.3] * 8)], row_budget=6) == [
        6,
        0,
    ]
    assert sizes(make_planner(0.0), [chain(0.9, 0.1)], [chain(0.5, 0.9)], row_budget=3) == [1, 2]


def test_trees_lose_their_unlikely_branches():
    tree = Draft([1, 2, 3, 4], parents=[-1, -1, 0, 1], confidence=[0.7, 0.3, 0.9, 0.2], source="s")
    chosen = choose(make_planner(0.002), [tree])[0]
    assert (chosen.token_ids, chosen.parents) == ([1, 3], [])  # a chain is left


def test_a_source_that_promises_too_much_is_believed_less():
    planner = make_planner(0.001)
    liar = chain(*[0.95] * 8)
    assert sizes(planner, [liar]) == [8]
    for _ in range(40):
        planner.observe(Ask("r", 20, drafts=[liar]), liar, [9])
    assert sizes(planner, [liar]) == [0]
    for _ in range(400):
        planner.observe(Ask("r", 20, drafts=[liar]), liar, [*range(7), 9])
    assert sizes(planner, [liar]) == [7]


def test_now_and_then_more_is_tried_so_that_estimates_stay_alive():
    planner = make_planner(0.012)
    found = [sizes(planner, [chain(*[0.5] * 8)])[0] for _ in range(2 * EXPLORE_EVERY)]
    assert [i + 1 for i, n in enumerate(found) if n] == [EXPLORE_EVERY, 2 * EXPLORE_EVERY]
    assert max(found) == 4


def test_budgets_end_at_what_is_of_use():
    source = DraftSource()
    source.max_draft_tokens = 5
    planner = make_planner(0.001)
    for _ in range(5):  # before that a source is tried with few requests
        planner.observe_call("source", 1, 1e-6)

    def budgets(rooms: list[int], row_budget: int, **options) -> list[int]:
        asks = [Ask(f"r{i}", room, **options) for i, room in enumerate(rooms)]
        return planner.budgets(source, StepView(asks, len(asks), row_budget))

    assert budgets([10, 3, 0, -1], 100) == [5, 3, 0, 0]
    assert budgets([10], 2) == [2]
    assert budgets([10, 10], 50, allowed=Allowed(num_draft_tokens=2)) == [2, 2]
    assert budgets([10, 10], 50, allowed=Allowed(sources=("other",))) == [0, 0]
    assert budgets([10], 50, allowed=Allowed(forbidden=frozenset(["source"]))) == [0]


def use(planner: Planner, source: DraftSource, drafts: list[list[Draft]], right: int) -> list[int]:
    """One step: budgets of a source that then drafts four tokens, of which some are right."""
    view = view_of(*drafts)
    budgets = planner.budgets(source, view)
    for ask, budget in zip(view.asks, budgets, strict=True):
        if budget:
            ask.drafts.append(Draft([50, 51, 52, 53], source=source.name))
    asked = sum(budget > 0 for budget in budgets)
    if asked:
        planner.observe_call(source.name, asked, 0.004)
    chosen = planner.choose(view)
    for ask, draft in zip(view.asks, chosen, strict=True):
        planner.observe(ask, draft, [*[50, 51, 52, 53][: min(right, len(draft))], 9])
    return budgets


def test_a_source_slower_than_what_it_brings_is_asked_rarely():
    planner, source = make_planner(0.0001), DraftSource()
    for _ in range(100):
        use(planner, source, [[]], right=0)
    asked = [use(planner, source, [[]], right=0)[0] for _ in range(4 * EXPLORE_EVERY)]
    assert 0 < sum(map(bool, asked)) <= 4
    for _ in range(60 * EXPLORE_EVERY):
        use(planner, source, [[]], right=4)
    assert all(use(planner, source, [[]], right=4)[0] for _ in range(10))


def test_a_slow_source_is_asked_only_where_others_have_little_to_say():
    planner, source = make_planner(0.0001), DraftSource()
    sure = chain(*[0.97] * 12, source="lookup")
    for _ in range(60):
        view = view_of([sure], [])
        budgets = planner.budgets(source, view)
        for ask, budget in zip(view.asks, budgets, strict=True):
            if budget:
                ask.drafts.append(Draft([50, 51, 52, 53], source=source.name))
        if num_asked := sum(map(bool, budgets)):
            planner.observe_call(source.name, num_asked, 0.0005 * num_asked)
        chosen = planner.choose(view)
        planner.observe(view.asks[0], chosen[0], [*range(len(chosen[0])), 9])
        planner.observe(view.asks[1], chosen[1], [50, 51, 9][: min(2, len(chosen[1])) + 1])
    assert planner.budgets(source, view_of([sure], [])) == [0, 16]


def test_under_biased_rules_a_token_has_no_say_in_its_own_submission():
    planner = make_planner(0.001, is_biased_rule=True)
    first, second = chain(0.9, 0.02, 0.9, source="a"), chain(*[0.9] * 6, source="b")
    # the second token is submitted whatever its own confidence, the third is not
    assert sizes(planner, [first, second]) == [2]
    assert choose(planner, [first, second])[0].source == "a"
    for token in (0.02, 0.99):
        assert sizes(planner, [chain(0.9, token)]) == [2]


def test_costs_are_interpolated_and_never_fall():
    cost = CostModel(16)
    assert cost.curve()[9] > cost.curve()[1] == 1.0
    for _ in range(5):
        cost.observe(1, 0.010)
        cost.observe(9, 0.014)
        cost.observe(12, 0.012)
    curve = cost.curve()
    assert curve[1] == pytest.approx(0.010, rel=0.1)
    assert 0.010 < curve[5] < 0.014
    assert (np.diff(curve) >= 0).all()


def test_one_disturbed_step_moves_a_cost_little():
    cost = CostModel(4)
    for _ in range(10):
        cost.observe(2, 0.010)
    cost.observe(2, 5.0)
    assert cost.curve()[2] < 0.0125


def test_drafts_are_cut_without_orphans():
    tree = Draft([5, 6, 7, 8, 9], parents=[-1, 0, 0, 2, -1], confidence=[0.1, 0.2, 0.3, 0.4, 0.5])
    assert subset(tree, [0, 2, 3]).parents == [-1, 0, 1]
    assert subset(tree, [0, 2, 3]).confidence == [0.1, 0.3, 0.4]
    assert cut_depth(tree, 2).token_ids == [5, 6, 7, 9]
    assert prefix(tree, 2).parents == [-1, 0]
    bad = Draft([5, 99, 7, 8, -1], parents=[-1, 0, 0, 1, -1])
    known, dropped = cut_unknown(bad, 10)
    assert (known.token_ids, known.parents, dropped) == ([5, 7], [-1, 0], [2, 3, 1])
    known, dropped = cut_unknown(Draft([1, -1, 2]), 10)
    assert (known.token_ids, dropped) == ([1], [2, 3])
    assert cut_unknown(Draft([1, 2]), 10) == (Draft([1, 2]), [])


def test_counts_of_one_step():
    metrics = SpeculativeMetrics()
    draft = Draft([1, 2, 3, 4], source="s")
    record(
        metrics,
        DraftOutcome(
            draft,
            num_accepted_drafts=3,
            num_emitted_drafts=2,
            num_new_tokens=2,
            is_greedy=False,
            unknown_depths={"s": [5, 6]},
            causes={"truncated_by_plan": 7},
        ),
    )
    split = metrics.per_source["s"]
    assert (metrics.num_draft_tokens, metrics.num_accepted_draft_tokens) == (6, 2)
    assert split.draft_tokens_per_position == [1, 1, 1, 1, 1, 1]
    assert split.accepted_per_position == [1, 1, 0, 0, 0, 0]
    assert metrics.rejection_causes == {
        "stop": 1,
        "sampled_otherwise": 1,
        "out_of_vocabulary": 2,
        "truncated_by_plan": 7,
    }
    assert metrics.acceptance_histogram == {2: 1}


def test_a_slow_source_drafts_about_as_far_as_pays():
    planner, source = make_planner(0.001), DraftSource()  # a token has to survive by about 0.1

    def step(sure: int) -> int:
        """One of which that many tokens are likely, and right; the budget."""
        view = view_of([])
        [budget] = planner.budgets(source, view)
        if budget:
            confidence = [0.95] * sure + [0.05] * 16
            view.asks[0].drafts.append(chain(*confidence[:budget], source=source.name))
            planner.observe_call(source.name, 1, 0.003)
        [draft] = planner.choose(view)
        planner.observe(view.asks[0], draft, [*range(min(sure, len(draft))), 99])
        return budget

    assert step(2) == source.max_draft_tokens == 16
    for _ in range(300):
        step(2)
    assert step(2) == 4  # half as many again as pay, and one
    for _ in range(300):
        step(16)
    assert step(16) == 16
