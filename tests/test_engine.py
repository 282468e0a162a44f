"""Whatever is drafted, the output is that of plain decoding; and what users reported elsewhere.

The fake target notices any mistake in KV, positions or ancestors; the comparison with plain
decoding notices any other.
"""

import random

import pytest
from fakes import ALPHABET, FakeTarget, ReplaySource, SubmitAll, drain, make_engine, run

from outrider.drafting.source import Draft, DraftSource
from outrider.errors import ConfigError, PromptError, SamplingError, SourceError
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


@pytest.mark.parametrize("make", SCRIPTS)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("count", [1, 8])
def test_drafts_never_change_the_output(make, sampling, count):
    plain = run(make_engine(), prompts(count, sampling))
    source = ReplaySource(ids_of(plain), make)
    engine = make_engine([source])
    assert_same(run(engine, prompts(count, sampling)), plain)
    assert engine.metrics.num_output_tokens == 40 * count
    assert engine.metrics.num_draft_tokens > 0
    assert set(source.released) == set(source.finished) == set(prompts(count))


def test_accepted_drafts_save_forwards_and_are_counted():
    plain = run(make_engine(), prompts(1))
    engine = make_engine([ReplaySource(ids_of(plain), exact)])
    result = run(engine, prompts(1))["r0"]
    found = result.metrics.speculative_decoding
    # 1 token with the prompt, then 4 blocks of 8 drafts and a bonus token, then 2 + 1
    assert engine.target.num_forwards == 6
    assert (found.num_target_steps, found.num_spec_steps) == (6, 5)
    assert (found.num_draft_tokens, found.num_accepted_draft_tokens) == (34, 34)
    assert found.acceptance_histogram == {8: 4, 2: 1}
    assert found.per_source["replay"].accepted_per_position == [5, 5, 4, 4, 4, 4, 4, 4]
    assert found.mean_acceptance_length == 1 + 34 / 5
    assert result.outputs[0].token_sources.count("replay") == 34
    assert result.outputs[0].token_sources[0] == "target"


def test_plain_decoding_has_no_speculative_metrics():
    result = run(make_engine(), prompts(1))["r0"]
    assert result.metrics.speculative_decoding is None
    assert set(result.outputs[0].token_sources) == {"target"}


def test_tree_branches_count_by_depth_and_move_into_place():
    plain = run(make_engine(), prompts(1))
    engine = make_engine([ReplaySource(ids_of(plain), tree_with_branch_last)])
    result = run(engine, prompts(1))["r0"]
    found = result.metrics.speculative_decoding.per_source["replay"]
    steps = found.draft_tokens_per_position[0] // 2
    assert found.accepted_per_position[0] == steps
    assert engine.metrics.rejection_causes == {"target_disagrees": 39, "length": 2}
    assert engine.metrics.num_rejected_draft_tokens == 39


def test_ids_outside_the_vocabulary_are_rejected_and_never_seen_by_the_target():
    plain = run(make_engine(), prompts(1))
    source = ReplaySource(ids_of(plain), right_with_junk)
    engine = make_engine([source])
    assert_same(run(engine, prompts(1)), plain)
    found = engine.metrics
    assert found.rejection_causes["out_of_vocabulary"] > 0
    assert found.num_rejected_draft_tokens == found.rejection_causes["out_of_vocabulary"]
    assert all(len(outcome.draft) <= 2 for outcome in source.outcomes)


def test_only_junk_drafted_is_plain_decoding():
    plain = run(make_engine(), prompts(2))
    engine = make_engine([ReplaySource(ids_of(plain), lambda rest, context: Draft([-1, VOCAB]))])
    assert_same(run(engine, prompts(2)), plain)
    assert engine.metrics.num_spec_steps == 0
    assert engine.metrics.num_accepted_draft_tokens == 0
    # the last token has no room for a draft, and the one before it for one token only
    assert engine.metrics.rejection_causes == {"out_of_vocabulary": 2 * (2 * 37 + 1), "length": 2}


def eos_prompt() -> tuple[list[int], list[int]]:
    """A prompt and its plain output that ends with EOS after some tokens."""
    for first in range(1, VOCAB):
        prompt = [first, 5]
        result = run(make_engine(), {"r": (prompt, params(ignore_eos=False, max_tokens=60))})["r"]
        output = result.outputs[0].token_ids
        if output[-1] == 0 and 8 < len(output) < 40:
            return prompt, output
    raise AssertionError("no prompt ends")


def continued(prompt: list[int], count: int) -> list[int]:
    """Plain output that goes on after EOS: what a source would draft."""
    result = run(make_engine(), {"r": (prompt, params(max_tokens=count))})["r"]
    return result.outputs[0].token_ids


