"""The suffix automaton against brute force, and lookup over requests and shared outputs."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.drafting.automaton import (
    NO_MATCH,
    Automaton,
    NativeAutomaton,
    PythonAutomaton,
    Step,
)
from outrider.drafting.confidence import USUAL
from outrider.drafting.lookup import LookupSource
from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome
from outrider.errors import ConfigError
from outrider.native import library
from outrider.sampling_params import SamplingParams

needs_native = pytest.mark.skipif(library() is None, reason="no C++ compiler")
KINDS = [PythonAutomaton, pytest.param(NativeAutomaton, marks=needs_native)]
texts = st.lists(st.integers(-1, 3), max_size=60)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def ends_of(text: list[int], part: list[int]) -> list[int]:
    """Positions of the last token of every occurrence."""
    n = len(part)
    return [i + n - 1 for i in range(len(text) - n + 1) if text[i : i + n] == part]


def longest_suffix_in(text: list[int], stream: list[int]) -> int:
    after_separator = 1 + max((i for i, t in enumerate(stream) if t < 0), default=-1)
    usable = stream[after_separator:]
    found = [n for n in range(1, len(usable) + 1) if ends_of(text, usable[-n:])]
    return max(found, default=0)


def next_step(text: list[int], context: list[int]) -> Step | None:
    """Most frequent token after the context, the latest on a tie; None where none follows."""
    following: dict[int, list[int]] = {}
    places = [end + 1 for end in ends_of(text, context) if end + 1 < len(text)]
    for place in places:
        if text[place] >= 0:
            following.setdefault(text[place], []).append(place)
    if not following:
        return None
    token = max(following, key=lambda t: (len(following[t]), following[t][-1]))
    return Step(token, len(following[token]), len(places))


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_the_longest_repeated_suffix_and_its_best_next_token(
    kind: type[Automaton], text: list[int]
) -> None:
    automaton = kind()
    automaton.extend(ids(text))
    repeated = [n for n in range(1, len(text)) if len(ends_of(text, text[-n:])) > 1]
    longest = max(repeated, default=0)
    assert automaton.repeated()[1] == longest
    steps = automaton.walk(automaton.repeated(), 1)
    expected = next_step(text, text[-longest:]) if longest else None
    if expected is not None:
        assert steps == [expected]


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, stream=st.lists(st.integers(-1, 3), max_size=20), cut=st.integers(0, 60))
@settings(max_examples=150, deadline=None)
def test_a_stream_is_matched_while_the_text_grows(
    kind: type[Automaton], text: list[int], stream: list[int], cut: int
) -> None:
    automaton = kind()
    automaton.extend(ids(text[:cut]))
    match = automaton.advance(NO_MATCH, ids(stream[:-1]))
    assert match[1] == longest_suffix_in(text[:cut], stream[:-1])
    automaton.extend(ids(text[cut:]))  # may split the state of the match
    match = automaton.advance(match, ids(stream[-1:]))
    exact = longest_suffix_in(text, stream)
    assert match[1] <= exact
    if cut >= len(text):
        assert match[1] == exact
    if match[1]:
        expected = next_step(text, stream[-match[1] :])
        steps = automaton.walk(match, 1)
        assert expected is None or steps == [expected]


@needs_native
@given(text=st.lists(st.integers(-1, 5), max_size=400), stream=texts)
@settings(max_examples=100, deadline=None)
def test_both_automata_agree(text: list[int], stream: list[int]) -> None:
    native, python = NativeAutomaton(), PythonAutomaton()
    for automaton in (native, python):
        automaton.extend(ids(text))
    assert native.repeated() == python.repeated()
    assert native.walk(native.repeated(), 20) == python.walk(python.repeated(), 20)
    match = native.advance(NO_MATCH, ids(stream))
    assert match == python.advance(NO_MATCH, ids(stream))
    assert native.walk(match, 20) == python.walk(match, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_repetition_that_runs_up_to_the_end_goes_on(kind: type[Automaton]) -> None:
    automaton = kind()
    automaton.extend(ids([9, 1, 2, 1, 2, 1, 2]))
    steps = automaton.walk(automaton.repeated(), 7)
    assert [step.token for step in steps] == [1, 2, 1, 2, 1, 2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_repeated_a_thousand_times(kind: type[Automaton]) -> None:
    automaton = kind()
    automaton.extend(ids([7] * 1000))
    assert automaton.repeated()[1] == 999
    assert [step.token for step in automaton.walk(automaton.repeated(), 4)] == [7] * 4


@needs_native
def test_many_distinct_continuations_of_one_token() -> None:
    automaton = NativeAutomaton()
    for follower in range(1, 3000):
        automaton.extend(ids([0, follower]))
    automaton.extend(ids([5, 0, 5]))
    match = automaton.advance(NO_MATCH, ids([0]))
    assert automaton.walk(match, 1) == [Step(5, 2, 3000)]
    assert automaton.advance(NO_MATCH, ids([2998, 0, 2999]))[1] == 3


# ---- LookupSource


def context(
    tokens: list[int], request_id: str = "r", num_prompt: int = 0, owner: str = ""
) -> DraftContext:
    return DraftContext(request_id, ids(tokens), num_prompt, SamplingParams(), owner=owner)


def propose(source: DraftSource, ctx: DraftContext, budget: int = 16) -> Draft:
    (draft,) = source.propose([ctx], [budget])
    draft.check()
    assert len(draft) <= budget
    return draft


@pytest.fixture(params=["python", pytest.param("native", marks=needs_native)])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the compiled library and without."""
    if request.param == "python":
        monkeypatch.setattr("outrider.drafting.seats.library", lambda: None)
        monkeypatch.setattr("outrider.drafting.automaton.library", lambda: None)
    return request.param


