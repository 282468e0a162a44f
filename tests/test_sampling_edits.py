"""Masks, bias, min_tokens and penalties: every row of a block as plain decoding would have it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import SamplingError
from outrider.sampling_params import SamplingParams
from outrider.target.edits import TextCounts, check_against_vocab, edit_logits
from outrider.target.sampling import RowGroup, choose_tokens, target_probs

EOS = 7
PROMPT = [1, 5, 5]


def edited(group: RowGroup, logits: list[list[float]]) -> np.ndarray:
    values = np.array(logits, np.float32)
    edit_logits(values, group)
    return values


def group_of(
    params: SamplingParams,
    output: list[int],
    draft: list[int] | None = None,
    parents: list[int] | None = None,
) -> RowGroup:
    text = np.array(PROMPT + output, np.int32)
    return RowGroup(params, 5, text, len(PROMPT), 0, draft or [], parents or [], [EOS])


def check_block_is_plain(params: SamplingParams, draft: list[int], parents: list[int]) -> None:
    """Each row of the block must equal a plain step whose text ends with the row's ancestors."""
    output = [2, 3, 3]
    logits = torch.randn(1 + len(draft), 8, generator=torch.Generator().manual_seed(1)) * 2
    block = group_of(params, output, draft, parents)
    block_tokens, block_probs = choose_tokens(logits, [block]), target_probs(logits, block)
    paths: list[list[int]] = [[]]
    for i, token in enumerate(draft):
        paths.append([*paths[(parents[i] if parents else i - 1) + 1], token])
    for row, path in enumerate(paths):
        plain = group_of(params, output + path)
        row_logits = logits[row : row + 1]
        assert choose_tokens(row_logits, [plain])[0] == block_tokens[row]
        assert torch.equal(target_probs(row_logits, plain)[0], block_probs[row])


PARAMS = [
    SamplingParams(temperature=0, frequency_penalty=2.0),
    SamplingParams(temperature=0, frequency_penalty=-2.0),
    SamplingParams(temperature=0, repetition_penalty=1.15),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.3, repetition_penalty=0.8),
    SamplingParams(logit_bias={3: -100.0, 4: 2.5}, top_p=0.9),
    SamplingParams(min_p=0.6),
    SamplingParams(min_tokens=5, stop_token_ids=[0]),
    SamplingParams(allowed_token_ids=[0, 3, 4, 6], banned_token_ids=[4], top_k=2),
    SamplingParams(
        min_tokens=4, logit_bias={EOS: 50.0}, presence_penalty=2.0, temperature=0.3, top_p=0.8
    ),
]


@pytest.mark.parametrize("params", PARAMS)
def test_rows_of_a_block_equal_plain_decoding(params: SamplingParams) -> None:
    check_block_is_plain(params, [3, 3, 3, 4, 3], [])
    check_block_is_plain(params, [3, 4, 3, 3, 0, 4], [-1, -1, 0, 1, 2, 2])


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.floats(-2, 2, width=32)] * 2, st.floats(0.125, 4, width=32)),
    st.lists(st.tuples(st.integers(0, 7), st.integers(-1, 5)), max_size=7),
    st.integers(0, 9),
)
def test_any_tree_equals_plain_decoding(
    penalties: tuple[float, float, float], nodes: list[tuple[int, int]], min_tokens: int
) -> None:
    params = SamplingParams(
        presence_penalty=penalties[0],
        frequency_penalty=penalties[1],
        repetition_penalty=penalties[2],
        min_tokens=min_tokens,
    )
    draft = [token for token, _ in nodes]
    check_block_is_plain(params, draft, [min(p, i - 1) for i, (_, p) in enumerate(nodes)])


def test_min_tokens_masks_the_end_on_the_right_rows() -> None:
    """In tokens, not steps: the end is possible from the row before which m outputs exist."""
    logits = [[0.0] * 7 + [9.0]] * 4
    for minimum, masked in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (9, 4)):
        params = SamplingParams(
            temperature=0, min_tokens=minimum, stop_token_ids=[6], max_tokens=20
        )
        group = group_of(params, [2, 2], [EOS, EOS, EOS])
        found = np.isinf(edited(group, logits))
        assert found[:, EOS].tolist() == [True] * masked + [False] * (4 - masked)
        assert found[:, 6].tolist() == found[:, EOS].tolist()
        assert not found[:, :6].any()
        tokens = choose_tokens(torch.tensor(logits), [group]).tolist()
        assert tokens == [0] * masked + [EOS] * (4 - masked)


