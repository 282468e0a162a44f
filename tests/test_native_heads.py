"""What a drafter computes around its layers: against torch, and row by row."""

from typing import Any

import numpy as np
import pytest
import torch
from drafter_cases import HIDDEN, toy_drafter

from outrider.drafters import native_heads
from outrider.drafters.dspark import DSpark
from outrider.drafters.native_heads import (
    MarkovChains,
    MedusaHeads,
    PackedLinear,
    input_projection,
)
from outrider.native import library

BOTH = [
    pytest.param(True, marks=pytest.mark.skipif(library() is None, reason="no kernels")),
    False,
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=BOTH, ids=["compiled", "torch"])
def compiled(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(native_heads, "library", lambda: None)
    return request.param


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def markov_head(rank: int = 6) -> DSpark:
    drafter = toy_drafter("dspark", markov_rank=rank)
    assert isinstance(drafter, DSpark)
    return drafter


def chains(rank: int, dtype: torch.dtype = torch.float32) -> MarkovChains:
    drafter = markov_head(rank)
    assert drafter.markov_head is not None
    return MarkovChains(drafter.markov_head, drafter.d2t, dtype)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "mtp", "eagle3 normed features"])
@pytest.mark.parametrize("count", [1, 3, 30])
def test_the_input_of_a_drafter_is_that_of_its_modules(kind: str, count: int) -> None:
    drafter: Any = toy_drafter(kind)
    packed = input_projection(drafter, torch.float32)
    assert packed is not None
    features = randn(count, drafter.config.feature_size)
    with torch.no_grad():
        if kind == "mtp":
            parts = randn(count, HIDDEN), randn(count, HIDDEN, seed=1)
            found, expected = packed(*parts), drafter.joins[0](*parts)
        elif kind.startswith("eagle3"):
            found, expected = packed(features), drafter.first_state(features)
        else:
            found, expected = packed(features), drafter.fuse(features)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_drafters_of_tokens_alone_have_no_such_layer() -> None:
    assert input_projection(toy_drafter("pard"), torch.float32) is None


@pytest.mark.parametrize("outputs", [7, 16, 33, 80])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_with_a_bias(outputs: int, dtype: torch.dtype, compiled: bool) -> None:
    weight, bias, x = randn(outputs, 32), randn(outputs, seed=1), randn(14, 32, seed=2)
    found = PackedLinear(weight, dtype, bias=bias)(x)
    exact = x.to(dtype).double() @ weight.to(dtype).double().T + bias.double()
    # The compiled sums are float32 to their end; torch rounds those of bf16.
    rounding = 2**-7 if dtype == torch.bfloat16 and not compiled else 1e-5
    assert (found - exact).abs().max() < rounding * exact.abs().max()