def test_lookup_continues_the_longest_repeated_suffix(path: str) -> None:
    source = LookupSource(num_speculative_tokens=4, min_survival=0)
    draft = propose(source, context([5, 1, 2, 3, 4, 6, 7, 2, 3, 9, 1, 2, 3]))
    assert draft.token_ids == [4, 6, 7, 2]
    assert draft.source == "lookup"
    expected = [USUAL[2, 0], USUAL[3, 0], USUAL[4, 0], USUAL[4, 0]]
    assert draft.confidence == pytest.approx(expected, abs=1e-6)


def test_lookup_takes_in_only_what_is_new(path: str) -> None:
    source = LookupSource(min_survival=0)
    text = [1, 2, 3, 4, 5, 9, 1]
    assert propose(source, context(text)).token_ids[:3] == [2, 3, 4]
    text += [2, 3]
    assert propose(source, context(text), budget=2).token_ids == [4, 5]
    assert source._seats.own[0].num_tokens == len(text)  # pyright: ignore
    assert propose(source, context([*text, 8])).token_ids == []  # 8 was never seen
    assert propose(source, context([*text, 8, 4]), budget=0).token_ids == []
    assert propose(source, context([*text, 8, 4, 5]), budget=1).token_ids == [9]


def test_lookup_honours_min_match_and_min_survival(path: str) -> None:
    text = [1, 2, 3, 4, 9, 2, 3]
    assert propose(LookupSource(min_match=3), context(text)).token_ids == []
    assert propose(LookupSource(min_match=2, min_survival=0), context(text)).token_ids[:2] == [4, 9]
    assert len(propose(LookupSource(min_survival=0.4), context(text))) == 1  # 0.46, then 0.26


def test_lookup_forgets_a_released_request_and_reuses_its_place(path: str) -> None:
    source = LookupSource()
    for i in range(40):  # more than the first seats
        propose(source, context([1, 2, 3, i, 1, 2], f"r{i}"))
    for i in range(40):
        source.release(f"r{i}")
        source.release(f"r{i}")
    assert propose(source, context([3, 4, 5, 4], "r3")).token_ids[:1] == [5]
    # an id given to another request without a release
    assert propose(source, context([7, 8, 7], "r3")).token_ids[:1] == [8]


def test_an_owner_never_sees_what_another_said(path: str) -> None:
    source = LookupSource(shared_tokens=1000, min_survival=0)
    source.finish(context([1, 2, 3, 4, 5], "a", num_prompt=1, owner="ann"))
    source.finish(context([8, 2, 3, 6, 7], "b", num_prompt=1, owner="bob"))
    said = {
        owner: propose(source, context([9, 2, 3], owner + "1", owner=owner)).token_ids
        for owner in ("ann", "bob", "", "cid")
    }
    assert said == {"ann": [4, 5], "bob": [6, 7], "": [], "cid": []}


def test_the_prompt_of_a_finished_request_is_not_shared(path: str) -> None:
    source = LookupSource(shared_tokens=1000)
    source.finish(context([1, 2, 3, 4, 5], "a", num_prompt=3))
    assert propose(source, context([9, 1], "b")).token_ids == []
    assert propose(source, context([9, 4], "c")).token_ids == [5]


def test_shared_outputs_arrive_while_a_request_runs(path: str) -> None:
    source = LookupSource(shared_tokens=1000, min_survival=0)
    assert propose(source, context([9, 1, 2], "b")).token_ids == []
    source.finish(context([1, 2, 3, 4], "a"))
    assert propose(source, context([9, 1, 2], "b")).token_ids == [3, 4]
    source.finish(context([1, 2, 3, 5], "c"))
    source.finish(context([1, 2, 3, 5], "d"))
    assert propose(source, context([9, 1, 2, 3], "b")).token_ids == [5]