def test_penalties_have_the_values_of_plain_decoding() -> None:
    """Prompt 1 5 5, output 2 3 3, draft 3 3: what each token pays at each row."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    values = edited(group_of(params, [2, 3, 3], [3, 3]), [[4.0] * 8, [4.0] * 8, [-4.0] * 8])
    #                0    1         2                3                4    5         6    7
    assert values[0].tolist() == [4, 2, 2 - 0.25 - 0.5, 2 - 0.50 - 0.5, 4, 2, 4, 4]
    assert values[1].tolist() == [4, 2, 2 - 0.25 - 0.5, 2 - 0.75 - 0.5, 4, 2, 4, 4]
    assert values[2].tolist() == [-4, -8, -8 - 0.25 - 0.5, -8 - 1.0 - 0.5, -4, -8, -4, -4]


def test_frequency_and_presence_leave_the_prompt_alone() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    assert edited(group_of(params, [2]), [[3.0] * 8]).tolist() == [[3, 3, 1, 3, 3, 3, 3, 3]]


def test_bias_holds_on_every_row_and_against_the_draft() -> None:
    logits = torch.zeros(4, 8)
    logits[:, 3] = 5.0
    group = group_of(SamplingParams(temperature=0, logit_bias={3: -100.0}), [2], [3, 3, 3])
    assert 3 not in choose_tokens(logits, [group]).tolist()
    sampled = group_of(SamplingParams(logit_bias={3: -100.0}), [2], [3, 3, 3])
    assert float(target_probs(logits, sampled)[:, 3].max()) < 1e-30
    high = group_of(SamplingParams(min_p=0.9), [2], [0, 0, 0])
    assert choose_tokens(logits, [high]).tolist() == [3] * 4


def test_allowed_and_banned_ids() -> None:
    params = SamplingParams(
        allowed_token_ids=[1, 4, 6], banned_token_ids=[4], logit_bias={6: -1.0, 2: 50.0}
    )
    values = edited(group_of(params, []), [[1.0] * 8])[0]
    assert values.tolist() == [-math.inf, 1.0, *[-math.inf] * 4, 0.0, -math.inf]


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1])
def test_impossible_draft_tokens_are_counted_nowhere(bad: int) -> None:
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=1.0)
    with_bad = edited(group_of(params, [2], [3, bad, 4]), [[2.0] * 8] * 4)
    assert with_bad[1].tolist() == with_bad[2].tolist()
    assert with_bad[3, 4] < with_bad[2, 4] and with_bad[3, 7] == 2.0
    assert choose_tokens(torch.zeros(4, 8), [group_of(params, [2], [3, bad, 4])]).min() >= 0


def test_counts_kept_between_steps_equal_fresh_ones() -> None:
    generator = np.random.default_rng(0)
    text = generator.integers(0, 300, 900).astype(np.int32)
    for penalty in (1.0, 1.3):
        params = SamplingParams(repetition_penalty=penalty, frequency_penalty=0.5)
        kept = TextCounts(params, 400)
        for length in (401, 402, 410, 600, 900):
            kept.extend(text[:length])
            fresh = np.bincount(text[400:length], minlength=300)
            known = set(text[:length] if penalty != 1.0 else text[400:length])
            assert set(kept.ids.tolist()) == known
            assert kept.counts.tolist() == fresh[kept.ids].tolist()
            assert kept.of(int(text[0])) == fresh[text[0]]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for name, value in (
        ("logit_bias", {3: 1.0, 8: 1.0}),
        ("allowed_token_ids", [8]),
        ("banned_token_ids", [2, 8]),
    ):
        params = SamplingParams(**{name: value})  # type: ignore[arg-type]
        with pytest.raises(SamplingError, match=rf"{name} holds token id 8, .* 0 to 7"):
            check_against_vocab(params, 8)
        check_against_vocab(params, 9)


def test_a_request_that_leaves_no_token_is_refused() -> None:
    with pytest.raises(SamplingError, match="every token"):
        check_against_vocab(SamplingParams(banned_token_ids=list(range(8))), 8)
    with pytest.raises(SamplingError, match="every token"):
        check_against_vocab(SamplingParams(allowed_token_ids=[2], banned_token_ids=[2]), 8)
    only_eos = SamplingParams(allowed_token_ids=[EOS], min_tokens=2)
    with pytest.raises(SamplingError, match="min_tokens is 2"):
        check_against_vocab(only_eos, 8, [EOS])
    check_against_vocab(SamplingParams(allowed_token_ids=[EOS]), 8, [EOS])
