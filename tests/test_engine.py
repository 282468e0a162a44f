"""Whatever is drafted, the output is that of plain decoding; and what users reported elsewhere.

The fake target notices any mistake in KV, positions or ancestors; the comparison with plain
decoding notices any other.
"""

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
    params,
    prompts,
    random_tree,
    right_with_junk,
    tree_with_branch_last,
    wrong,
)
from fakes import ALPHABET, HALVES, FakeTarget, ReplaySource, make_engine, run

from outrider.drafting.draft_model import DraftModelSource
from outrider.drafting.source import Draft
from outrider.results import RequestOutput


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


def test_accepted_tokens_come_with_what_their_source_gave_for_them():
    plain = run(make_engine(), prompts(1))

    def doubtful(rest, context) -> Draft:
        if len(rest) < 3:
            return Draft()
        return Draft([*rest[:2], wrong(rest[2])], confidence=[0.5, 0.75, 1.0])

    engine = make_engine([ReplaySource(ids_of(plain), doubtful)])
    [output] = run(engine, prompts(1))["r0"].outputs
    assert output.token_confidences[:7] == [None, 0.5, 0.75, None, 0.5, 0.75, None]


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


def test_ids_outside_the_vocabulary_are_rejected_and_never_seen_by_the_target():  # B26
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


def test_stop_string_at_token_three_of_twelve_accepted():
    prompt = [20, 21, 22]
    letters = {"allowed_token_ids": range(1, 27)}
    free = run(make_engine(), {"r": (prompt, params(**letters))})["r"].outputs[0]
    source = ReplaySource({"r": free.token_ids}, lambda rest, context: Draft(rest[:12]))
    # the first token comes with the prompt, so token three of the first block is the fourth
    engine = make_engine([source])
    output = run(engine, {"r": (prompt, params(stop=free.text[2:4], **letters))})["r"].outputs[0]
    assert (output.text, output.token_ids) == (free.text[:2], free.token_ids[:4])
    assert engine.metrics.num_accepted_draft_tokens == 3
    assert engine.metrics.rejection_causes["stop"] == 9


def test_a_draft_model_needs_to_know_nothing_of_stop_strings():
    free = run(make_engine(), prompts(3))
    wanted = {
        name: (prompt, params(stop=[free[name].outputs[0].text[8:10]], logprobs=1))
        for name, (prompt, _) in prompts(3).items()
    }
    plain = run(make_engine(), wanted)
    engine = make_engine([DraftModelSource(FakeTarget(VOCAB), 5)])
    assert_same(run(engine, wanted), plain)
    assert engine.metrics.num_accepted_draft_tokens > 5
    assert {result.outputs[0].finish_reason for result in plain.values()} == {"stop"}


def test_characters_split_over_tokens_and_blocks_stream_whole():
    halves = [ALPHABET.pieces.index(half) for half in HALVES]
    text = [*halves, 1, *halves[2:], *halves[:2], 2, *halves]
    for block in range(1, 6):
        # a target that says the text: biased so strongly that nothing else is possible
        source = ReplaySource({"r": text}, lambda rest, context, n=block: Draft(rest[:n]))
        engine = make_engine([source], target=TalkingTarget(text))
        output = run(engine, {"r": ([5, 6], params(max_tokens=len(text)))})["r"].outputs[0]
        assert output.token_ids == text
        assert output.text == "€🙂a🙂€b€🙂"


class TalkingTarget(FakeTarget):
    """Says a given text after a prompt of two tokens."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(VOCAB)
        self.text = text

    def forward(self, batch):
        output = super().forward(batch)
        places = batch.positions[batch.logits_rows] - 1
        for row, place in enumerate(places.tolist()):
            if place < len(self.text):
                output.logits[row, self.text[place]] = 100.0
        return output
