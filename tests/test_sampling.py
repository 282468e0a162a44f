"""Choosing tokens: filters, noise, independence of rows, log probabilities.

Everything runs on the compiled kernels and on plain torch.
"""

import math

import numpy as np
import pytest
import torch

from outrider.sampling_params import SamplingParams
from outrider.target import sampling
from outrider.target.noise import exponentials, mix
from outrider.target.sampling import (
    RowGroup,
    choose_tokens,
    draw_drafts,
    noise_key,
    raw_logprobs,
    target_probs,
)

TEXT = np.array([1, 2, 0], np.int32)


@pytest.fixture(params=["native", "plain"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(sampling, "library", lambda: None)
    elif sampling.library() is None:
        pytest.skip("no compiler")
    return request.param


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def one_row(params: SamplingParams, key: int = 1, first_row: int = 0) -> RowGroup:
    return RowGroup(params, key, TEXT, 2, first_row)


def many_tokens(logits: list[float], params: SamplingParams, count: int) -> np.ndarray:
    """Tokens of one distribution under `count` different seeds."""
    groups = [one_row(params, noise_key(seed, 0), seed) for seed in range(count)]
    return choose_tokens(torch.tensor([logits]).expand(count, -1).contiguous(), groups)


def reference_probs(logits: list[float], params: SamplingParams) -> list[float]:
    """The warped distribution by the book: sort, walk, keep equals."""
    top = max(logits)
    weight = {i: math.exp((x - top) / params.temperature) for i, x in enumerate(logits)}
    kept = {i for i in weight if weight[i] >= params.min_p * (1 - 1e-9)}
    order = sorted(kept, key=lambda i: -logits[i])
    if params.top_k > 0:
        kept = {i for i in kept if logits[i] >= logits[order[: params.top_k][-1]]}
    total = sum(weight[i] for i in kept)
    kept = {
        i
        for i in kept
        if sum(weight[j] for j in kept if logits[j] > logits[i]) < params.top_p * total
    }
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in weight]


def chi_square(tokens: np.ndarray, probs: list[float]) -> float:
    """Chi-square statistic; tokens of probability 0 must not occur."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert all(counts[i] == 0 for i, p in enumerate(probs) if p == 0)
    expected = np.array([p * len(tokens) for p in probs if p > 0])
    return float(((counts[np.array(probs) > 0] - expected) ** 2 / expected).sum())


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=3),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=0.7, top_k=4, top_p=0.9),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.5, min_p=0.1, top_k=5, top_p=0.7),
    SamplingParams(top_k=-1, top_p=0.01),
]
LOGITS = [0.3, 1.7, -0.4, 1.1, -2.0, 0.9]


@pytest.mark.parametrize("params", FILTERS)
def test_probabilities_are_those_of_the_book(params: SamplingParams) -> None:
    found = target_probs(rows(LOGITS), one_row(params))[0].tolist()
    assert found == pytest.approx(reference_probs(LOGITS, params), abs=1e-6)


@pytest.mark.parametrize("params", FILTERS)
def test_tokens_occur_as_often_as_their_probability_says(params: SamplingParams) -> None:
    tokens = many_tokens(LOGITS, params, 4000)
    # 25.7: exceeded once in 10,000 with 5 degrees of freedom
    assert chi_square(tokens, target_probs(rows(LOGITS), one_row(params))[0].tolist()) < 25.7


def test_two_successive_tokens_are_independent() -> None:
    logits = torch.tensor([0.5, 0.0, -0.5]).expand(6000, -1).contiguous()
    groups = [
        RowGroup(SamplingParams(), noise_key(seed, 0), TEXT, 2, 2 * seed, [1])
        for seed in range(3000)
    ]
    first, second = choose_tokens(logits, groups).reshape(-1, 2).T
    single = target_probs(logits, groups[0])[0].double()
    joint = torch.outer(single, single).flatten().tolist()
    assert chi_square(first * 3 + second, joint) < 32.0  # once in 10,000 with 8 degrees


def test_equal_logits_at_a_border_all_stay() -> None:
    logits = rows([2.0, 1.0, 1.0, 1.0, 0.0])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        assert (target_probs(logits, one_row(params))[0] > 0).tolist() == [True] * 4 + [False]


def test_top_p_that_is_met_exactly_ends_there() -> None:
    logits = rows([math.log(4), math.log(2), math.log(1), math.log(1)])  # 1/2, 1/4, 1/8, 1/8
    for top_p, kept in ((0.49, 1), (0.51, 2), (0.74, 2), (0.76, 4), (1.0, 4)):
        probs = target_probs(logits, one_row(SamplingParams(top_p=top_p)))[0]
        assert int((probs > 0).sum()) == kept, top_p


def test_noise_is_the_documented_function() -> None:
    """The token is the first to arrive in a race of exponential variates (Gumbel-max)."""
    logits = torch.randn(200, 40, generator=torch.Generator().manual_seed(1))
    groups = [one_row(SamplingParams(), noise_key(7, row), row) for row in range(200)]
    probs = torch.softmax(logits.double(), 1).numpy()
    expected = [
        np.argmin(exponentials(mix(noise_key(7, row), len(TEXT)), np.arange(40)) / probs[row])
        for row in range(200)
    ]
    assert choose_tokens(logits, groups).tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_whatever_the_filters_say(temperature: float) -> None:
    logits = rows([0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 5.0, 5.0])
    params = SamplingParams(temperature=temperature, top_p=0.3, top_k=2, min_p=0.5)
    groups = [one_row(params, 3), one_row(params, 4, 1)]
    assert choose_tokens(logits, groups).tolist() == [1, 0]  # ties go to the lowest id
    probs = target_probs(logits, groups[1])
    assert probs.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_temperature_unset_really_samples() -> None:
    assert len(set(many_tokens(LOGITS, SamplingParams(top_k=50), 60).tolist())) > 2


def test_very_low_temperature_has_no_nan() -> None:
    params = SamplingParams(temperature=1.1e-5, top_p=0.9, min_p=0.1)
    assert set(many_tokens(LOGITS, params, 50).tolist()) == {1}
    probs = target_probs(rows(LOGITS), one_row(params))
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]]


def test_same_seed_same_tokens_and_other_seeds_others() -> None:
    logits = torch.zeros(30, 50)

    def tokens(seed: int, choice: int = 0) -> list[int]:
        group = RowGroup(SamplingParams(), noise_key(seed, choice), TEXT, 2, 0, [0] * 29)
        return choose_tokens(logits, [group]).tolist()

    assert tokens(5) == tokens(5)
    others = [tokens(6), tokens(5, 1), tokens(-5), tokens(2**62)]
    matches = [sum(a == b for a, b in zip(tokens(5), other, strict=True)) for other in others]
    assert max(matches) < 6  # 30 / 50 expected by chance
    assert len(set(tokens(5))) > 15  # positions differ as well


def test_every_bit_of_a_noise_key_depends_on_seed_and_choice() -> None:
    for seed, choice in ((0, 0), (1, 0), (123456789, 7)):
        key = noise_key(seed, choice)
        for other in [noise_key(seed ^ 1 << bit, choice) for bit in range(63)]:
            assert 12 <= (key ^ other).bit_count() <= 52
        assert 12 <= (key ^ noise_key(seed, choice + 1)).bit_count() <= 52
        assert 0 <= key < 2**64


def test_a_row_does_not_depend_on_what_shares_the_call() -> None:
    logits = torch.randn(40, 700, generator=torch.Generator().manual_seed(3)) * 3
    together = [
        one_row(params, noise_key(row, 0), row)
        for row, params in enumerate(FILTERS * 5)
    ]  # fmt: skip
    alone = [
        choose_tokens(
            logits[row : row + 1], [one_row(group.params, group.noise_key)]
        )[0]
        for row, group in enumerate(together)
    ]  # fmt: skip
    assert choose_tokens(logits, together).tolist() == alone
    shuffled = [together[i] for i in np.random.default_rng(0).permutation(40)]
    assert choose_tokens(logits, shuffled).tolist() == alone
    for row in (0, 5, 30):  # an unaligned view of a wider tensor
        wide = torch.randn(1, 703)
        wide[0, 3:] = logits[row]
        group = one_row(together[row].params, together[row].noise_key)
        assert choose_tokens(wide[:, 3:], [group])[0] == alone[row]
        probs = target_probs(logits, together[row])
        assert torch.equal(target_probs(wide[:, 3:], group), probs)


def test_rows_of_a_chain_are_those_of_plain_decoding() -> None:
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(4))
    params = SamplingParams(temperature=0.9, top_p=0.95)
    block = choose_tokens(logits, [RowGroup(params, 11, TEXT, 2, 0, [4, 5, 6, 7, 8])])
    for row in range(6):
        text = np.array([*TEXT, *[4, 5, 6, 7, 8][:row]], np.int32)
        assert (
            choose_tokens(logits[row : row + 1], [RowGroup(params, 11, text, 2, 0)]) == block[row]
        )


def test_noise_of_a_tree_goes_by_depth() -> None:
    logits = torch.zeros(5, 1000)
    tree = RowGroup(SamplingParams(), 9, TEXT, 2, 0, [3, 4, 5, 6], [-1, -1, 0, 1])
    root, a, b, c, d = choose_tokens(logits, [tree]).tolist()
    chain = choose_tokens(logits[:3], [RowGroup(SamplingParams(), 9, TEXT, 2, 0, [3, 5])]).tolist()
    assert a == b and c == d
    assert [root, a, c] == chain and len(set(chain)) == 3


def test_rows_without_a_group_get_no_token_and_logits_stay() -> None:
    logits = torch.randn(4, 20)
    before = logits.clone()
    params = SamplingParams(logit_bias={3: 50.0}, top_k=2)
    assert choose_tokens(logits, [one_row(params, 1, 2)]).tolist() == [-1, -1, 3, -1]
    target_probs(logits, one_row(params, 1, 2))
    assert torch.equal(logits, before)


def test_masked_logits_are_never_chosen() -> None:
    logits = torch.full((15, 3000), -math.inf)
    logits[:, [17, 2999]] = 0.0
    for params in FILTERS[:6]:
        groups = [one_row(params, noise_key(row, 1), row) for row in range(15)]
        assert set(choose_tokens(logits, groups).tolist()) == {17, 2999}


@pytest.mark.parametrize("size", [3, 16, 17, 1000, 20_000])
def test_native_and_plain_agree(size: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "plain":
        pytest.skip("compares the two")
    generator = torch.Generator().manual_seed(size)
    for scale in (0.0, 0.5, 4.0):
        logits = torch.randn(len(FILTERS), size, generator=generator).bfloat16().float() * scale
        groups = [one_row(p, noise_key(size, i), i) for i, p in enumerate(FILTERS)]
        tokens, probs = draw_drafts(logits, groups)
        warped = target_probs(logits, groups[6])
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "library", lambda: None)
            plain_tokens, plain_probs = draw_drafts(logits, groups)
            plain_warped = target_probs(logits, groups[6])
        assert tokens.tolist() == plain_tokens.tolist()
        np.testing.assert_allclose(probs, plain_probs, rtol=1e-4)
        torch.testing.assert_close(warped, plain_warped, rtol=1e-4, atol=1e-7)


def test_a_long_flat_row_keeps_the_right_number_of_tokens() -> None:
    """The border is searched around a guess in long rows; a wrong guess must not show."""
    values = torch.arange(30_000) / 30_000  # weights nearly equal
    logits = values[torch.randperm(30_000, generator=torch.Generator().manual_seed(0))][None]
    for top_p in (0.02, 0.5, 0.97):
        weights = torch.exp(values.double()).flip(0)
        expected = int((weights.cumsum(0) < top_p * weights.sum()).sum()) + 1
        kept = int((target_probs(logits, one_row(SamplingParams(top_p=top_p))) > 0).sum())
        assert abs(kept - expected) <= 1  # rounding of the sums at the border
    for top_k in (1, 7, 800, 25_000):
        probs = target_probs(logits, one_row(SamplingParams(top_k=top_k)))[0]
        assert (probs > 0).tolist() == (logits[0] >= values[-top_k]).tolist()


# ---- drafts ---------------------------------------------------------------------------------


def test_a_draft_from_the_same_logits_is_what_the_target_chooses() -> None:
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(temperature=0.8, top_p=0.9)
    groups = [one_row(params, noise_key(row, 0), row) for row in range(20)]
    tokens, probs = draw_drafts(logits, groups)
    assert tokens.tolist() == choose_tokens(logits, groups).tolist()
    for row, group in enumerate(groups):
        assert probs[row] == pytest.approx(
            float(target_probs(logits, group)[0, tokens[row]]), rel=1e-5
        )


def test_coupled_drafts_agree_as_often_as_theory_promises() -> None:
    target, draft = [1.0, 0.5, 0.0, -0.5], [0.5, 0.9, 0.1, -0.2]
    agree = many_tokens(target, SamplingParams(), 3000) == many_tokens(
        draft, SamplingParams(), 3000
    )
    p, q = torch.softmax(rows(target, draft).double(), 1)
    distance = float((p - q).abs().sum()) / 2
    # Gumbel coupling agrees at least this often; 0.02 is over two standard deviations.
    assert agree.mean() > (1 - distance) / (1 + distance) - 0.02


def test_a_greedy_draft_reports_its_probability_at_temperature_one() -> None:
    tokens, probs = draw_drafts(rows(LOGITS), [one_row(SamplingParams(temperature=0))])
    assert tokens.tolist() == [1]
    assert probs[0] == pytest.approx(reference_probs(LOGITS, SamplingParams())[1], rel=1e-5)


def test_reduced_draft_vocabulary_uses_the_targets_ids() -> None:
    id_map = np.array([2, 3, 11, 30, 31, 57], np.int32)
    logits = torch.full((100, 64), -math.inf)
    logits[:, id_map.tolist()] = torch.randn(100, 6, generator=torch.Generator().manual_seed(6))
    small = logits[:, id_map.tolist()].contiguous()
    for params in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(temperature=0)):
        groups = [one_row(params, noise_key(row, 0), row) for row in range(100)]
        tokens, _ = draw_drafts(small, groups, id_map)
        assert tokens.tolist() == choose_tokens(logits, groups).tolist()


# ---- log probabilities ----------------------------------------------------------------------


def test_logprobs_are_the_raw_models() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(8)) * 2
    expected = torch.log_softmax(logits.double(), 1)
    chosen = [4, 299, int(logits[2].argmax()), 0, 17]
    for row, entries in enumerate(raw_logprobs(logits, chosen, 3)):
        best = torch.argsort(logits[row], descending=True)[:3].tolist()
        assert list(entries) == list(dict.fromkeys([chosen[row], *best]))
        for place, token_id in enumerate(best, 1):
            assert entries[token_id].rank == place
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(float(expected[row, token_id]), abs=1e-5)
            assert entry.rank == 1 + int((logits[row] > logits[row, token_id]).sum())


def test_logprobs_rank_equals_by_id() -> None:
    [entries] = raw_logprobs(rows([1.0, 2.0, 1.0, 2.0, 1.0]), [2], 4)
    assert [(i, entry.rank) for i, entry in entries.items()] == [(2, 4), (1, 1), (3, 2), (0, 3)]
    [entries] = raw_logprobs(rows([0.0, -math.inf]), [0], 2)  # what cannot be is not listed
    assert list(entries) == [0] and entries[0].logprob == 0.0


def test_logprobs_of_a_block_are_those_of_single_rows() -> None:
    logits = torch.randn(9, 1234, generator=torch.Generator().manual_seed(9))
    chosen = choose_tokens(logits, [RowGroup(SamplingParams(), 1, TEXT, 2, 0, [1] * 8)])
    for num_top in (0, 5, 2000):
        block = raw_logprobs(logits, chosen, num_top)
        single = [
            raw_logprobs(logits[row : row + 1], chosen[row : row + 1], num_top)[0]
            for row in range(9)
        ]
        assert block == single
        assert [len(entries) in (num_top, num_top + 1, 1234) for entries in block] == [True] * 9
        assert all(entry.logprob < 0 for entries in block for entry in entries.values())
