"""Sources that break in every place, beside one that is well: the text stays the plain one.

The engine is the one of users: failures are counted and not raised.
"""

from collections import Counter
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import VOCAB, assert_same, ids_of, params, prompts
from fakes import ReplaySource, SubmitAll, make_engine, run

from outrider.drafting.source import Draft, DraftSource
from outrider.policy.fixed import FixedLength
from outrider.policy.view import StepView
from outrider.results import RequestOutput

UNIFORM = torch.full((2, VOCAB), 1 / VOCAB)


class Faulty(ReplaySource):
    """Has KV, features and extensions, and breaks where a test says."""

    target_layer_ids = (0,)
    can_extend = True

    def extend(self, contexts: Any, chains: Any, budgets: Any) -> list[Draft]:
        return [Draft([1, 2][:budget]) for budget in budgets]

    def held_tokens(self, request_id: str) -> int | None:
        return None


def fail(*_: Any) -> Any:
    raise RuntimeError("no")


class Longer(SubmitAll):
    """Asks every source to go on from the first draft."""

    def extensions(self, source: DraftSource, view: StepView) -> list[tuple[int, Draft]]:
        return [(2, ask.drafts[0]) if ask.drafts else (0, Draft()) for ask in view.asks]


REQUESTS = prompts(2, params(max_tokens=7))
POLICIES = (SubmitAll, Longer, lambda: None)  # None: the planner


@pytest.fixture(scope="module")
def plain() -> dict[str, RequestOutput]:
    return run(make_engine(), REQUESTS)


def contained(source: Faulty, plain: Any, planner: Any) -> Counter[tuple[str, str]]:
    """The failures that were counted while this source drafted beside another one."""
    other = ReplaySource(source.outputs, lambda rest, _: Draft(rest[:2]), name="other")
    engine = make_engine([source, other], strict_sources=False, planner=planner)
    assert_same(run(engine, REQUESTS), plain)
    assert not any(name == "other" for name, _ in engine.speculation.guard.failures)
    return engine.speculation.guard.failures


METHODS = ("propose", "extend", "held_tokens", "observe", "finish", "release")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_raises_is_counted_and_changes_no_text(
    method: str, policy: Any, plain: Any
) -> None:
    source = Faulty(ids_of(plain))
    setattr(source, method, fail)
    failures = contained(source, plain, policy())
    assert failures["replay", method] > 0 or (method == "extend" and policy is not Longer)


GARBAGE: list[Any] = [
    *(None, 5, -1, "ab", b"ab", {}, {1: 2}, [None], ["a", "b"], [1.5, 2], [10**30, -1], [[1], [2]]),
    *([Decimal(1), Decimal(2)], [Fraction(1, 2), 0.5], [float("nan"), 1], [float("inf"), 1]),
    *([10**400, 1], [1.7e308, 1.7e308], object(), [object(), object()], range(2), (1, 2)),
    *(np.array([1, 2]), np.array(["a", "b"]), np.zeros((2, 2)), np.float32(3), torch.ones(2)),
    *(torch.ones(2, device="meta"), UNIFORM.to_sparse(), UNIFORM.clone().requires_grad_(), [True]),
]


@pytest.mark.parametrize("field", [field.name for field in fields(Draft)])
def test_garbage_in_a_draft_changes_no_text(field: str, plain: Any) -> None:
    for value in GARBAGE:
        for policy in (SubmitAll, lambda: None):

            def make(rest: list[int], _: Any, value: Any = value) -> Draft:
                draft = Draft(rest[:2], confidence=[0.9] * len(rest[:2]))
                setattr(draft, field, value)
                return draft

            failures = contained(Faulty(ids_of(plain), make), plain, policy())
            assert set(failures) <= {("replay", "propose")}


@pytest.mark.parametrize("method", ["propose", "observe", "held_tokens"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("max_draft_tokens", None), ("max_draft_tokens", -1), ("target_layer_ids", (1,)),
     ("target_layer_ids", None), ("kv_lag", "x"), ("name", "other"), ("name", None)],
)  # fmt: skip
def test_a_source_that_changes_what_it_says_of_itself(
    method: str, name: str, value: Any, plain: Any
) -> None:
    for policy in POLICIES:
        source = Faulty(ids_of(plain), lambda rest, _: Draft(rest[:1]))
        working = getattr(source, method)

        def change(*given: Any, working: Any = working, source: Any = source) -> Any:
            setattr(source, name, value)
            return working(*given)

        setattr(source, method, change)
        assert contained(source, plain, policy())


def test_a_source_may_draft_less_from_now_on(plain: Any) -> None:

    def make(rest: list[int], context: Any) -> Draft:
        source.max_draft_tokens = 1
        return Draft(rest[:1])

    source = ReplaySource(ids_of(plain), make)
    engine = make_engine([source], planner=FixedLength())
    assert_same(run(engine, REQUESTS), plain)
    assert max(len(outcome.draft) for outcome in source.outcomes[2:]) == 1
