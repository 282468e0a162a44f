"""Traces, and plans tried on them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import ids_of, prompts
from fakes import ReplaySource, make_engine, run

from outrider.drafting.source import Draft
from outrider.errors import DataError
from outrider.policy.cost import CostModel, Surface
from outrider.policy.fixed import FixedLength
from outrider.policy.oracle import Oracle
from outrider.policy.planner import Planner
from outrider.policy.simulate import by_id, gpu_like, simulate
from outrider.policy.traces import CallSeconds, Recorder, RequestTrace, Trace, read_trace, synthetic
from outrider.policy.view import Policy

pytestmark = pytest.mark.measured_costs


def test_a_recorded_trace_gives_plain_text_and_every_draft(tmp_path: Path) -> None:
    plain = run(make_engine(), prompts(3))
    ids = ids_of(plain)
    near = ReplaySource(
        ids, lambda rest, _: Draft(rest[:3], confidence=[0.9] * len(rest[:3])), name="near"
    )
    recorder = Recorder()
    found = run(make_engine([near], planner=recorder), prompts(3))
    assert ids_of(found) == ids
    trace = recorder.trace({name: len(prompt) for name, (prompt, _) in prompts(3).items()})
    assert [r.token_ids for r in trace.requests] == [out[1:-1] for out in ids.values()]
    assert trace.requests[0].drafts[0]["near"].token_ids == ids["r0"][1:4]
    path = tmp_path / "trace.jsonl"
    trace.write(path)
    again = read_trace(path)
    assert again.requests == trace.requests and again.calls == trace.calls
    result = simulate(
        again, lambda cost: FixedLength(3), 3, Surface((1, 64), (1.0, 1.0), (0.0, 0.0))
    )
    assert result.num_tokens == 3 * 38
    assert result.num_steps == pytest.approx(38 / 4, abs=1)  # three of its tokens and one more each


@pytest.mark.parametrize(
    "text", ["", "[]", '{"calls": 5}', '{"calls": {}}\n{"kind": 1}', '{"calls": {}}\nx']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"trace\.jsonl"):
        read_trace(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "none")


CPU = Surface(
    (1, 8, 16, 32, 64, 128), (4.6e-3, 5.5e-3, 7.6e-3, 12.7e-3, 24.6e-3, 47e-3), (7e-7,) * 6
)


def measured(surface: Surface, policy: Callable[[CostModel], Policy] = Planner):
    def make(cost: CostModel) -> Policy:
        cost.use(surface)
        return policy(cost)

    return make


def knowing(surface: Surface, trace: Trace):
    return measured(surface, lambda cost: Oracle(cost, by_id(trace), trace.calls))


def only(trace: Trace, *names: str) -> Trace:
    for request in trace.requests:
        request.drafts = [
            {n: d for n, d in place.items() if n in names} for place in request.drafts
        ]
    return trace


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "least"), [(1, 1.1), (4, 1.05), (16, 1.05)])
def test_the_planner_beats_every_fixed_length_of_every_source(batch: int, least: float) -> None:
    def rate(make, *names: str) -> float:
        trace = only(synthetic(6 * batch, 80), *names)
        return simulate(trace, make, batch, CPU).tokens_per_second

    best = max(
        rate(lambda cost, k=k: FixedLength(k), name)
        for name in ("copy", "guess")
        for k in (1, 2, 4, 8)
    )
    plain = rate(lambda cost: FixedLength(0))
    planner = rate(measured(CPU), "copy", "guess")
    assert planner >= least * best
    assert planner >= 1.02 * plain


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_where_nothing_can_be_foretold_the_planner_is_plain_decoding(batch: int) -> None:
    trace = synthetic(9 * batch, 100)
    trace.requests = [request for request in trace.requests if request.kind == "random"]
    plain = simulate(trace, lambda cost: FixedLength(0), batch, CPU)
    planner = simulate(trace, measured(CPU), batch, CPU)
    assert planner.tokens_per_second >= 0.97 * plain.tokens_per_second


@pytest.mark.slow
def test_a_large_batch_on_a_device_where_rows_are_cheap() -> None:
    trace = only(synthetic(768, 24), "copy")
    plain = simulate(trace, lambda cost: FixedLength(0), 256, gpu_like(), 2048)
    planner = simulate(trace, measured(gpu_like()), 256, gpu_like(), 2048)
    assert planner.tokens_per_second >= 1.05 * plain.tokens_per_second
    assert planner.num_draft_rows > 1000


@pytest.mark.slow
def test_an_oracle_submits_what_is_right_and_asks_only_where_that_pays() -> None:
    flat = Surface((1, 64), (1.0, 1.0), (0.0, 0.0))
    text = list(range(20, 41))
    request = RequestTrace("", 5, text)
    for place in range(len(text)):
        rest = text[place:]
        wrong = Draft([*rest[:2], 7, 7], confidence=[0.9] * 4, source="free")
        deep = Draft([rest[0], 7, *rest[1:6]], [-1, 0, 0, 2, 3, 4, 5][: len(rest[:6]) + 1])
        request.drafts.append({"free": wrong, "deep": replace(deep, source="deep")})

    def steps(seconds: float) -> tuple[int, int]:
        trace = Trace([request], {"deep": CallSeconds(per_request=seconds)})
        result = simulate(trace, knowing(flat, trace), 1, flat)
        assert result.num_tokens == len(text)
        return result.num_steps, result.num_draft_rows

    assert steps(0.1) == (3, 18)  # seven tokens a step: six of the tree and one of the target
    assert steps(5.0) == (7, 14)  # four tokens more are not worth five steps of three


@pytest.mark.slow
def test_no_plan_beats_the_oracle() -> None:
    trace = synthetic(24, 60)

    def rate(policy: Callable[[CostModel], Policy]) -> float:
        return simulate(trace, policy, 4, CPU).tokens_per_second

    assert rate(knowing(CPU, trace)) > 1.1 * rate(measured(CPU)) > rate(lambda cost: FixedLength(4))


def test_text_that_is_new_to_a_source_takes_time() -> None:
    trace = Trace(
        [RequestTrace("", 100, [1, 2, 3, 4], [{"guess": Draft([9], source="guess")}] * 4)],
        {"guess": CallSeconds(1.0, 0.5, 0.25)},
    )
    flat = Surface((1, 64), (2.0, 2.0), (0.0, 0.0))
    found = simulate(trace, lambda cost: FixedLength(1), 1, flat)
    # Three of four steps have room for a draft; a hundred tokens are new at first, then one each.
    assert found.seconds == 4 * 2.0 + 3 * 1.5 + 0.25 * (100 + 1 + 1)