@pytest.mark.skipif(library() is None, reason="no kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_alone(dtype: torch.dtype) -> None:
    packed = PackedLinear(
        randn(48, 64), dtype, (randn(32), None), last_norm=randn(48, seed=3), epsilon=1e-6
    )
    parts = randn(20, 32, seed=1), randn(20, 32, seed=2)
    together = packed(*parts)
    for row in range(20):
        assert torch.equal(packed(*(part[row : row + 1] for part in parts))[0], together[row])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("layers", [1, 3])
def test_the_heads_of_medusa(layers: int) -> None:
    drafter: Any = toy_drafter("medusa", num_layers=layers)
    features, counts = randn(3, HIDDEN), [7, 1, 4]
    with torch.no_grad():
        states = drafter.states(features)  # [R, L, H]
        kept = torch.cat([row[:count] for row, count in zip(states, counts, strict=True)])
        expected = drafter.logits(kept)
    found = MedusaHeads(drafter, torch.float32).logits(features, counts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("rank", [6, 5])
def test_greedy_chains_follow_the_bias_of_their_own_tokens(rank: int) -> None:
    drafter = markov_head(rank)
    head = drafter.markov_head
    assert head is not None
    counts, anchors = [3, 1, 7, 2], np.array([5, 90, 0, 41], np.int32)
    logits = randn(13, len(drafter.d2t)) * 2
    before = logits.clone()
    tokens, probs = chains(rank).greedy(logits, counts, anchors)
    assert torch.equal(logits, before)
    row = 0
    for count, anchor in zip(counts, anchors.tolist(), strict=True):
        last = anchor
        for _ in range(count):
            with torch.no_grad():
                bias, _ = head(torch.tensor([last]), torch.zeros(1, HIDDEN), None)
            biased = (logits[row] + bias[0]).double()
            assert tokens[row] == drafter.d2t[biased.argmax()]
            assert probs[row] == pytest.approx(float(biased.softmax(0).max()), rel=1e-5)
            last, row = int(tokens[row]), row + 1
    assert row == 13


@pytest.mark.usefixtures("compiled")
def test_the_bias_alone_is_added_in_place() -> None:
    drafter = markov_head()
    head = drafter.markov_head
    assert head is not None
    before = np.array([3, 95, 17], np.int32)
    logits = randn(3, len(drafter.d2t))
    with torch.no_grad():
        expected = logits + head(torch.from_numpy(before).long(), logits, None)[0]
    chains(6).add_bias(logits, before)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("compiled")
def test_the_first_of_equal_columns_is_chosen_and_minus_infinity_never() -> None:
    drafter = markov_head()
    columns = len(drafter.d2t)
    head = drafter.markov_head
    assert head is not None
    with torch.no_grad():
        head.markov_w2.weight.zero_()
    some = MarkovChains(head, drafter.d2t, torch.float32)
    logits = torch.full((3, columns), -torch.inf)
    logits[0, [3, 40, columns - 1]] = -1e30
    logits[1, columns - 1] = 2.0
    logits[2, [17, 18]] = 1.0
    tokens, probs = some.greedy(logits, [1, 1, 1], np.zeros(3, np.int32))
    assert tokens.tolist() == [int(drafter.d2t[i]) for i in (3, columns - 1, 17)]
    assert probs.tolist() == pytest.approx([1 / 3, 1.0, 0.5])


@pytest.mark.skipif(library() is None, reason="no kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_chains_do_not_depend_on_each_other_or_on_threads(dtype: torch.dtype) -> None:
    lib = library()
    assert lib is not None
    some = chains(6, dtype)
    logits = randn(40, 70)
    anchors = np.arange(20, dtype=np.int32)
    threads = lib.outrider_num_threads()
    tokens, probs = some.greedy(logits, [2] * 20, anchors)
    try:
        lib.outrider_set_num_threads(3)
        for chain in range(20):
            rows = slice(2 * chain, 2 * chain + 2)
            alone = some.greedy(logits[rows], [2], anchors[chain : chain + 1])
            assert np.array_equal(alone[0], tokens[rows])
            assert np.array_equal(alone[1], probs[rows])
    finally:
        lib.outrider_set_num_threads(threads)


@pytest.mark.skipif(library() is None, reason="no kernels")
def test_in_bfloat16_the_matrices_are_rounded_and_nothing_else() -> None:
    drafter = markov_head()
    head = drafter.markov_head
    assert head is not None
    with torch.no_grad():
        for weight in (head.markov_w1.weight, head.markov_w2.weight):
            weight.copy_(weight.bfloat16().float())
    before, logits = np.array([8, 30], np.int32), randn(2, len(drafter.d2t))
    exact = logits.clone()
    MarkovChains(head, drafter.d2t, torch.float32).add_bias(exact, before)
    MarkovChains(head, drafter.d2t, torch.bfloat16).add_bias(logits, before)
    torch.testing.assert_close(logits, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_both_paths_choose_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, anchors = randn(35, 70, seed=seed), np.arange(5, dtype=np.int32)
    compiled = chains(8).greedy(logits, [7] * 5, anchors)
    monkeypatch.setattr(native_heads, "library", lambda: None)
    plain = chains(8).greedy(logits, [7] * 5, anchors)
    assert np.array_equal(compiled[0], plain[0])
    np.testing.assert_allclose(compiled[1], plain[1], rtol=1e-4)
