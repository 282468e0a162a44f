"""Full KV, aborts, faulty sources and bad input: nothing is lost, nothing hangs, nobody is hurt."""

import pytest
import torch
from engine_cases import (
    GREEDY,
    SCRIPTS,
    SEEDED,
    VOCAB,
    assert_same,
    exact,
    half_right,
    ids_of,
    params,
    prompts,
    random_tree,
)
from fakes import ROOT, FakeTarget, ReplaySource, SubmitAll, make_engine, path_hash, run

from outrider.drafting.source import Draft, DraftSource
from outrider.errors import ConfigError, PromptError, SamplingError, SourceError
from outrider.sampling_params import SamplingParams
from outrider.terms import Terms

TINY_KV = {"kv_cache_tokens": 96, "max_num_batched_tokens": 24, "max_num_seqs": 6}


@pytest.mark.parametrize("make", SCRIPTS)
def test_preemption_with_pending_drafts_changes_nothing(make):  # X3
    plain = run(make_engine(), prompts(6, SEEDED))
    source = ReplaySource(ids_of(plain), make)
    found = run(make_engine([source], **TINY_KV), prompts(6, SEEDED))
    assert_same(found, plain)
    assert sum(result.metrics.num_preemptions for result in found.values()) > 0


def test_short_kv_takes_drafts_before_requests():
    """Both would outgrow the arena, but end before they do."""
    free = ids_of(run(make_engine(), prompts(2)))
    ends = {name: next(t for t in out[12:] if t not in out[:12]) for name, out in free.items()}
    wanted = {
        name: (prompt, params(stop_token_ids=[ends[name]]))
        for name, (prompt, _) in prompts(2).items()
    }
    plain = run(make_engine(), wanted)
    assert all(12 < len(output) < 28 for output in ids_of(plain).values())
    source = ReplaySource(free, lambda rest, context: Draft([*rest[:1], *[1] * 30]))
    found = run(make_engine([source], kv_cache_tokens=64), wanted)
    assert_same(found, plain)
    assert [result.metrics.num_preemptions for result in found.values()] == [0, 0]
    causes = found["r1"].metrics.speculative_decoding.rejection_causes
    assert causes["truncated_by_plan"] > 0


@pytest.mark.parametrize("steps", range(0, 12, 2))
@pytest.mark.parametrize("make", [None, half_right, random_tree])
def test_abort_at_any_time_frees_everything_and_hurts_nobody(steps, make):
    plain = run(make_engine(), prompts(5, SEEDED))
    source = ReplaySource(ids_of(plain), make)
    engine = make_engine([source] if make else [], **TINY_KV)
    for name, (prompt, sampling) in prompts(5, SEEDED).items():
        engine.add_request(name, prompt, sampling)
    chunks = [chunk for _ in range(steps) for chunk in engine.step()]
    held = {chunk.request_id for chunk in chunks if chunk.result}
    for name in ("r1", "r1", "r4", "unknown"):
        engine.abort(name)
    engine.check_integrity()
    chunks += engine.step()
    last = {chunk.request_id: chunk for chunk in chunks if chunk.result}
    for name in {"r1", "r4"} - held:
        assert last[name].finish_reason == "abort"
        output = last[name].result.outputs[0]
        assert output.token_ids == ids_of(plain)[name][: len(output.token_ids)]
    if make:
        assert "r1" in source.released
    while engine.has_work:
        chunks += engine.step()
        engine.check_integrity()
    for name in ("r0", "r2", "r3"):
        text = "".join(chunk.text for chunk in chunks if chunk.request_id == name)
        assert text == plain[name].outputs[0].text
    engine.abort("r0")
    assert engine.arena.num_free_pages == engine.arena.num_pages
    assert_same(run(engine, prompts(1, SEEDED)), {"r0": plain["r0"]})


