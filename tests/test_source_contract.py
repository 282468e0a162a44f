"""What a source may answer, and how one that breaks the contract is named and contained."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import GREEDY, VOCAB, assert_same, ids_of, prompts
from fakes import ALPHABET, FakeTarget, ReplaySource, make_engine, run

from outrider import LLM
from outrider.drafting.scripted import ScriptedSource
from outrider.drafting.source import Draft, DraftSource
from outrider.engine.answers import check_answer
from outrider.engine.verification import make_verifier
from outrider.errors import ConfigError, SourceError, TokenizerMismatch

UNIFORM = torch.full((2, VOCAB), 1 / VOCAB)


class Answering(DraftSource):
    """Answers every call with what a function makes."""

    name = "faulty"

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def propose(self, contexts: Any, budgets: Any) -> Any:
        return self.answer()


def made(*fields: Any, **named: Any) -> list[Draft]:
    return [Draft(*fields, **named)]


def fails(answer: Callable[[], Any], rule: str = "invariant") -> str:
    engine = make_engine([Answering(answer)], planner=None, verifier=make_verifier(rule, ()))
    engine.add_request("r", [1, 2], GREEDY)
    engine.step()
    with pytest.raises(SourceError) as error:
        engine.step()
    message = str(error.value)
    assert message.startswith("draft source 'faulty' ") and "\n" not in message
    engine.abort("r")
    engine.check_integrity()
    return message


@pytest.mark.parametrize(
    "answer", [None, 5, "ab", {}, [None], [[1, 2]], [5], [Draft], [Draft(), Draft()], []]
)
def test_what_is_no_list_of_drafts(answer: Any) -> None:
    fails(lambda: answer)
    fails(lambda: (draft for draft in [Draft([1])]))


@pytest.mark.parametrize("ids", [["a"], [None], [1.5], [1, 1.5], [[1]], 5, None, "ab", {1: 2}])
def test_ids_that_are_no_integers(ids: Any) -> None:
    assert "token_ids" in fails(lambda: made(ids))
    assert "token_ids" in fails(lambda: made(np.array([1.5])))


@pytest.mark.parametrize("parents", [[0, 1], [-1], [-2, 0], [-1, 0.5], [-1, None], ["a", "b"], 5])
def test_parents_that_make_no_tree(parents: Any) -> None:
    assert "parents" in fails(lambda: made([1, 2], parents))


@pytest.mark.parametrize(
    "values",
    [[0.5], [-0.5, 0.5], [float("nan"), 0.5], [0.5, float("inf")], ["a", 0.5], [None, 0.5], 5],
)
def test_confidence_that_is_no_probability(values: Any) -> None:
    assert "confidence" in fails(lambda: made([1, 2], confidence=values))


@pytest.mark.parametrize("probs", [[0.5, 0.5], UNIFORM[:1], UNIFORM[:, 1:], UNIFORM[0], 5])
def test_probabilities_of_another_shape(probs: Any) -> None:
    assert "probs" in fails(lambda: made([1, 2], probs=probs))


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("change", [lambda p: p * float("nan"), lambda p: p * 2, lambda p: p - 1])
def test_probabilities_that_would_corrupt_the_output(rule: str, change: Any) -> None:
    assert "sum to 1" in fails(lambda: made([1, 2], probs=change(UNIFORM)), rule)
    engine = make_engine([Answering(lambda: made([1, 2], probs=UNIFORM))], planner=None)
    engine.add_request("r", [1, 2], GREEDY)
    while engine.has_work:
        engine.step()


def test_arrays_and_tensors_are_taken_as_lists() -> None:
    plain = run(make_engine(), prompts(2))

    def as_arrays(rest: list[int], context: Any) -> Draft:
        ids: Any = np.array(rest[:3], np.int64)
        return Draft(ids, torch.arange(len(ids)).sub(1), None, np.full(len(ids), 0.5))  # pyright: ignore

    source = ReplaySource(ids_of(plain), as_arrays)
    assert_same(run(make_engine([source]), prompts(2)), plain)
    assert source.outcomes and all(type(o.draft.token_ids[0]) is int for o in source.outcomes)
    mixed: Any = [np.int32(3), 4]
    assert check_answer([Draft(mixed)], 1, "s", VOCAB, False)[0].token_ids == [3, 4]


def test_checking_plain_lists_costs_next_to_nothing() -> None:
    drafts = [Draft([3] * 8, confidence=[0.5] * 8) for _ in range(100)]
    seconds = []
    for _ in range(50):
        start = perf_counter()
        check_answer(drafts, 100, "s", VOCAB, False)
        seconds.append(perf_counter() - start)
    assert min(seconds) / 100 < 5e-6  # 0.6 µs on an idle machine


def test_a_source_cannot_write_into_the_text() -> None:
    class Vandal(DraftSource):
        name = "faulty"

        def propose(self, contexts: Any, budgets: Any) -> Any:
            contexts[0].token_ids[0] = 7

    source = Vandal()
    engine = make_engine([source])
    engine.add_request("r", [1, 2], GREEDY, prediction=[1, 2])
    engine.step()
    with pytest.raises(SourceError, match="read-only"):
        engine.step()
    request = engine.scheduler.running[0]
    assert request.tokens.view()[:2].tolist() == [1, 2]
    assert request.context.prediction is not None and not request.context.prediction.flags.writeable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_draft_tokens": "x"}, "max_draft_tokens of the draft source 'faulty'.*'x'"),
        ({"max_draft_tokens": None}, "max_draft_tokens.*None"),
        ({"target_layer_ids": (99,)}, r"target_layer_ids.*\[-1, 1\], got 99"),
        ({"target_layer_ids": 3}, "target_layer_ids.*got 3"),
        ({"name": 5}, "name of a draft source must be text"),
    ],
)
def test_a_source_that_says_nonsense_of_itself_is_refused(changes: Any, message: str) -> None:
    source = Answering(list)
    for name, value in changes.items():
        setattr(source, name, value)
    with pytest.raises(ConfigError, match=message):
        make_engine([source])


def test_a_class_or_a_stranger_is_no_source() -> None:
    for config in (Answering, [Answering], [{"method": "lookup"}, Answering]):
        with pytest.raises(ConfigError, match=r"must be an instance.*Answering\(\.\.\.\)"):
            make_llm(config)
    for stranger in (Answering, object(), 5):
        with pytest.raises(ConfigError, match="a draft source must be"):
            make_engine([stranger])  # pyright: ignore


def test_an_error_in_bind_is_named_and_a_refusal_stays_what_it_is() -> None:
    for error, expected in ((KeyError("x"), SourceError), (TokenizerMismatch("x"), None)):
        source = Answering(list)

        def refuse(*given: Any, error: Exception = error) -> None:
            raise error

        source.bind = refuse  # pyright: ignore
        with pytest.raises(expected or TokenizerMismatch):
            make_engine([source])


def make_llm(config: Any) -> LLM:
    return LLM(
        target=FakeTarget(VOCAB),
        tokenizer=ALPHABET,
        kv_cache_tokens=2048,
        speculative_config=config,
    )


@pytest.mark.parametrize("method", ["propose", "observe", "finish", "release"])
def test_an_llm_is_usable_after_its_source_failed(method: str) -> None:
    source = ScriptedSource(lambda context: Draft([1, 2]))
    for name, times in ((method, 5), ("release", 5)):
        working, left = getattr(source, name), [times]

        def fail(*given: Any, working: Any = working, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError("no")
            return working(*given)

        setattr(source, name, fail)
    llm = make_llm(source)
    texts = ["abc", "the", "xyz"]
    plain = make_llm(None).generate(texts, GREEDY)
    for _ in range(3):
        found = llm.generate(texts, GREEDY)
        assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in plain]
        engine = llm.engine
        engine.check_integrity()
        assert not engine.scheduler.has_work and not engine._groups and not llm._mailboxes
        assert engine.arena.num_free_pages == engine.arena.num_pages
    assert llm.engine.speculation.guard.failures["scripted", "release"] >= 5
    assert llm.metrics.num_draft_tokens > 0