def test_end_of_sequence_inside_accepted_drafts_ends_there():
    prompt, output = eos_prompt()
    source = ReplaySource({"r": continued(prompt, 60)}, lambda rest, context: Draft(rest[:12]))
    engine = make_engine([source])
    result = run(engine, {"r": (prompt, params(ignore_eos=False, max_tokens=60))})["r"]
    assert result.outputs[0].token_ids == output
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", None)
    # drafts that would have been accepted after the end are no draft tokens kept
    assert engine.metrics.num_accepted_draft_tokens < engine.metrics.num_draft_tokens
    assert engine.metrics.rejection_causes["stop"] == engine.metrics.num_rejected_draft_tokens


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_min_tokens_masks_the_end_on_early_rows_only(offset):
    prompt, output = eos_prompt()
    before_end = len(output) - 1
    wanted = params(ignore_eos=False, max_tokens=60, min_tokens=before_end + offset)
    plain = run(make_engine(), {"r": (prompt, wanted)})
    assert (plain["r"].outputs[0].token_ids == output) == (offset <= 0)
    source = ReplaySource(ids_of(plain), lambda rest, context: Draft(rest[:12]))
    assert_same(run(make_engine([source]), {"r": (prompt, wanted)}), plain)
    draft_end = ReplaySource(
        {"r": plain["r"].outputs[0].token_ids}, lambda rest, context: Draft([0])
    )
    assert_same(run(make_engine([draft_end]), {"r": (prompt, wanted)}), plain)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7])
def test_exactly_max_tokens_whatever_the_block(max_tokens):
    """K = 3; no end of sequence is configured at all."""
    wanted = params(ignore_eos=False, max_tokens=max_tokens, logprobs=2)
    full = run(make_engine(eos_token_ids=()), {"r": ([3, 3, 3], params(max_tokens=20))})
    source = ReplaySource(ids_of(full), lambda rest, context: Draft(rest[:3]))
    result = run(make_engine([source], eos_token_ids=()), {"r": ([3, 3, 3], wanted)})["r"]
    output = result.outputs[0]
    assert output.token_ids == full["r"].outputs[0].token_ids[:max_tokens]
    assert len(output.logprobs) == max_tokens
    assert output.finish_reason == "length"
    assert result.metrics.speculative_decoding.num_output_tokens == max_tokens


def test_context_end_is_length():
    target = FakeTarget(VOCAB, max_model_len=20)
    plain = run(make_engine(target=target), {"r": ([1, 2, 3], params(max_tokens=None))})
    assert (len(ids_of(plain)["r"]), plain["r"].outputs[0].finish_reason) == (17, "length")
    source = ReplaySource(ids_of(plain))
    engine = make_engine([source], target=FakeTarget(VOCAB, max_model_len=20))
    assert_same(run(engine, {"r": ([1, 2, 3], params(max_tokens=None))}), plain)


@pytest.mark.parametrize("make", [exact, half_right, tree_with_branch_last])
def test_stop_strings_with_drafts_cut_ids_text_and_logprobs_as_plain(make):
    free = run(make_engine(), prompts(6))
    stops = {name: result.outputs[0].text[9:12] for name, result in free.items()}
    wanted = {
        name: (prompt, params(stop=[stops[name]], logprobs=2))
        for name, (prompt, _) in prompts(6).items()
    }
    plain = run(make_engine(), wanted)
    found = run(make_engine([ReplaySource(ids_of(free), make)]), wanted)
    assert_same(found, plain)
    for name, result in found.items():
        output = result.outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", stops[name])
        assert output.text == free[name].outputs[0].text.split(stops[name])[0]
        assert len(output.token_ids) == len(output.logprobs) == len(output.token_sources) < 40


def test_logprobs_of_accepted_corrected_and_bonus_tokens_are_those_of_plain():
    plain = run(make_engine(), prompts(3, params(logprobs=3)))
    for make in (exact, half_right, all_wrong, tree_with_branch_last):
        found = run(
            make_engine([ReplaySource(ids_of(plain), make)]), prompts(3, params(logprobs=3))
        )
        assert_same(found, plain)
    for entry in plain["r0"].outputs[0].logprobs:
        assert len(entry) == 3
        assert all(value.logprob < 0 for value in entry.values())
        ranked = sorted(entry.values(), key=lambda value: value.rank)
        assert [value.rank for value in ranked] == [1, 2, 3]
        assert ranked[0].logprob >= ranked[1].logprob >= ranked[2].logprob
        token = next(iter(entry))
        assert entry[token].decoded_token == ALPHABET.decode([token], skip_special_tokens=False)