def test_the_store_keeps_recent_outputs_in_bounded_memory(path: str) -> None:
    source = LookupSource(shared_tokens=100)
    store = source._store
    assert store is not None
    for i in range(50):
        source.finish(context([1000 + i, 2000 + i, 3000 + i], "a", owner=f"o{i % 3}"))
        assert store.num_tokens <= 100
        held = sum(text.num_tokens for o in ("o0", "o1", "o2") for text in store.texts(o))
        assert held == store.num_tokens
    assert propose(source, context([1049], "b", owner="o1")).token_ids == [2049, 3049]
    assert propose(source, context([1001], "c", owner="o1")).token_ids == []
    source.finish(context(list(range(500)), "d"))
    assert propose(source, context([490], "e")).token_ids[:2] == [491, 492]
    assert propose(source, context([100], "f")).token_ids == []


def outcome(draft: Draft, accepted: int, request_id: str = "r", bonus: bool = True) -> Outcome:
    return Outcome(request_id, draft, accepted, draft.token_ids[:accepted] + [0] * bonus)


def test_confidence_follows_what_was_accepted(path: str) -> None:
    text = [1, 2, 3, 9, 1]
    source = LookupSource(num_speculative_tokens=2, min_survival=0)
    first = propose(source, context(text))
    assert first.confidence == pytest.approx([USUAL[0, 0], USUAL[1, 0]], abs=1e-6)
    for _ in range(200):
        source.observe([outcome(propose(source, context(text)), accepted=2)])
    high = propose(source, context(text)).confidence
    assert min(high) > 0.9
    other = propose(source, context(text, "other")).confidence  # the table has learnt as well
    assert first.confidence[0] + 0.3 < other[0] < high[0] + 1e-6
    for _ in range(400):
        source.observe([outcome(propose(source, context(text)), accepted=0)])
    low = propose(source, context(text)).confidence
    assert low[0] < 0.35
    assert low[1] < high[1]  # the request fails more often, although its second place never did


def test_a_draft_cut_by_a_stop_is_not_a_rejection(path: str) -> None:
    source = LookupSource(min_survival=0)
    draft = propose(source, context([1, 2, 3, 9, 1]))
    source.observe([outcome(draft, accepted=1, bonus=False)])
    failures = source._calibration._failures[source._requests["r"].seat]
    assert failures == [4.0, 4.0]
    source.observe([outcome(Draft([7, 7]), accepted=0)])  # not ours: ignored
    source.observe([outcome(draft, accepted=0, request_id="unknown")])
    assert failures == [4.0, 4.0]


def test_confidence_is_honest_for_a_stream_that_agrees_half_of_the_time(path: str) -> None:
    rng = np.random.default_rng(3)
    source = LookupSource(num_speculative_tokens=1, min_survival=0)
    text: list[int] = [1, 2]
    expected = accepted = 0.0
    for step in range(1500):
        draft = propose(source, context(text))
        text.append(int(rng.integers(1, 3)))
        if len(draft) and step > 500:
            expected += draft.confidence[0]
            accepted += draft.token_ids[0] == text[-1]
        if len(draft):
            source.observe([outcome(draft, int(draft.token_ids[0] == text[-1]))])
    assert expected == pytest.approx(accepted, rel=0.1)


@needs_native
@given(
    streams=st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=60), min_size=2, max_size=4)
)
@example(streams=[[1, 0, 0, 0, 0], [0] * 4, [0] * 4, [1, 0, 0, 0, 0, 0, 0, 1]])  # 0.02 by rounding
@settings(max_examples=40, deadline=None)
def test_the_compiled_batch_equals_the_python_loop(streams: list[list[int]]) -> None:
    def run(compiled: bool) -> list[list[Draft]]:
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr("outrider.drafting.seats.library", lambda: None)
                patch.setattr("outrider.drafting.automaton.library", lambda: None)
            source = LookupSource(num_speculative_tokens=6, shared_tokens=200)
            source.finish(context(streams[0], "first"))
            drafts = []
            for cut in (2, 3, 7, 20, 60):
                batch = [context(s[:cut], f"r{i}") for i, s in enumerate(streams)]
                drafts.append(source.propose(batch, [6, 3, 9, 1][: len(batch)]))
                source.observe([outcome(d, len(d) // 2, f"r{i}") for i, d in enumerate(drafts[-1])])
                source.finish(context(streams[-1][:cut], "last"))
            return drafts

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert [d.token_ids for d in ours] == [d.token_ids for d in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a.confidence == pytest.approx(b.confidence, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1"),
        ({"min_match": 1.5}, "min_match must be an integer of at least 1, got 1.5"),
        ({"min_survival": 2}, r"min_survival must be in \[0, 1\], got 2"),
        ({"shared_tokens": -1}, "shared_tokens must be an integer of at least 0"),
    ],
)
def test_lookup_refuses_impossible_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LookupSource(**options)  # pyright: ignore
