"""Sources that fail, stall or lose their place: the text goes on, and they are tried again."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from engine_cases import GREEDY, SEEDED, VOCAB, assert_same, exact, ids_of, params, prompts
from fakes import ReplaySource, SubmitAll, make_engine, run
from neural_cases import toy_drafter

from outrider.drafting.neural import NeuralSource
from outrider.drafting.source import Draft
from outrider.engine import guard, speculation
from outrider.errors import SamplingError, SourceError
from outrider.policy.restrict import Allowed, LoadFacts, RequestFacts
from outrider.terms import Terms


class Faulty(ReplaySource):
    """Fails in a method when `fails` says so of what it is given."""

    method = "propose"
    fails: Callable[[Any], bool] = staticmethod(lambda given: True)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: list[list[str]] = []
        working = getattr(self, self.method)

        def call(*given: Any) -> Any:
            if self.method == "propose":
                self.calls.append([context.request_id for context in given[0]])
            if self.fails(given[0]):
                raise RuntimeError("no")
            return working(*given)

        setattr(self, self.method, call)


def lenient(sources: list[Any], **options: Any) -> Any:
    return make_engine(sources, strict_sources=False, **options)


@pytest.mark.parametrize("method", ["propose", "observe", "finish", "release"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_source_that_always_raises_costs_nothing_but_its_drafts(method, sampling, caplog) -> None:
    plain = run(make_engine(), prompts(3, sampling))

    class Broken(Faulty):
        pass

    Broken.method = method
    good = ReplaySource(ids_of(plain), lambda rest, _: Draft(rest[:2]), name="good")
    engine = lenient([Broken(ids_of(plain), name="bad"), good])
    with caplog.at_level(logging.WARNING, "outrider"):
        found = run(engine, prompts(3, sampling))
    assert_same(found, plain)
    failures = engine.speculation.guard.failures
    assert failures["bad", method] >= 1
    assert engine.speculation.guard.health["bad"] < 1.0
    assert (
        "'bad'" in caplog.text and len(caplog.records) <= 2 + failures["bad", method].bit_length()
    )
    if method == "propose":
        assert engine.metrics.per_source["good"].num_accepted_draft_tokens > 60
        assert "bad" not in engine.metrics.per_source


def test_answers_that_are_no_drafts_are_contained_too() -> None:
    plain = run(make_engine(), prompts(2))
    answers: list[Any] = [None, [], [Draft([1], parents=[0])] * 2, [Draft([1.5])] * 2]  # pyright: ignore
    for answer in answers:
        source = ReplaySource(ids_of(plain))
        source.propose = lambda contexts, budgets, answer=answer: answer
        engine = lenient([source])
        assert_same(run(engine, prompts(2)), plain)
        assert engine.speculation.guard.failures["replay", "propose"] >= 1


def test_one_request_that_a_source_cannot_bear_does_not_take_it_from_the_others() -> None:
    long = {name: (ids, params(max_tokens=200)) for name, (ids, _) in prompts(3).items()}
    plain = run(make_engine(), long)
    source = Faulty(ids_of(plain), lambda rest, _: Draft(rest[:1]))
    source.fails = lambda contexts: any(c.request_id == "r1" for c in contexts)
    engine = lenient([source])
    assert_same(run(engine, long), plain)
    assert source.calls[0] == ["r0", "r1", "r2"]
    after = source.calls[1:]
    assert ["r1"] in after and all(call == ["r1"] for call in after if "r1" in call)
    assert ["r0", "r2"] in after  # together again once each went well by itself
    alone = [i for i, call in enumerate(source.calls) if call == ["r1"]]
    assert len(alone) <= 4  # a pause is twice as long every time
    accepted = engine.metrics.per_source["replay"].num_accepted_draft_tokens
    assert accepted > 120


def test_a_source_that_recovers_is_used_again() -> None:
    long = {"r0": ([1, 2, 3], params(max_tokens=100))}
    plain = run(make_engine(), long)
    source = Faulty(ids_of(plain), lambda rest, _: Draft(rest[:1]))
    source.fails = lambda contexts: len(source.calls) <= 2
    engine = lenient([source])
    assert_same(run(engine, long), plain)
    assert engine.speculation.guard.failures["replay", "propose"] == 2
    assert engine.metrics.num_accepted_draft_tokens > 15
    assert len(source.released) == 3  # begun anew after each failure, and the end
    assert engine.speculation.guard.health["replay"] > 0.9


def test_a_source_that_stalls_is_left_out_for_a_while(monkeypatch) -> None:
    plain = run(make_engine(), prompts(1))
    now = [0.0]
    monkeypatch.setattr(speculation, "perf_counter", lambda: now[0])
    source = ReplaySource(ids_of(plain), exact)
    working = source.propose
    calls = []

    def slow(contexts: Any, budgets: Any) -> Any:
        calls.append(len(contexts))
        now[0] += 2 * guard.STALL_SECONDS
        return working(contexts, budgets)

    source.propose = slow
    engine = lenient([source], planner=SubmitAll())
    assert_same(run(engine, prompts(1)), plain)
    # the first call may warm up; the second one is a stall, and its drafts are used all the same
    assert calls == [1, 1, 1]
    assert engine.speculation.guard.failures == {("replay", "stall"): 2}


def test_a_neural_source_that_fails_is_out_for_the_request_and_back_for_the_next() -> None:
    plain = run(make_engine(), prompts(2))
    source = NeuralSource(toy_drafter("dspark", VOCAB))
    engine = lenient([source])
    working, left = source.propose, [1]

    def fail_once(contexts: Any, budgets: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("no")
        return working(contexts, budgets)

    source.propose = fail_once
    assert_same(run(engine, prompts(2)), plain)
    assert left[0] == 0  # it was not asked again: the features it had are gone
    assert not engine.speculation._features
    assert_same(run(engine, prompts(2)), plain)
    assert left[0] < -10
    assert engine.speculation.guard.failures == {("dspark", "propose"): 1}
    source.check_integrity()


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp of four modules", "medusa", "pard"])
def test_kv_that_is_not_that_of_the_text_is_found(kind: str) -> None:
    plain = run(make_engine(), prompts(1))
    source = NeuralSource(toy_drafter(kind, VOCAB))
    engine = lenient([source])
    assert_same(run(engine, prompts(1)), plain)
    assert "kv_mismatch" not in engine.metrics.rejection_causes
    held = source.held_tokens
    source.held_tokens = lambda request_id: held(request_id) - 1
    assert_same(run(engine, prompts(1)), plain)
    assert engine.metrics.rejection_causes["kv_mismatch"] >= 4
    assert engine.speculation.guard.failures[source.name, "kv_mismatch"] >= 1


def test_strict_engines_raise() -> None:
    source = Faulty({"r": []})
    engine = make_engine([source])
    engine.add_request("r", [1, 2], GREEDY)
    engine.step()
    with pytest.raises(SourceError, match="'replay' raised in propose: RuntimeError: no"):
        engine.step()


# ---- terms and rules


def test_terms_say_who_may_draft_and_how_much() -> None:
    plain = run(make_engine(), prompts(4))
    ids = ids_of(plain)
    sources = [ReplaySource(ids, name="a"), ReplaySource(ids, name="b")]
    engine = make_engine(sources)
    terms = {
        "r0": Terms(sources=()),
        "r1": Terms(sources=["b"]),
        "r2": Terms(num_draft_tokens=2),
        "r3": Terms(num_draft_tokens=0),
    }
    results = {}
    for name, (prompt, sampling) in prompts(4).items():
        engine.add_request(name, prompt, sampling, terms=terms[name])
    while engine.has_work:
        results |= {c.request_id: c.result for c in engine.step() if c.result is not None}
    assert_same(results, plain)
    used = {name: set(result.outputs[0].token_sources) for name, result in results.items()}
    assert used == {
        "r0": {"target"},
        "r1": {"b", "target"},
        "r2": {"a", "target"},
        "r3": {"target"},
    }
    histogram = results["r2"].metrics.speculative_decoding.acceptance_histogram
    assert set(histogram) <= {1, 2}


def test_unknown_sources_in_terms_are_refused() -> None:
    engine = make_engine([ReplaySource({}, name="a")])
    with pytest.raises(SamplingError, match="sources must be of a, got 'x'"):
        engine.add_request("r", [1], GREEDY, terms=Terms(sources=["x"]))
    assert not engine.has_work


class Written:
    """Rules that say what a function says."""

    def __init__(self, say: Callable[[RequestFacts, LoadFacts], Allowed]) -> None:
        self.say = say
        self.seen: list[tuple[RequestFacts, LoadFacts]] = []

    def restrict(self, request: RequestFacts, load: LoadFacts) -> Allowed:
        self.seen.append((request, load))
        return self.say(request, load)


def test_rules_narrow_what_terms_leave() -> None:
    plain = run(make_engine(), prompts(3))
    ids = ids_of(plain)
    engine = make_engine([ReplaySource(ids, name="a"), ReplaySource(ids, name="b")])
    rules = Written(
        lambda request, load: (
            Allowed(forbidden=frozenset("a"), num_draft_tokens=3)
            if request.tag == "x"
            else Allowed()
        )
    )
    engine.speculation.rules = rules
    terms = {"r0": Terms(tag="x", kind="code"), "r1": Terms(), "r2": Terms(tag="x", sources=["a"])}
    for name, (prompt, sampling) in prompts(3).items():
        engine.add_request(name, prompt, sampling, terms=terms[name])
    results = {}
    while engine.has_work:
        results |= {c.request_id: c.result for c in engine.step() if c.result is not None}
    assert_same(results, plain)
    used = {name: set(result.outputs[0].token_sources) for name, result in results.items()}
    assert used == {"r0": {"b", "target"}, "r1": {"a", "target"}, "r2": {"target"}}
    request, load = rules.seen[0]
    assert (request.context_len, request.num_output_tokens, request.kind) == (5, 1, "code")
    assert (load.batch_size, load.num_waiting) == (3, 0) and 0 < load.kv_usage < 1
    assert set(engine.metrics_by_kind) == {"", "code"}
    assert engine.metrics_by_kind["code"].num_output_tokens == 40