def test_same_seed_same_text_and_another_seed_another():
    wanted = {str(i): ([1, 2, 3], params(temperature=1.0, seed=i // 2)) for i in range(4)}
    found = ids_of(run(make_engine(), wanted))
    assert found["0"] == found["1"] != found["2"] == found["3"]
    assert ids_of(run(make_engine(seed=1), prompts(1, params(temperature=1.0)))) != ids_of(
        run(make_engine(seed=2), prompts(1, params(temperature=1.0)))
    )


def test_every_request_of_a_mixed_batch_equals_its_solo_run():
    mixed = {
        "greedy": ([1, 2, 3], params()),
        "seeded": ([1, 2, 3], params(temperature=1.0, seed=1)),
        "other": ([1, 2, 3], params(temperature=1.0, seed=2, top_k=5)),
        "penalty": ([4, 4, 4], params(frequency_penalty=1.5, repetition_penalty=1.2)),
        "bias": ([4, 4, 4], params(logit_bias={7: 3.0, 8: -100.0}, min_p=0.1)),
        "allowed": ([5], params(allowed_token_ids=[3, 4, 5, 6], temperature=0.7, seed=3)),
        "banned": ([5], params(banned_token_ids=list(range(10)), max_tokens=9)),
        "long": (list(range(1, 30)) * 4, params(temperature=1.2, seed=9, min_tokens=5)),
    }
    solo: dict[str, RequestOutput] = {}
    for name, request in mixed.items():
        solo |= run(make_engine(), {name: request})
    assert_same(run(make_engine(), mixed), solo)
    for make in (exact, half_right, random_tree):
        source = ReplaySource(ids_of(solo), make)
        assert_same(run(make_engine([source], max_num_batched_tokens=64), mixed), solo)


def test_choices_are_independent_and_their_counts_add_up():
    wanted = {"r": ([1, 2, 3], params(n=3, temperature=1.0, seed=4))}
    plain = run(make_engine(), wanted)
    outputs = [output.token_ids for output in plain["r"].outputs]
    assert len({tuple(output) for output in outputs}) == 3
    assert [output.index for output in plain["r"].outputs] == [0, 1, 2]
    one = run(make_engine(), {"r": ([1, 2, 3], params(temperature=1.0, seed=4))})
    assert one["r"].outputs[0].token_ids == outputs[0]
    engine = make_engine([ReplaySource(ids_of(plain))])
    found = run(engine, wanted)
    assert_same(found, plain)
    metrics = found["r"].metrics.speculative_decoding
    assert metrics.num_output_tokens == sum(len(output) for output in outputs) == 120


def test_source_that_stops_drafting_does_not_stop_the_request():
    def short_context(rest, context) -> Draft:
        return Draft(rest[:4] if len(context.token_ids) < 20 else [])

    plain = run(make_engine(), prompts(2))
    engine = make_engine([ReplaySource(ids_of(plain), short_context)])
    found = run(engine, prompts(2))
    assert_same(found, plain)
    assert found["r0"].outputs[0].token_sources[20:] == ["target"] * 20


TINY_KV = {"kv_cache_tokens": 96, "max_num_batched_tokens": 24, "max_num_seqs": 6}


@pytest.mark.parametrize("make", SCRIPTS)
def test_preemption_with_pending_drafts_changes_nothing(make):
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

    from fakes import ROOT, path_hash

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


def test_two_engines_take_turns_on_one_target():
    target = FakeTarget(VOCAB)
    plain_engine = make_engine(target=target)
    plain = run(make_engine(), prompts(3))
    engine = make_engine([ReplaySource(ids_of(plain))], target=target, kv_cache_tokens=512)
    for name, (prompt, sampling) in prompts(3).items():
        engine.add_request(name, prompt, sampling)
        plain_engine.add_request(name, prompt, sampling)
    engine.step()
    plain_engine.step()
    first = engine.step()
    found = drain(plain_engine) if not first else {}
    assert found == {} and first
    while engine.has_work or plain_engine.has_work:
        for each in (engine, plain_engine):
            for chunk in each.step():
                if chunk.result is not None:
                    assert_same(
                        {chunk.request_id: chunk.result},
                        {chunk.request_id: plain[chunk.request_id]},
                    )
            each.check_integrity()


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
        def budgets(self, source, rooms, row_budget):
            return [0] * len(rooms)

    plain = run(make_engine(), prompts(1))
    engine = make_engine([ReplaySource(ids_of(plain))], planner=Nothing())
    assert_same(run(engine, prompts(1)), plain)
    assert engine.metrics.num_draft_tokens == 0