def test_source_that_raises_is_named_and_loses_no_request():
    class Faulty(ReplaySource):
        broken = False

        def propose(self, contexts, budgets):
            if self.broken:
                raise KeyError("lost")
            return super().propose(contexts, budgets)

    plain = run(make_engine(), prompts(2))
    source = Faulty(ids_of(plain))
    engine = make_engine([source])
    for name, (prompt, sampling) in prompts(2).items():
        engine.add_request(name, prompt, sampling)
    before = engine.step()
    source.broken = True
    for _ in range(2):
        with pytest.raises(SourceError, match=r"'replay' raised in propose: KeyError"):
            engine.step()
    engine.abort("r1")
    source.broken = False
    rest = [chunk for chunk in before if chunk.request_id == "r0"]
    while engine.has_work:
        rest += [chunk for chunk in engine.step() if chunk.request_id == "r0"]
    assert "".join(chunk.text for chunk in rest) == plain["r0"].outputs[0].text


@pytest.mark.parametrize("method", ["observe", "finish", "release"])
def test_source_that_raises_in_feedback_loses_no_chunk(method):
    class Faulty(ReplaySource):
        pass

    def fail(self, *arguments):
        raise RuntimeError("no")

    setattr(Faulty, method, fail)
    plain = run(make_engine(), prompts(1))
    engine = make_engine([Faulty(ids_of(plain))])
    engine.add_request("r0", *prompts(1)["r0"])
    chunks = []
    for _ in range(100):
        try:
            chunks += engine.step()
        except SourceError as error:
            assert f"raised in {method}" in str(error)
        if not engine.has_work:
            break
    assert "".join(chunk.text for chunk in chunks) == plain["r0"].outputs[0].text
    assert engine.arena.num_free_pages == engine.arena.num_pages


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "0 drafts for 1 contexts"),
        ([Draft([1, 2], parents=[0, 1])], "malformed draft"),
        ([Draft([1, 2], confidence=[0.5])], "malformed draft"),
    ],
)
def test_source_that_breaks_its_contract_is_named(answer, message):
    class Faulty(DraftSource):
        name = "faulty"

        def propose(self, contexts, budgets):
            return answer

    engine = make_engine([Faulty()])
    engine.add_request("r", [1, 2], GREEDY)
    engine.step()
    with pytest.raises(SourceError, match=f"'faulty'.*{message}"):
        engine.step()


def test_longest_choice_of_several_sources_is_told_to_its_own_source_only():
    plain = run(make_engine(), prompts(2))
    first = ReplaySource(ids_of(plain), lambda rest, context: Draft(), name="same")
    second = ReplaySource(ids_of(plain), exact, name="same")
    engine = make_engine([first, second])
    assert_same(run(engine, prompts(2)), plain)
    assert first.outcomes == []
    assert len(second.outcomes) == 10
    assert list(engine.metrics.per_source) == ["same-2"]
    kept = [outcome.num_accepted_drafts for outcome in second.outcomes]
    assert [len(outcome.accepted_ids) for outcome in second.outcomes] == [k + 1 for k in kept]


def test_features_are_those_of_the_committed_tokens_in_order():
    class Tapped(ReplaySource):
        def propose(self, contexts, budgets):
            for context in contexts:
                seen = self.seen.setdefault(context.request_id, [])
                if context.features is not None:
                    seen += context.features.tolist()
                assert len(seen) == len(context.token_ids) - 1
            return super().propose(contexts, budgets)

        def release(self, request_id):
            super().release(request_id)
            self.history[request_id] = self.seen.pop(request_id, [])

    plain = run(make_engine(), prompts(4))
    sources = [Tapped(ids_of(plain), random_tree, name="a"), Tapped(ids_of(plain), name="b")]
    for source, layers in zip(sources, [(1,), (1, -1)], strict=True):
        source.seen, source.history, source.target_layer_ids = {}, {}, layers
    engine = make_engine(sources, **TINY_KV)
    assert_same(run(engine, prompts(4)), plain)
    assert engine.speculation.layer_ids == (-1, 1)
    for source in sources:
        for name, history in source.history.items():
            path, expected = ROOT, []
            for token in [*plain[name].prompt_token_ids, *ids_of(plain)[name]][: len(history)]:
                path = path_hash(path, token)
                expected.append(engine.target.feature(path, source.target_layer_ids))
            assert len(history) > 4
            assert history == expected


