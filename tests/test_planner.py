"""The parts of a plan: what confidences are worth, what asking brings, what time costs."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_cases import GREEDY, ids_of, prompts
from fakes import FakeTarget, ReplaySource, make_engine, run
from toy_models import toy_model

from outrider import LLM, SamplingParams
from outrider.drafting.source import Draft, DraftSource
from outrider.errors import PromptTooLong
from outrider.native import library
from outrider.policy import measure
from outrider.policy.calibration import HALF_LIFE, Calibration, extended
from outrider.policy.cost import CostModel, Surface
from outrider.policy.gains import SETTLED, CallCost, SourceGain, bucket
from outrider.policy.planner import PROBES, Planner
from outrider.policy.restrict import Allowed
from outrider.policy.view import Ask, StepView, narrowed
from outrider.policy.weights import weight_of
from outrider.terms import Terms

pytestmark = pytest.mark.measured_costs

# ---- calibration


def learn(calibration: Calibration, rates: dict[float, float], count: int, kind: str = "") -> None:
    """Single-token drafts whose confidence c is right in a share rates[c] of the cases."""
    rng = random.Random(1)
    for _ in range(count):
        for said, rate in rates.items():
            draft = Draft([1], confidence=[said], source="s")
            calibration.observe(draft, kind, [1 if rng.random() < rate else 2])


def chance(calibration: Calibration, said: float, kind: str = "") -> float:
    return calibration.chances(Draft([1], confidence=[said], source="s"), kind)[0]


def test_confidences_become_what_was_observed() -> None:
    calibration = Calibration(clock=lambda: 0.0)
    assert chance(calibration, 0.9) == pytest.approx(0.9)
    learn(calibration, {0.9: 0.6, 0.3: 0.5}, 400)
    assert chance(calibration, 0.9) == pytest.approx(0.6, abs=0.06)
    assert chance(calibration, 0.3) == pytest.approx(0.5, abs=0.06)
    assert chance(calibration, 0.6) == pytest.approx(0.6 - 0.05, abs=0.1)  # between, like the mean


def test_a_kind_starts_from_all_kinds_and_then_differs() -> None:
    calibration = Calibration(clock=lambda: 0.0)
    learn(calibration, {0.8: 0.5}, 300)
    assert chance(calibration, 0.8, "chat") == pytest.approx(0.5, abs=0.07)
    learn(calibration, {0.8: 0.95}, 300, "code")
    assert chance(calibration, 0.8, "code") == pytest.approx(0.95, abs=0.05)
    assert chance(calibration, 0.8, "chat") < 0.6


def test_places_are_told_apart_and_only_what_is_known_is_judged() -> None:
    calibration = Calibration(clock=lambda: 0.0)
    for _ in range(200):
        draft = Draft([1, 2, 3, 4], confidence=[0.7] * 4, source="s")
        calibration.observe(draft, "", [1, 2, 9])
    first, second, third, _ = calibration.chances(
        Draft([1, 2, 3, 4], confidence=[0.7] * 4, source="s"), ""
    )
    assert first > 0.95 and second / first > 0.95 and third / second < 0.1
    rows = {row.first_position: row for row in calibration.observed()}
    assert rows[1].accepted_share == 1.0 and rows[3].accepted_share == 0.0
    assert rows[3].num_tokens == pytest.approx(200)  # the fourth token was never judged


def test_trees_are_judged_along_the_true_path_only() -> None:
    calibration = Calibration(clock=lambda: 0.0)
    tree = Draft([1, 2, 3, 4], parents=[-1, -1, 0, 1], confidence=[0.6, 0.3, 0.5, 0.5], source="s")
    for _ in range(100):
        calibration.observe(tree, "", [2, 4])
    chances = calibration.chances(tree, "")
    assert chances[0] < 0.1 and chances[1] > 0.9 and chances[3] > 0.85
    assert calibration.observed()[1].num_tokens == pytest.approx(100)  # 4, not 3


def test_what_another_source_adds_is_calibrated_by_itself() -> None:
    calibration = Calibration(clock=lambda: 0.0)
    mixed = Draft([1, 2, 3], confidence=[0.5, 0.9, 0.9], source="a", sources=["a", "b", "b"])
    for _ in range(100):
        calibration.observe(mixed, "", [1, 2, 9])
    assert {row.source for row in calibration.observed()} == {extended("b")}
    assert calibration.chances(Draft([2], confidence=[0.9], source="b"), "") == [0.9]
    for _ in range(50):
        calibration.observe(mixed, "", [7])  # the chain before it was wrong: no news of b
    assert sum(row.num_tokens for row in calibration.observed()) == pytest.approx(200)


def test_old_observations_count_less() -> None:
    now = [0.0]
    calibration = Calibration(lambda: now[0])
    learn(calibration, {0.8: 0.0}, 100)
    assert chance(calibration, 0.8) < 0.1
    now[0] += 6 * HALF_LIFE
    learn(calibration, {0.8: 1.0}, 20)
    assert chance(calibration, 0.8) > 0.75
    now[0] += 20 * HALF_LIFE
    assert calibration.observed() == []


# ---- what asking brings, and what it costs


def test_gains_are_told_apart_by_what_others_promise() -> None:
    gain = SourceGain()
    for _ in range(50):
        gain.observe("", "r", bucket(0.0), 2.0, 3)
        gain.observe("", "q", bucket(5.0), 0.0, 3)
    assert gain.expect("", "r", bucket(0.1))[0] == pytest.approx(2.0, abs=0.2)
    assert max(gain.expect("", "q", bucket(4.0))) < 0.1
    assert max(gain.expect("", "new", bucket(4.0))) < 0.15
    assert gain.expect("code", "r", bucket(0.1))[0] == gain.expect("", "r", bucket(0.1))[0]


def test_a_request_of_which_a_source_knows_nothing_is_expected_to_bring_less() -> None:
    gain = SourceGain()
    for i in range(60):
        gain.observe("", "good", 0, 2.0, 3)
        gain.observe("", f"other{i}", 0, 2.0, 3)
        gain.observe("", "bad", 0, 0.0, 3)
    (good, _), (bad, hope) = gain.expect("", "good", 0), gain.expect("", "bad", 0)
    assert good > 1.3 and bad < 0.6
    assert hope < bad + 0.25
    likely, hope = gain.expect("", "unknown", 0)
    assert bad < likely < good < hope  # it may turn out to be better still
    gain.forget("bad")
    assert gain.expect("", "bad", 0) == gain.expect("", "unknown", 0)


def test_costs_of_calls_are_a_line_and_texts_to_take_in_are_apart() -> None:
    cost, rng = CallCost(), random.Random(1)
    cost.observe(1, 5.0)  # the first call warms up
    for i in range(40):
        n = rng.randrange(1, 9)
        new = 400 if i % 5 == 0 else 3 * n
        cost.observe(n, 0.001 + 0.0002 * n + 2e-5 * new, new)
    assert cost.base == pytest.approx(0.001, rel=0.15)
    assert cost.per_request == pytest.approx(0.0002, rel=0.2)
    assert cost.per_token == pytest.approx(2e-5, rel=0.05)
    assert cost.seconds(4) == pytest.approx(0.001 + 4 * 0.00026, rel=0.05)
    cost.observe(4, 3.0, 12)  # something else held it up
    cost.observe(4, 0.00204, 12)
    assert cost.seconds(4) < 0.004


def test_a_call_that_something_held_up_makes_no_source_dear() -> None:
    cost = CallCost()
    for seconds in (0.002, 5.0, 0.001, 0.001):  # the probes of a new source
        cost.observe(1, seconds)
    assert cost.seconds(1) < 0.0013
    for _ in range(30):
        cost.observe(1, 0.003)  # it has really become slower
    assert cost.seconds(1) > 0.002


def test_a_source_that_always_takes_in_prompts_is_not_taken_for_slow() -> None:
    cost = CallCost()
    for new in (10, 300, 150, 400, 250):
        cost.observe(1, 0.001 + 2e-5 * new, new)
    assert cost.seconds(1) < 0.0016
    assert cost.per_token == pytest.approx(2e-5, rel=0.1)


def test_an_unknown_source_is_tried_with_few_requests() -> None:
    planner, source = Planner(CostModel(64, Surface((1,), (0.01,), (0.0,)))), DraftSource()
    asked = []
    for _ in range(8):
        view = StepView([Ask(f"r{i}", 20) for i in range(16)], 16, 40)
        asked.append(sum(budget > 0 for budget in planner.budgets(source, view)))
        planner.observe_call(source.name, asked[-1], 1e-5)
        for ask, draft in zip(view.asks, planner.choose(view), strict=True):
            planner.observe(ask, draft, [1])
    assert asked == [*PROBES, *[16] * 4]


def test_that_a_source_is_of_no_use_is_worked_out_once_in_a_while(monkeypatch) -> None:
    """Until somebody else drafts, another request comes, or some steps have gone by."""
    planner, source = Planner(CostModel(64, Surface((1,), (0.01,), (0.0,)))), DraftSource()
    num_looks: list[int] = []
    paying = planner._paying
    monkeypatch.setattr(planner, "_paying", lambda *given: num_looks.append(1) or paying(*given))

    def looks(names: str, drafts: list[Draft]) -> int:
        """How often it was worked out in one step, in which nobody is asked."""
        before = len(num_looks)
        asks = [Ask(name, 20, drafts=list(drafts)) for name in names]
        assert not any(planner.budgets(source, StepView(asks, len(names), 40)))
        return len(num_looks) - before

    for _ in PROBES:  # each call takes a second, a step 10 ms
        assert any(planner.budgets(source, StepView([Ask("a", 20), Ask("b", 20)], 2, 40)))
        planner.observe_call(source.name, 2, 1.0)
    planner._credit = 0.0
    assert [looks("ab", []) for _ in range(SETTLED + 2)] == [1, *[0] * (SETTLED - 1), 1, 0]
    assert looks("ab", [Draft([1], confidence=[0.5], source="other")]) == 1
    assert [looks("abc", []), looks("abc", [])] == [1, 0]


# ---- weights and terms


def test_priorities_and_deadlines_weigh() -> None:
    assert weight_of(Terms(), 5.0, 10, 10) == 1.0
    assert weight_of(Terms(priority=-1), 1.0, 5, 5) > 1.4 > weight_of(Terms(priority=1), 1.0, 5, 5)
    late = Terms(deadline=10.0)
    assert weight_of(late, 5.0, 50, 50) == 1.0  # just in time
    assert weight_of(late, 5.0, 50, 100) == pytest.approx(2.0)  # half as fast as it has to be
    assert weight_of(late, 5.0, 50, 1000) == 1.0  # nothing helps
    assert weight_of(late, 11.0, 50, 10) == 1.0  # over
    assert weight_of(late, 5.0, 0, 100) == 1.0


def test_rows_go_to_the_request_that_weighs_more() -> None:
    surface = Surface((1, 64), (0.01, 0.04), (0.0, 0.0))
    planner = Planner(CostModel(64, surface))
    draft = [Draft([1, 2, 3, 4], confidence=[0.5] * 4, source=name) for name in "ab"]
    asks = [Ask("a", 20, drafts=[draft[0]], weight=3.0), Ask("b", 20, drafts=[draft[1]])]
    chosen = planner.choose(StepView(asks, 2, 5))
    assert len(chosen[0]) > len(chosen[1])


def test_drafts_are_no_cheaper_beside_a_prompt() -> None:
    """Its rows are due in any case: a draft saves later steps of decoding, and none of them."""
    surface = Surface((1, 512), (0.01, 0.09), (0.0, 0.0))  # a row is 1.5 % of a step
    draft = Draft(list(range(16)), confidence=[0.8] * 16, source="a")
    lengths = []
    for prompt_rows in (0, 60, 400):
        planner = Planner(CostModel(512, surface))
        asks = [Ask(f"r{i}", 20, drafts=[draft] if i == 0 else []) for i in range(8)]
        chosen = planner.choose(StepView(asks, 8 + prompt_rows, 90))
        lengths.append(len(chosen[0]))
    assert 2 <= lengths[0] < 16 and lengths == [lengths[0]] * 3


def test_terms_and_rules_narrow_each_other() -> None:
    both = narrowed(Allowed(None, 4, frozenset("x")), Terms(sources=["x", "y"], num_draft_tokens=9))
    assert both.sources == ("y",) and both.num_draft_tokens == 4
    assert narrowed(Allowed(("y",), 4), Terms()) == Allowed(("y",), 4)
    assert not narrowed(Allowed(), Terms(sources=())).allows("y")


# ---- the cost of rows


def test_a_surface_gives_seconds_by_rows_and_context_and_steps_correct_it() -> None:
    surface = Surface((1, 8, 32), (0.004, 0.006, 0.018), (1e-6, 1e-6, 2e-6))
    cost = CostModel(64, surface)
    assert cost.seconds(8, 8, 1024) == [pytest.approx(0.006 + 1024e-6)]
    assert cost.seconds(8, 8, 1000) == cost.seconds(8, 8, 1024)  # drawn for many contexts at once
    assert cost.curve()[20] == pytest.approx(0.012)
    assert cost.curve()[64] == pytest.approx(0.018 + 32 * 0.0005)  # goes on as it was
    assert len(cost.seconds(60, 80)) == 5
    for _ in range(30):
        cost.observe(8, 0.014, 1000)  # twice as slow as measured
    assert cost.seconds(8, 8, 1000) == [pytest.approx(0.014, rel=0.01)]
    assert cost.seconds(1, 1, 0) == [pytest.approx(0.008)]
    assert (np.diff(cost.curve(500)) >= 0).all()


def test_one_odd_step_bends_no_curve() -> None:
    cost = CostModel(64, Surface((1, 64), (0.004, 0.02), (0.0, 0.0)))
    usual = cost.curve()
    for rows in (8, 9, 10, 11, 13, 14):
        for _ in range(20):
            cost.observe(rows, usual[rows])
    cost.observe(12, 3 * usual[12])
    for _ in range(20):
        cost.observe(10, usual[10])
    assert cost.curve()[12] < 1.25 * usual[12]
    assert cost.curve()[20] < 1.25 * usual[20]


class Timed(FakeTarget):
    """Takes what a formula says, on a clock of its own."""

    now = 0.0
    count = 0

    def forward(self, batch):
        self.count += 1
        self.now += 0.004 + 0.0005 * batch.num_rows + 1e-6 * int(batch.context_lens.sum())
        assert (np.diff(batch.row_starts) <= measure.ROWS_PER_REQUEST).all()
        for table, context in zip(batch.page_tables, batch.context_lens, strict=True):
            assert len(table) * 16 >= context + 4 and table.max() < 40
        return SimpleNamespace(logits=torch.zeros(batch.num_rows, 3))


def test_costs_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    target = Timed(40)
    monkeypatch.setattr(measure, "perf_counter", lambda: target.now)
    surface = measure.surface_of(target, 40, 64)
    assert surface.rows == (1, 2, 4, 8, 16, 32, 64)
    assert surface.base == pytest.approx([0.004 + 0.0005 * n for n in surface.rows])
    assert surface.per_token == pytest.approx([1e-6] * 7)
    count = target.count
    assert measure.surface_of(target, 40, 64) == surface and target.count == count
    assert measure.surface_of(target, 40, 32).rows[-1] == 32 and target.count > count
    (path, _) = sorted((tmp_path / "costs").glob("*.json"))
    kept = json.loads(path.read_text())
    assert kept["of"]["target"][0] == "fake" and kept["made"]
    count = target.count
    for broken in ("", "{}", '{"rows": [1], "base": [0], "per_token": [0]}'):
        for file in (tmp_path / "costs").glob("*.json"):
            file.write_text(broken)
        measure.surface_of(target, 40, 64)
        assert target.count > count
        count = target.count


class Short(FakeTarget):
    """Asserts that no row lies beyond the longest text or the pages."""

    num_pages = 0

    def forward(self, batch):
        assert batch.positions.min() >= 0 and batch.positions.max() < self.max_model_len
        sizes = np.diff(batch.row_starts)
        for table, context, rows in zip(batch.page_tables, batch.context_lens, sizes, strict=True):
            assert context >= 0 and len(table) * 16 >= context + rows
            assert table.min() >= 0 and table.max() < self.num_pages
        return SimpleNamespace(logits=torch.zeros(batch.num_rows, 3))


@pytest.mark.parametrize("num_pages", [1, 2, 7])
def test_short_texts_are_measured_within_their_length(num_pages: int) -> None:
    for length in range(1, 21):
        target = Short(40, max_model_len=length)
        target.num_pages = num_pages
        surface, _ = measure.measure(target, num_pages, 128)
        assert min(surface.base) > 0
        if length <= measure.ROWS_PER_REQUEST:
            assert set(surface.per_token) == {0.0}


def test_what_short_texts_take_is_kept_apart(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "_agree", lambda rounds: len(rounds) > 1)
    for length in (3, 9, 9, 2000, 3000):
        target = Short(40, max_model_len=length)
        target.num_pages = 200
        measure.surface_of(target, 200, 8)
    assert len(list((tmp_path / "costs").glob("*.json"))) == 3


@pytest.mark.skipif(library() is None, reason="no compiler, no compiled kernels")
@pytest.mark.parametrize("kv_cache_tokens", [1, 40])
def test_the_shortest_texts_are_decoded(
    kv_cache_tokens: int, tmp_path: Path, monkeypatch: Any
) -> None:
    model = toy_model("llama", head_dim=16, num_hidden_layers=1)
    for length in range(1, 21):
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / str(length)))
        options = {"max_model_len": length, "kv_cache_tokens": kv_cache_tokens}
        llm = LLM(cast(Any, model), max_num_seqs=2, max_num_batched_tokens=4, **options)
        assert type(llm.target).__name__ == "NativeTarget"
        prompt, params = {"prompt_token_ids": [5]}, SamplingParams(ignore_eos=True, max_tokens=9)
        if length == 1:
            with pytest.raises(PromptTooLong):
                llm.generate(prompt, params)
        else:
            [result] = llm.generate(prompt, params)
            assert len(result.outputs[0].token_ids) == min(length - 1, 9)


def test_a_kind_of_request_has_rates_of_its_own_in_the_engine() -> None:
    plain = run(make_engine(), prompts(1))
    source = ReplaySource(ids_of(plain), lambda rest, _: Draft(rest[:4]))
    planner = Planner(CostModel(512))
    engine = make_engine([source], planner=planner)
    prompt, _ = prompts(1)["r0"]
    engine.add_request("r0", prompt, GREEDY, terms=Terms(kind="code"))
    while engine.has_work:
        engine.step()
    assert {row.kind for row in planner.calibration.observed()} == {"", "code"}
    assert all(row.accepted_share == 1.0 for row in planner.calibration.observed())