def test_features_that_wait_long_keep_only_their_own_rows_in_memory():
    source = ReplaySource({})
    source.target_layer_ids = (0, 1)
    engine = make_engine([source])
    engine.add_request("late", [1], GREEDY)
    [late] = engine._groups["late"].choices
    wide = len(engine.speculation.layer_ids) * 4
    steps = [torch.full((8, wide), float(step)) for step in range(300)]  # eight requests in each
    for step in steps:
        engine.speculation.keep_features([late], step[3:4], [1])
    del steps
    waiting = engine.speculation._features
    stores = [piece.rows.untyped_storage() for piece in waiting._pieces[source.name, "late"]]
    held = {store.data_ptr(): store.nbytes() for store in stores}
    assert sum(held.values()) < 4 * wide * (300 + 8 * 64)
    told = waiting.take(source.name, "late")
    assert told is not None and told[:, 0].tolist() == list(map(float, range(300)))
    assert waiting.take(source.name, "late") is None


@pytest.mark.parametrize(
    ("terms", "sampling", "is_kept"),
    [
        (Terms(), GREEDY, True),
        (Terms(sources=("drafts",)), GREEDY, True),
        (Terms(sources=()), GREEDY, False),
        (Terms(sources=("listens",)), GREEDY, False),
        (Terms(num_draft_tokens=0), GREEDY, False),
        (Terms(), params(max_tokens=1), False),
    ],
)
def test_features_are_kept_for_those_who_may_draft_or_only_listen(terms, sampling, is_kept):
    class Listener(ReplaySource):
        def finish(self, context):
            self.heard = context.features

    known = ids_of(run(make_engine(), {"r": ([1, 2, 3], sampling)}))
    listens, drafts = (Listener(known, lambda *_: Draft(), name=n) for n in ("listens", "drafts"))
    listens.max_draft_tokens = 0
    listens.target_layer_ids = drafts.target_layer_ids = (1,)
    engine = make_engine([listens, drafts])
    engine.add_request("r", [1, 2, 3], sampling, terms=terms)
    kept = set()
    while engine.has_work:
        engine.step()
        kept |= {name for name, _ in engine.speculation._features._pieces}
    length = 2 + sampling.max_tokens
    assert len(listens.heard) == length
    assert ("drafts" in kept) is is_kept and (drafts.heard is not None) is is_kept


def test_a_name_of_a_request_under_way_is_refused():
    engine = make_engine()
    engine.add_request("a", [1, 2], params(n=2))
    for taken in ("a", "a#0", "a#1"):
        with pytest.raises(ConfigError, match=f"'{taken}' is in use"):
            engine.add_request(taken, [1, 2], GREEDY)
    engine.add_request("b#1", [1, 2], GREEDY)
    with pytest.raises(ConfigError, match="'b' is in use"):
        engine.add_request("b", [1, 2], params(n=2))
    for free in ("b", "a#2", "a#01"):
        engine.add_request(free, [1, 2], GREEDY)
    engine.add_request("a#2#0", [1, 2], params(n=2))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert run(engine, {"a#0": ([1, 2], GREEDY), "b": ([1, 2], params(n=2))})


def test_two_engines_take_turns_on_one_target():
    target = FakeTarget(VOCAB)
    plain_engine = make_engine(target=target)
    plain = run(make_engine(), prompts(3))
    engine = make_engine([ReplaySource(ids_of(plain))], target=target, kv_cache_tokens=512)
    for name, (prompt, sampling) in prompts(3).items():
        engine.add_request(name, prompt, sampling)
        plain_engine.add_request(name, prompt, sampling)
    results = 0
    while engine.has_work or plain_engine.has_work:
        for each in (engine, plain_engine):
            for chunk in each.step():
                if chunk.result is not None:
                    results += 1
                    assert_same(
                        {chunk.request_id: chunk.result},
                        {chunk.request_id: plain[chunk.request_id]},
                    )
            each.check_integrity()
    assert results == 6


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, VOCAB], f"token id {VOCAB} is outside"),
        ([-1], "token id -1 is outside"),
        (list(range(1, 30)) * 10, "290 tokens; context and KV cache hold 256"),
        ([1.5], "list of integers"),
        ([[1]], "list of integers"),
    ],
)
def test_prompt_that_cannot_be_decoded_is_refused(prompt, message):
    engine = make_engine()
    with pytest.raises(PromptError, match=message):
        engine.add_request("r", prompt, GREEDY)
    assert not engine.has_work


def test_prompt_beyond_the_kv_cache_is_refused_at_submission():
    engine = make_engine(kv_cache_tokens=32)
    with pytest.raises(PromptError, match="hold 32"):
        engine.add_request("r", [1] * 32, GREEDY)
    assert len(ids_of(run(engine, {"r": ([1] * 31, GREEDY)}))["r"]) == 1


def test_parameters_that_do_not_fit_the_target_are_refused():
    with pytest.raises(SamplingError, match=str(VOCAB)):
        make_engine().add_request("r", [1], params(logit_bias={VOCAB: 1.0}))
    with pytest.raises(SamplingError, match="tokenizer"):
        make_engine(tokenizer=None).add_request("r", [1], params(stop=["x"]))


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"kv_cache_tokens": -1},
        {"max_num_seqs": 8, "max_num_batched_tokens": 4},
    ],
)
def test_impossible_sizes_are_refused(options):
    with pytest.raises(ConfigError, match=r"max_num|kv_cache"):
        make_engine(**options)


def test_without_a_tokenizer_there_are_ids_and_no_text():
    result = run(make_engine(tokenizer=None), prompts(1))["r0"]
    assert (len(result.outputs[0].token_ids), result.outputs[0].text) == (40, "")


def test_times_add_up():
    engine = make_engine([ReplaySource(ids_of(run(make_engine(), prompts(2))))])
    run(engine, prompts(2))
    times = engine.times
    assert times.steps == engine.target.num_forwards
    assert times.total == pytest.approx(times.overhead + times.forward + times.propose)
    assert min(times.schedule, times.plan, times.propose, times.forward, times.sample) > 0


def test_planner_may_be_replaced():
    class Nothing(SubmitAll):
        def budgets(self, source, view):
            return [0] * len(view.asks)

    plain = run(make_engine(), prompts(1))
    engine = make_engine([ReplaySource(ids_of(plain))], planner=Nothing())
    assert_same(run(engine, prompts(1)), plain)
    assert engine.metrics.num_draft_tokens == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_every_choice_is_told_its_end_once_whatever_fails_on_the_way(failing, monkeypatch):
    engine = make_engine()
    emit, faults = engine._emit, iter([MemoryError("no room")])

    def fail(request, *given):
        if request.index == failing and request.output.finish_reason and next(faults, None):
            raise MemoryError("no room")
        emit(request, *given)

    monkeypatch.setattr(engine, "_emit", fail)
    engine.add_request("r", [1, 2], SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    chunks = []
    with pytest.raises(MemoryError):
        while engine.has_work:
            chunks += engine.step()
    while engine.has_work:
        chunks += engine.step()
    ends = {chunk.index: chunk.finish_reason for chunk in chunks if chunk.finish_reason}
    assert len([chunk for chunk in chunks if chunk.finish_reason]) == 2
    assert ends[failing] == "abort" and ends[1 - failing] == ("length" if failing else "abort")
    [result] = [chunk.result for chunk in chunks if chunk.result is not None]
    assert [one.finish_reason for one in result.outputs] == [ends[0], ends[1]]
    assert not engine._groups and not engine._names
    engine.check_integrity()
